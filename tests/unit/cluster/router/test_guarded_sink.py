"""What the router tells a token sink: every token that may be learnt from, once, under its place; and no fault of it
reaches a round."""

import logging
from collections import defaultdict

import numpy as np
import pytest

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter
from cache_service.formats.documents import DOCUMENT_ID_BYTES
from cluster.router.guarded_sink import SharedLearning
from paceline_testing.rounds import serve, texts_of, toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_drafters import ChainDrafter, right
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 97
EOS = 96


class Sink:
    """Keeps every call by method, with copies of the arrays."""

    def __init__(self):
        self.calls = defaultdict(list)
        self.gone = []

    def __getattr__(self, method):
        def call(*arguments):
            copies = [one.tolist() if isinstance(one, np.ndarray) else one for one in arguments]
            self.calls[method].append(tuple(copies))

        return call

    def ended(self, learner):
        gone, self.gone = self.gone, []
        return gone

    @property
    def watched(self):
        return [namespace for namespace, _ in self.calls["watch"]]

    @property
    def documents(self):
        """Prompt and output of each document; its pieces follow one another without a gap."""
        found = {(namespace, document_id): tokens for namespace, document_id, tokens in self.calls["prompted"]}
        assert len(found) == len(self.calls["prompted"])
        for namespace, document_id, offset, piece in self.calls["committed"]:
            assert piece
            assert len(document_id) == DOCUMENT_ID_BYTES
            assert offset == len(found[namespace, document_id])
            found[namespace, document_id] = found[namespace, document_id] + piece
        return sorted((namespace, tokens) for (namespace, _), tokens in found.items())


class Broken:
    def follow(self, *_):
        raise RuntimeError("follow")

    prompted = committed = finished = bounded = watch = ended = follow


class Contexts(CpuDrafter):
    """A drafter that keeps the contexts it is shown."""

    name = "contexts"

    def __init__(self):
        self.seen = []

    def propose(self, contexts):
        self.seen += contexts
        return [DraftTree.empty()] * len(contexts)


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def target():
    return ToyTarget(VOCAB_SIZE)


def request(name="r", prompt=(1, 2, 3), **fields):
    return toy_request(name, prompt, **{"max_new_tokens": 30, "stop_token_ids": (EOS,)} | fields)


def make_core(sink, *requests, drafters=None):
    return toy_core(toy_info(VOCAB_SIZE), *requests, drafters=drafters, shared=SharedLearning(token_sink=sink))


def run(core, target):
    return texts_of(serve(core, target.verify))


@pytest.mark.parametrize("drafts", [False, True])
def test_every_committed_token_is_told_once_where_it_stands(sink, drafts):
    target = ToyTarget(VOCAB_SIZE, eos_token_id=EOS, total_blocks=24)  # too few for all: some are preempted
    requests = [request(f"r{n}", prompt=range(1, 4 + n), namespace=f"tenant{n % 2}") for n in range(6)]
    core = make_core(sink, *requests, drafters={"right": ChainDrafter(right(target, 5))} if drafts else {})
    texts = run(core, target)
    assert core.counters.preempted > 0
    wanted = [(one.namespace, [*one.prompt_token_ids.tolist(), *texts[one.request_id]]) for one in requests]
    assert sink.documents == sorted(wanted)
    assert [target.complete(one)[0] for one in requests] == [texts[one.request_id] for one in requests]
    assert core.counters.sink_faults == 0


@pytest.mark.parametrize("cache", ["off", "read"])
def test_a_request_that_may_not_be_learnt_from_is_not_told(sink, cache):
    core = make_core(sink, request(cache=cache, namespace="a", readable=("b", "c")))
    run(core, ToyTarget(VOCAB_SIZE))
    assert sink.documents == []
    assert sink.calls["follow"] == ([(("a", "b", "c"),)] if cache == "read" else [])


@pytest.mark.parametrize("cache", ["off", "read", "read_write"])
@pytest.mark.parametrize("cache_bytes", [None, 1000])
def test_how_much_a_tenant_may_add_is_told_with_a_request_that_adds(sink, cache, cache_bytes):
    core = make_core(sink, request(cache=cache, namespace="a", tenant="t", cache_bytes=cache_bytes))
    run(core, ToyTarget(VOCAB_SIZE))
    assert sink.calls["bounded"] == ([("a", "t", cache_bytes)] if cache == "read_write" else [])


@pytest.mark.parametrize("cache", ["off", "read", "read_write"])
def test_what_the_cache_has_earned_is_told_at_the_end_of_a_request(sink, target, cache):
    core = make_core(sink, drafters={"cache": ChainDrafter(right(target, 5))})
    core.add(request(cache=cache, namespace="a"), 0.0)
    (text,) = run(core, target).values()
    if cache == "off":
        assert sink.calls["finished"] == []
        return
    ((namespace, earned),) = sink.calls["finished"]
    assert (namespace, earned.requests, earned.hits) == ("a", 1, 1)
    assert earned.rounds + earned.accepted_tokens == len(text), "a round emits one token, and what was drafted right"
    accepted = earned.right_as_expected + earned.right_better + earned.right_worse
    proposed = earned.proposed_as_expected + earned.proposed_better + earned.proposed_worse
    assert accepted == earned.accepted_tokens == proposed, "nobody else drafts, and every draft is right"
    assert earned.right_as_expected > 0, "of a new text nothing is known yet"
    assert (earned.proposed_worse, earned.shares_right["worse"]) == (0, None)


def test_a_whole_answer_is_offered_where_the_request_says_so_and_no_part_of_one_is(sink, target):
    core = make_core(sink, request("whole", promotes="org"))
    text = run(core, target)["whole"]
    assert sink.calls["answered"] == [("org", text)]
    resumed = {"prompt": (1, 2, 3, *text[:10]), "num_output_in_prompt": 10, "max_new_tokens": 20}
    core.add(request("resumed", promotes="org", **resumed), 0.0)
    run(core, target)
    assert sink.calls["answered"] == 2 * [("org", text)]
    for name, fields in {"own": {}, "read": {"promotes": "org", "cache": "read"}}.items():
        core.add(request(name, **fields), 0.0)
    core.add(request("cancelled", promotes="org"), 0.0)
    toy_round(core, target.verify)
    core.cancel("cancelled")
    run(core, target)
    assert len(sink.calls["answered"]) == 2
    assert core.counters.sink_faults == 0


def test_an_answer_that_stops_at_once_has_nothing_to_tell(sink):
    class AtOnce(ToyTarget):
        def next_token(self, tokens):
            return EOS

    core = make_core(sink, request())
    assert run(core, AtOnce(VOCAB_SIZE)) == {"r": []}
    assert not sink.calls["prompted"] + sink.calls["committed"]


def test_a_stream_that_another_router_has_begun_goes_on_where_it_stood(sink, target):
    core = make_core(sink, request("whole"))
    text = run(core, target)["whole"]
    core.add(request("rest", prompt=(1, 2, 3, *text[:10]), num_output_in_prompt=10, max_new_tokens=20), 0.0)
    run(core, target)
    one, other = sink.documents
    assert one == other


def test_requests_of_one_name_are_other_documents_and_so_are_those_of_another_router(sink, target):
    for _ in range(2):
        core = make_core(sink)
        for _ in range(2):
            core.add(request("same"), 0.0)
            run(core, target)
    assert len(sink.documents) == 4


def test_drafters_are_told_what_a_sequence_may_read():
    drafter = Contexts()
    core = make_core(None, drafters={"contexts": drafter})
    core.add(request("a", namespace="own", readable=("group", "public")), 0.0)
    core.add(request("b", namespace="own", cache="off"), 0.0)
    run(core, ToyTarget(VOCAB_SIZE))
    scopes = {(context.namespace, context.readable, context.reads_cache) for context in drafter.seen}
    assert scopes == {("own", ("group", "public"), True), ("own", (), False)}


def test_a_namespace_that_has_ended_is_watched_again_for_the_requests_that_are_there(sink):
    requests = [request(name, namespace=name[0]) for name in ("a 1", "a 2", "b 1")]
    core = make_core(sink, *requests)
    assert sink.watched == ["a", "a", "b"]
    sink.gone = ["a", "nobody's"]
    core.exchange(0.0)
    assert sink.watched == ["a", "a", "b", "a"]
    core.exchange(0.0)
    run(core, ToyTarget(VOCAB_SIZE))
    sink.gone = ["a"]
    core.exchange(0.0)
    assert sink.watched == ["a", "a", "b", "a"]
    assert core.counters.sink_faults == 0


def test_a_sink_that_fails_costs_no_round_and_is_reported_once(target, caplog):
    core = make_core(Broken())
    with caplog.at_level(logging.WARNING):
        core.add(request(), 0.0)
        assert run(core, target)["r"] == target.complete(request())[0]
    assert core.counters.sink_faults == 33  # follow, watch, a call a round, and the end
    core.exchange(0.0)
    assert core.counters.sink_faults == 34
    assert len([record for record in caplog.records if "token sink" in record.message]) == 1
