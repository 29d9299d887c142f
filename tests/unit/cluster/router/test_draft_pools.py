"""A router with several draft models, in simulated time: each namespace gets the one that is right for it.

Covers `cluster.router.pool_wait`, `cluster.router.draft_merit`.
"""

from collections import Counter

import msgspec
import numpy as np
import pytest

from actors.draft_tree import DraftTree, TopProbs
from actors.messages import DraftResult, SamplingParams, TokenChunk
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, run_local_round
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import texts_of, toy_info, toy_request
from paceline_testing.toy_drafters import ToyDraftWorker
from paceline_testing.toy_target import ToyTarget

VOCAB = 50
LENGTH = 8192
TARGET_S = 0.02
CODE, PROSE = 1, 2  # first token of the prompts of either namespace
POOLS = ("draft", "prose")
POOL_OF = {"a": "draft", "b": "prose"}  # of the workers


class Cluster:
    """A core, a toy target and one draft worker of each pool; drafts of a round are made at the same time."""

    def __init__(self, guesses, draft_s=(0.004, 0.004), row_s=0.0004):
        """guesses: of worker a, then b; draft_s: how long either takes for an answer; row_s: what the target takes for
        a row."""
        self.target = ToyTarget(VOCAB, LENGTH, seconds=lambda rows: TARGET_S + row_s * rows)
        self.core = RouterCore(
            toy_info(VOCAB, LENGTH),
            RouterConfig(),
            SpeculationConfig(),
            {},
            draft_shapes=dict.fromkeys(POOLS, DraftShape(4)),
        )
        self.workers = {name: ToyDraftWorker(guess(self.target)) for name, guess in zip("ab", guesses, strict=True)}
        self.draft_s = dict(zip("ab", draft_s, strict=True))
        self.num_new_shapes = 0  # of the next drafts, which take 2 s each
        for name, pool in POOL_OF.items():
            self.core.set_draft_workers({name: "old"}, pool)
        self.now = 0.0
        self.asked = {}  # by namespace: what each round has asked
        self.num_requests = 0

    def answer(self, namespace, rounds, **fields):
        """Requests of the namespace, one after the other, for at least so many rounds. Returns the pools that each of
        these rounds asked. Their tokens are the target's own."""
        asked = []
        while len(asked) < rounds:
            self.num_requests += 1
            first = CODE if namespace == "code" else PROSE
            prompt = [first, self.num_requests % VOCAB, self.num_requests // VOCAB]
            one = toy_request(f"r{self.num_requests}", prompt, 120, namespace=namespace, **fields)
            self.core.add(one, self.now)
            tokens = []
            while self.core.has_work:
                outcome = self.round()
                if outcome.round is not None and outcome.round.entries:
                    asked.append(tuple(POOLS[pool] for pool in outcome.round.asked.pools))
                for event in outcome.events:
                    assert isinstance(event, TokenChunk)
                    tokens += event.token_ids
            assert tokens == self.target.complete(one)[0]
        return asked

    def round(self):
        waited_s = 0.0

        def draft(worker_id, batch):
            nonlocal waited_s
            result = self.workers[worker_id].draft(batch)
            if not any(item.max_nodes for item in batch.items):
                return result
            is_new, self.num_new_shapes = self.num_new_shapes > 0, max(0, self.num_new_shapes - 1)
            seconds = 2.0 if is_new else self.draft_s[worker_id]
            waited_s = max(waited_s, seconds)
            return msgspec.structs.replace(result, elapsed_s=seconds, is_new_shape=is_new)

        def verify(batch):
            result = self.target.verify(batch)
            self.now += waited_s + 0.001 + result.elapsed_s
            return result

        return run_local_round(self.core, verify, draft, RoundHooks(now=lambda: self.now))


def right_where(is_right):
    """Drafts what the target will say at positions where `is_right` says so of the text, else other tokens."""

    def of_target(target):
        def guess(tokens, most):
            text = target.text_after(tokens, most)
            return [
                token if is_right(tokens + text[:index]) else (token + 1) % VOCAB for index, token in enumerate(text)
            ]

        return guess

    return of_target


RIGHT_FOR_CODE = right_where(lambda text: text[0] == CODE)
RIGHT_FOR_PROSE = right_where(lambda text: text[0] == PROSE)
ALWAYS_RIGHT = right_where(lambda text: True)
NEVER_RIGHT = right_where(lambda text: False)
RIGHT_FOR_A_THIRD = right_where(lambda text: sum(text) % 3 == 0)


def share(asked, *pools):
    return Counter(asked)[pools] / len(asked)


def test_each_namespace_ends_with_the_draft_model_that_is_right_for_it():
    cluster = Cluster((RIGHT_FOR_CODE, RIGHT_FOR_PROSE))
    for _ in range(4):
        asked = {namespace: cluster.answer(namespace, 50) for namespace in ("code", "prose")}
    assert share(asked["code"], "draft") > 0.8
    assert share(asked["prose"], "prose") > 0.8
    counters = cluster.core.counters
    for source in ("draft_model", "draft_model.prose"):
        assert counters.accepted_tokens[source] > 200


def test_in_a_round_of_several_namespaces_each_sequence_has_the_draft_model_that_is_right_for_it():
    cluster = Cluster((RIGHT_FOR_CODE, RIGHT_FOR_PROSE))
    requests = [
        toy_request(f"{first} {index}", [first, index, 3], 600, namespace="code" if first == CODE else "prose")
        for first in (CODE, PROSE)
        for index in range(2)
    ]
    for one in requests:
        cluster.core.add(one, 0.0)
    drafted = Counter()
    events = []
    for index in range(250):
        outcome = cluster.round()
        events += outcome.events
        for entry in outcome.round.entries if index >= 60 and outcome.round is not None else ():
            drafted[entry.sequence.namespace, tuple(POOLS[pool] for pool in entry.draft_workers)] += 1
    while cluster.core.has_work:
        events += cluster.round().events
    texts = texts_of(events)
    assert all(texts[one.request_id] == cluster.target.complete(one)[0] for one in requests)
    assert drafted["code", ("draft",)] > 0.7 * sum(drafted.values()) / 2
    assert drafted["prose", ("prose",)] > 0.7 * sum(drafted.values()) / 2


@pytest.mark.parametrize(
    ("guesses", "draft_s", "chosen"),
    [
        pytest.param((ALWAYS_RIGHT, ALWAYS_RIGHT), (0.016, 0.002), ("prose",), id="the cheaper of two that are right"),
        pytest.param(
            (ALWAYS_RIGHT, right_where(lambda text: len(text) % 3)),
            (0.006, 0.002),
            ("draft",),
            id="the better one though it costs more",
        ),
        pytest.param((NEVER_RIGHT, NEVER_RIGHT), (0.004, 0.004), (), id="none where none is right"),
        pytest.param(
            (right_where(lambda text: text[-1] % 2), right_where(lambda text: not text[-1] % 2)),
            (0.002, 0.002),
            ("draft", "prose"),
            id="both where each knows what the other does not",
        ),
    ],
)
def test_what_is_asked_is_what_brings_most_tokens_a_second(guesses, draft_s, chosen):
    cluster = Cluster(guesses, draft_s)
    cluster.answer("code", 300)
    assert share(cluster.answer("code", 200), *chosen) > 0.85


def test_a_draft_model_that_has_become_right_is_found_though_another_one_pays():
    becomes_right = []
    cluster = Cluster((right_where(lambda text: text[-1] % 3 == 0), right_where(lambda text: bool(becomes_right))))
    cluster.answer("code", 150)
    assert share(cluster.answer("code", 50), "draft") > 0.85
    becomes_right.append(True)
    cluster.answer("code", 600)
    asked = cluster.answer("code", 50)
    assert sum("prose" in pools for pools in asked) > 0.85 * len(asked)


def test_a_request_names_the_draft_model_that_may_draft_for_it():
    cluster = Cluster((ALWAYS_RIGHT, ALWAYS_RIGHT))
    for _ in range(3):
        assert share(cluster.answer("code", 20, drafters=("draft_model.prose",)), "prose") > 0.9
        assert share(cluster.answer("code", 20, drafters=("draft_model",)), "draft") > 0.9
    assert set(cluster.answer("code", 20, drafters=("suffix",))) == {()}


def test_a_pool_without_workers_is_not_asked_and_the_other_goes_on():
    cluster = Cluster((ALWAYS_RIGHT, ALWAYS_RIGHT))
    cluster.core.set_draft_workers({}, "draft")
    assert share(cluster.answer("code", 200), "prose") > 0.9
    cluster.core.set_draft_workers({}, "prose")
    assert share(cluster.answer("code", 20)) == 1.0


@pytest.mark.parametrize(("row_s", "pays"), [(0.0004, True), (0.006, False)])
def test_drafts_have_to_pay_for_their_rows_of_the_target_too(row_s, pays):
    """A third of a token for a wait of a sixth of a forward: that pays, but not if its row takes another quarter."""
    cluster = Cluster((RIGHT_FOR_A_THIRD, NEVER_RIGHT), row_s=row_s)
    cluster.answer("code", 600)
    asked = cluster.answer("code", 600)
    assert (share(asked, "draft") > 0.5) == pays
    assert (share(asked) > 0.8) != pays


@pytest.mark.parametrize(("new_shapes", "pays"), [(40, True), (100_000, False)])
def test_drafts_of_new_shapes_say_nothing_of_later_ones_unless_they_are_always_new(new_shapes, pays):
    cluster = Cluster((RIGHT_FOR_CODE, NEVER_RIGHT))
    cluster.num_new_shapes = new_shapes
    cluster.answer("code", 600)
    asked = share(cluster.answer("code", 300), "draft")
    assert asked > 0.9 if pays else asked < 0.1


def test_what_was_learnt_of_a_draft_model_ends_with_it():
    """One that was of no use would be tried again only after hundreds of rounds."""
    cluster = Cluster((NEVER_RIGHT, NEVER_RIGHT))
    cluster.answer("code", 600)
    assert share(cluster.answer("code", 300)) > 0.9
    calibration = cluster.core._choice._calibration
    learnt = calibration.by_sources.curves["level"].copy()
    cluster.workers["b"] = ToyDraftWorker(ALWAYS_RIGHT(cluster.target))
    cluster.core.set_draft_workers({}, "prose")  # it leaves, loads, and comes back
    cluster.core.set_draft_workers({"b": "new"}, "prose")
    assert cluster.core.draft_scaling["prose"].demand(cluster.now).gain == 0.0
    source = cluster.core.source_names.index("draft_model.prose")
    levels = calibration.by_sources.curves["level"]
    base = calibration.group("code") * (2 * len(cluster.core.source_names) + 1)
    confidences = levels[base + len(cluster.core.source_names) + 2]  # of a curve that nothing was learnt for
    assert levels[base + source].tolist() == pytest.approx(confidences.tolist())
    assert learnt[base + source].tolist() != levels[base + source].tolist()
    other = cluster.core.source_names.index("draft_model")
    assert learnt[base + other].tolist() == levels[base + other].tolist()
    assert share(cluster.answer("code", 60), "prose") > 0.5


def test_a_worker_that_comes_back_with_the_same_model_keeps_what_was_learnt():
    cluster = Cluster((NEVER_RIGHT, NEVER_RIGHT))
    cluster.answer("code", 600)
    for models in ({}, {"b": "old"}, {"b": "old", "c": "old"}, {"b": "old"}):
        cluster.core.set_draft_workers(models, "prose")
    assert share(cluster.answer("code", 300)) > 0.9


def test_a_request_has_the_only_draft_model_that_may_draft_for_it_though_others_are_better_in_its_namespace():
    cluster = Cluster((RIGHT_FOR_CODE, RIGHT_FOR_PROSE))
    named = {"named": ("draft_model.prose",)}
    for index, (name, first) in enumerate((("named", CODE), ("code", CODE), ("prose", PROSE))):
        namespace = "code" if first == CODE else "prose"
        one = toy_request(name, [first, index, 3], 300, namespace=namespace, drafters=named.get(name))
        cluster.core.add(one, 0.0)
    drafted = Counter()
    for _ in range(150):
        round = cluster.round().round
        for entry in round.entries if round is not None and len(round.asked.pools) > 1 else ():
            if entry.sequence.request.request_id == "named" and entry.max_nodes:
                drafted[tuple(entry.draft_workers)] += 1
    assert set(drafted) == {(1,)}


def test_under_rejection_one_draft_model_drafts_for_a_sequence():
    """Which chain is verified must not depend on tokens."""
    cluster = Cluster((ALWAYS_RIGHT, ALWAYS_RIGHT))
    sampling = SamplingParams(seed=1, acceptance="rejection")
    cluster.core.add(toy_request("r", [CODE, 2, 3], 400, sampling=sampling, namespace="code"), 0.0)
    asked = Counter()
    for _ in range(60):
        round, _ = cluster.core.plan_round(cluster.now)
        results = {}
        for worker_id, batch in round.asked.batches.items():
            trees = []
            for item in batch.items:
                assert item.max_nodes > 0 or round.asked.pools == {}
                tokens = np.array([7, 8, 9], np.int32)
                probs = TopProbs(np.stack([tokens, tokens + 1], 1).ravel(), np.tile(np.float32([0.75, 0.25]), 3), 2)
                trees.append(DraftTree.chain(tokens, np.full(3, 0.75, np.float32), probs))
            seq_ids = [item.delta.seq_id for item in batch.items]
            results[worker_id] = DraftResult(batch.round_id, seq_ids, trees, elapsed_s=0.004)
        batch = cluster.core.assemble(round, results)
        asked[tuple(round.asked.pools)] += 1
        for entry in round.entries:
            assert len(entry.draft_workers) == (entry.chain is not None) <= 1
        result = cluster.target.verify(batch)
        cluster.now += 0.005 + result.elapsed_s
        cluster.core.commit(round, result, cluster.now)
    assert asked[(0,)] > 5
    assert asked[(1,)] > 5
    assert asked[(0, 1)] > 0
    rounds, sequences, *_ = cluster.core.draft_scaling["prose"]._rounds
    assert sequences == pytest.approx(rounds)  # rounds in which only the other one drafts say nothing of its workers
