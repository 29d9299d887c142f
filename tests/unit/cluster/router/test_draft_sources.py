"""Which sources may draft for a request: by what is configured, what it names, and its acceptance rule."""

import numpy as np
import pytest

from actors.drafters.registry import create_drafters
from actors.messages import GenerationRequest, SamplingParams
from cluster.router.draft_sources import AllowedSources, DraftSources, WorkerSource
from cluster.router.merged_trees import MAX_SOURCES
from paceline_testing.rounds import serve, toy_core, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

CPU = ("cache", "suffix")


def sources(*configured: str, has_head: bool = True) -> DraftSources:
    return DraftSources(CPU, configured, has_head)


def request(*drafters: str, acceptance: str = "coupled") -> GenerationRequest:
    return toy_request(drafters=drafters or None, sampling=SamplingParams(seed=0, acceptance=acceptance))


def test_sources_have_the_order_of_the_planner_and_ouroboros_is_there_only_where_it_is_configured():
    assert sources("auto").names == ("cache", "suffix", "eagle", "draft_model")
    assert sources("ouroboros").names == ("cache", "suffix", "eagle", "ouroboros", "draft_model")
    without = sources("auto", has_head=False)
    assert (without.names, without.head) == (("cache", "suffix", "draft_model"), None)


def test_further_draft_models_are_sources_of_their_names_and_of_pools_of_their_own():
    known = DraftSources(CPU, ("auto", "ouroboros"), False, ("draft", "code"))
    assert known.names == ("cache", "suffix", "ouroboros", "draft_model", "draft_model.code")
    assert known.of_pools == ((2, 3), (4,))
    first, code = WorkerSource(2, "lookahead"), WorkerSource(4, pool=1)
    assert known.allowed(request()).workers == (first, code)
    assert known.allowed(request("draft_model.code")) == AllowedSources((), None, (code,))
    assert known.allowed(request("draft_model", acceptance="rejection")).workers == (WorkerSource(3),)


def test_auto_allows_every_source_and_a_name_only_its_own():
    known = sources("auto")
    assert known.allowed(request()) == AllowedSources((0, 1), 2, (WorkerSource(3),))
    assert known.allowed(request("suffix")) == AllowedSources((1,))
    assert known.allowed(request("eagle", "draft_model")) == AllowedSources((), 2, (WorkerSource(3),))
    assert not known.allowed(request("prediction"))


def test_a_sequence_that_may_use_ouroboros_does_not_use_trees():
    known = sources("ouroboros", "draft_model")
    assert known.allowed(request()) == AllowedSources((), None, (WorkerSource(3, "lookahead"),))
    assert known.allowed(request("draft_model")) == AllowedSources((), None, (WorkerSource(4),))


def test_under_rejection_sources_are_the_same():
    known = sources("auto", "ouroboros")
    for names in ((), ("suffix",), ("ouroboros",), ("draft_model",)):
        assert known.allowed(request(*names, acceptance="rejection")) == known.allowed(request(*names))


def test_drafters_that_can_propose_nothing_for_a_request_have_no_part_in_its_rounds(monkeypatch):
    drafters = create_drafters(("cache", "prediction", "retrieval", "suffix"))
    core, target = toy_core(toy_info(64), drafters=drafters), ToyTarget(64)
    asked: list[str] = []
    for name, drafter in drafters.items():
        propose = drafter.propose
        monkeypatch.setattr(
            drafter, "propose", lambda contexts, name=name, propose=propose: asked.append(name) or propose(contexts)
        )
    core.add(toy_request("plain"), 0.0)
    serve(core, target.verify)
    assert set(asked) == {"suffix"}
    core.add(toy_request("predicted", prediction_token_ids=np.arange(4, dtype=np.int32)), 0.0)
    serve(core, target.verify)
    assert set(asked) == {"prediction", "suffix"}


@pytest.mark.parametrize("names", [("eagle",), tuple(map(str, range(MAX_SOURCES)))])
def test_names_of_other_sources_and_too_many_drafters_are_refused(names: tuple[str, ...]):
    with pytest.raises(ValueError, match="at most 58 drafters, none named eagle, ouroboros, draft_model"):
        DraftSources(names, (), False)
