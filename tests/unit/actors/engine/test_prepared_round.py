"""Rounds that are prepared while the one before is computed are those that `pick` makes of the same messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree, TopProbs
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from actors.messages import (
    AheadItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    encode_message,
)
from actors.round_ahead import is_carried_out, pick
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 7  # so few that guesses come true
SAMPLINGS = [
    SamplingParams(1, temperature=0.0),
    SamplingParams(2, temperature=0.9, top_p=0.8),
    SamplingParams(3, temperature=0.7, repetition_penalty=1.4, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_tiny_model("llama", layers=1, vocab_size=VOCAB, hidden_size=16, heads=2, kv_heads=2)


def random_tree(rng: np.random.Generator, most: int) -> DraftTree:
    """Siblings differ, and probabilities never rise from parent to child."""
    tokens, parents, confidence = [], [], []
    for _ in range(int(rng.integers(0, most + 1))):
        parent = int(rng.integers(-1, len(tokens)))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = sorted(set(range(VOCAB)) - taken)
        if free:
            tokens.append(int(rng.choice(free)))
            parents.append(parent)
            confidence.append((confidence[parent] if parent >= 0 else 1.0) * float(rng.choice([0.5, 0.9, 1.0])))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))


@dataclass
class Serial:
    """Each round begins when the result of the one before has been told."""

    engine: TargetEngine
    last: tuple[VerifyBatch, VerifyResult] | None = None

    def run(self, batch: VerifyBatch) -> VerifyResult:
        result = self.engine.verify(batch)
        self.last = batch, result
        return result

    def run_ahead(self, ahead: VerifyAhead) -> VerifyResult | None:
        assert self.last is not None
        picked = pick(ahead, *self.last)
        if picked is None or not is_carried_out(ahead, picked):
            return None
        return self.run(picked.batch)


@dataclass
class Overlapped:
    """The next round begins before the result of the one before is told."""

    engine: TargetEngine
    begun: Any = None
    results: list[VerifyResult] = field(default_factory=list)

    def begin(self, batch: VerifyBatch) -> None:
        self.begun = self.engine.begin(batch)

    def go_on(self, ahead: VerifyAhead) -> bool:
        """Whether the round is carried out; the one before is told."""
        begun, engine = self.begun, self.engine
        prepared = engine.prepare(ahead, begun)
        engine.settle(begun)
        self.begun = None if prepared is None else engine.follow(prepared, begun)
        self.results.append(engine.result(begun))
        return self.begun is not None

    def end(self) -> None:
        self.engine.settle(self.begun)
        self.results.append(self.engine.result(self.begun))


def said(result: VerifyResult) -> bytes:
    return encode_message(msgspec.structs.replace(result, elapsed_s=0.0))


def state_of(engine: TargetEngine) -> list[Any]:
    sequences = engine._table._sequences
    return [
        engine.pool.num_free,
        list(engine.pool._free),
        sorted(engine.pool._by_hash.values()),
        *[
            (key, one.tokens.tolist(), one.num_computed, one.blocks.tolist(), one.tree_tokens.tolist())
            for key, one in sorted(sequences.items())
        ],
        *[one.sampling._record.tobytes()[:72] for _, one in sorted(sequences.items())],
    ]


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.sampled_from([14, 200]))
def test_rounds_are_those_that_pick_makes_and_those_that_are_not_begun_leave_no_trace(model, seed, num_blocks):
    rng = np.random.default_rng(seed)
    engines = [TargetEngine(model, EngineOptions(num_blocks, 4)) for _ in range(2)]
    serial, overlapped = Serial(engines[0]), Overlapped(engines[1])
    lengths = {}
    round_id = num_carried_out = 0
    for _ in range(4):
        items = []
        for seq_id in range(1, 5):
            if seq_id not in lengths:
                prompt = rng.integers(0, VOCAB, int(rng.integers(1, 9))).astype(np.int32)
                start = SequenceStart(SAMPLINGS[seq_id % len(SAMPLINGS)], len(prompt))
                items.append(VerifyItem(SequenceDelta(seq_id, 0, prompt), 4, random_tree(rng, 6), start))
        told = [VerifyBatch(round_id, items)]
        expected = [said(serial.run(told[0]))]
        overlapped.results.clear()
        overlapped.begin(told[0])
        for _ in range(6):
            round_id += 1
            ahead_items = [
                AheadItem(seq_id, random_tree(rng, 12), int(rng.integers(0, 6)), float(rng.choice([0.0, 0.0, 2.0])))
                for seq_id in rng.permutation(5)[: int(rng.integers(1, 6))].tolist()
            ]
            finished = [int(rng.integers(1, 5))] if rng.random() < 0.2 else []
            most_lost = float(rng.choice([0.5, 9.0, 9.0, 9.0]))
            ahead = VerifyAhead(round_id, round_id - 1, ahead_items, finished, 0, 0.2, most_lost)
            result = serial.run_ahead(ahead)
            assert overlapped.go_on(ahead) == (result is not None)
            assert state_of(engines[0]) == state_of(engines[1]) or result is not None
            if result is None:
                break
            num_carried_out += 1
            expected.append(said(result))
        if overlapped.begun is not None:
            overlapped.end()
        assert [said(result) for result in overlapped.results] == expected
        assert state_of(engines[0]) == state_of(engines[1])
        for engine in engines:
            check_integrity(engine)
        # All are sent again from the start, as after a lost answer.
        round_id += 1
        for engine in engines:
            engine.verify(VerifyBatch(round_id, [], [1, 2, 3, 4]))
        round_id += 1
    assert engines[0].pool.num_free == num_blocks


def begun_round(model: torch.nn.Module) -> tuple[TargetEngine, Any]:
    engine = TargetEngine(model, EngineOptions(64, 4))
    item = VerifyItem(
        SequenceDelta(1, 0, np.array([1, 2, 3], np.int32)), 9, tree_to_verify([4, 5], [-1, 0]),
        SequenceStart(SAMPLINGS[0], 3),
    )  # fmt: skip
    return engine, engine.begin(VerifyBatch(7, [item]))


def ahead_of(tree: DraftTree | None, after: int = 7) -> VerifyAhead:
    return VerifyAhead(8, after, [AheadItem(1, tree, 4)], most_lost=9.0)


def test_a_round_whose_trees_no_router_sends_is_not_prepared(model):
    engine, begun = begun_round(model)
    good = DraftTree.chain(np.array([4, 5], np.int32), np.array([0.9, 0.8], np.float32))
    assert engine.prepare(ahead_of(good), begun) is not None
    assert engine.prepare(ahead_of(None), begun) is not None
    assert engine.prepare(ahead_of(good, after=6), begun) is None
    rising = DraftTree.chain(np.array([4, 5], np.int32), np.array([0.5, 0.8], np.float32))
    beyond = DraftTree.chain(np.array([4, VOCAB], np.int32), np.array([0.9, 0.8], np.float32))
    drawn = DraftTree(
        good.token_ids, good.parents, good.confidence, TopProbs(good.token_ids, np.ones(2, np.float32), 1)
    )
    unequal = DraftTree(good.token_ids, good.parents[:1], good.confidence)
    for tree in (rising, beyond, drawn, unequal):
        assert engine.prepare(ahead_of(tree), begun) is None
    # A round computes a sequence once, so its delta must not be applied again.
    twice = VerifyAhead(8, 7, [AheadItem(1, good, 4), AheadItem(1, None, 4)], most_lost=9.0)
    assert engine.prepare(twice, begun) is None
    other = VerifyAhead(8, 7, [AheadItem(2, good, 4)], most_lost=9.0)
    assert engine.prepare(other, begun) is None
    gone = VerifyAhead(8, 7, [AheadItem(1, good, 4)], finished=[1], most_lost=9.0)
    assert engine.prepare(gone, begun) is None


def test_a_warm_up_with_a_round_sent_ahead_leaves_nothing(model, monkeypatch):
    monkeypatch.setattr(TargetEngine, "overlaps", True)
    engine, followed = TargetEngine(model, EngineOptions(64, 4)), []
    follow = engine.follow
    monkeypatch.setattr(engine, "follow", lambda *given: followed.append(follow(*given)) or followed[-1])
    warm_up(engine)
    assert len(followed[0].round.sequences) == 1
    assert engine.num_sequences == 0
    assert engine.pool.num_free == 64


def test_a_sequence_that_was_dropped_meanwhile_is_stale(model):
    engine, begun = begun_round(model)
    prepared = engine.prepare(ahead_of(None), begun)
    engine.settle(begun)
    engine.clear()
    following = engine.follow(prepared, begun)
    engine.settle(following)
    result = engine.result(following)
    assert (result.stale_seq_ids, result.verdicts) == ([1], [])
    check_integrity(engine)
