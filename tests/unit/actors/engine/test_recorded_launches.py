from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from actors.draft_tree import DraftTree
from actors.engine import model_runner
from actors.engine.feature_tap import FeatureTap
from actors.engine.options import RoundLimits
from actors.engine.recorded_launches import RecordedLaunches
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import record_rounds, recordable_shapes
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from paceline_testing.op_graph import OpGraphs
from tests.unit.actors.engine.test_device_rounds import SAMPLINGS, Rounds, engine_with


class Doubling:
    """Records what doubles a tensor."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []
        self.fails = False

    def record(self, launch):
        if self.fails:
            raise RuntimeError("no memory\nfor a graph")
        result = launch()
        self.recorded.append(result)
        return lambda: result.mul_(2), result


def test_the_second_time_records_and_later_ones_replay():
    recorder, launched = Doubling(), []

    def launch():
        launched.append(1)
        return torch.ones(1)

    launches = RecordedLaunches(recorder)
    told = [(launches.run("a", launch).item(), launches.was_new) for _ in range(4)]
    assert told == [(1.0, True), (2.0, True), (4.0, False), (8.0, False)]
    assert len(launched) == 2
    assert launches.run("b", launch).item() == 1.0


def test_the_least_recently_used_make_room_and_count_as_new_afterwards():
    recorder = Doubling()
    launches = RecordedLaunches(recorder, most=2)

    def run(keys: str) -> int:
        for key in keys:
            launches.run(key, lambda: torch.ones(1))
        return len(recorder.recorded)

    assert run("aabbacc") == 3
    assert run("a") == 3  # still there
    assert run("b") == 3  # made room for c
    assert run("b") == 4


def test_after_a_failure_everything_is_launched_and_one_line_says_so(caplog):
    recorder = Doubling()
    launches = RecordedLaunches(recorder)
    for _ in range(3):
        launches.run("a", lambda: torch.ones(1))
    recorder.fails = True
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            for key in ("a", "b"):
                result = launches.run(key, lambda: torch.ones(1))
        assert result.item() == 1.0
    assert not launches.was_new
    assert [record.getMessage() for record in caplog.records] == [
        "launches are not recorded, which makes rounds slower: no memory"
    ]


@pytest.fixture
def torch_kernels(monkeypatch):
    """The CPU's own kernels are no operations of torch, so they cannot be recorded."""
    monkeypatch.setattr(model_runner, "replace_linears", lambda model: False)
    monkeypatch.setattr(model_runner, "replace_norms", lambda model: None)


def recordable_engine(attention: str, device: torch.device) -> TargetEngine:
    """Nor are the compiled layers of a GPU operations of torch."""
    return engine_with(attention, device, is_eager=device.type == "cuda")


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(
    ("are_recorded", "samples"),
    [
        (True, True),
        (False, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False), (False, True))),
    ],
)
def test_a_prompt_longer_than_a_round_is_computed_in_parts(triton_device, are_recorded, samples):
    """samples: False on the ranks of a group that draw nothing."""
    said = []
    for attention in ("padded", "triton_tree"):
        engine = recordable_engine(attention, triton_device)
        engine._rank = 0 if samples else 1
        if attention == "triton_tree" and are_recorded:
            engine._runner._launches = RecordedLaunches(OpGraphs())
        rounds = Rounds(engine, 3, SAMPLINGS)
        rounds.start(29)  # of which a round takes 8
        said.append([rounds.step(2) for _ in range(6 if samples else 4)])
    assert said[0] == said[1]
    assert [emitted for ((_, emitted, _, _),) in said[0][:3]] == [-1] * 3
    assert (said[0][3][0][1] >= 0) == samples


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("num_successors", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_replayed_rounds_say_what_the_host_says(triton_device, num_successors):
    samplings = [*SAMPLINGS, SamplingParams(7, temperature=1.0, acceptance="rejection")]
    engines = [recordable_engine(attention, triton_device) for attention in ("padded", "triton_tree")]
    graphs = OpGraphs()
    engines[1]._runner._launches = RecordedLaunches(graphs)
    rounds = [Rounds(engine, 7, samplings) for engine in engines]
    for each in rounds:
        for length in (7, 6, 2):
            each.start(length)
    for number in range(8):
        host, device = (each.step(nodes=3 if number else 0, num_successors=num_successors) for each in rounds)
        assert device == host
    assert graphs.replays >= 4


@pytest.mark.usefixtures("torch_kernels")
def test_rounds_are_recorded_ahead_and_tell_when_they_were_not(triton_device, monkeypatch):
    limits = RoundLimits(prefill_rows=8, sequences=3, draft_rows=3, successors=2)
    engine = recordable_engine("triton_tree", triton_device)
    assert record_rounds(engine, limits) == 0
    engine._runner._launches = RecordedLaunches(OpGraphs())

    def are_new(seq_ids):
        items = [
            VerifyItem(
                SequenceDelta(seq_id, 0, np.ones(1, np.int32)),
                1,
                DraftTree.chain(np.arange(1), np.ones(1)),
                SequenceStart(SAMPLINGS[0], 1),
            )
            for seq_id in seq_ids
        ]
        batch = VerifyBatch(0, items, seq_ids, num_successors=2)
        told = [engine.verify(batch).is_new_shape for _ in range(3)]
        engine.verify(VerifyBatch(0, [], seq_ids))
        return told

    assert are_new([1, 2]) == [True, True, False]
    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "_flashinfer", object())
        assert record_rounds(engine, limits) == 0
    # One sequence: 1, 2 and 4 rows. Two: 2, 4 and 8. Three, padded to four: 4 and 8.
    assert record_rounds(engine, limits) == len(recordable_shapes(limits)) == 8
    assert engine.num_sequences == 0
    assert are_new([1]) == are_new([1, 2, 3]) == [False] * 3


@pytest.mark.usefixtures("torch_kernels")
def test_replayed_rounds_keep_the_hidden_states_of_their_own_rows(triton_device):
    taken = []
    for attention in ("padded", "triton_tree"):
        engine = recordable_engine(attention, triton_device)
        tap = engine._runner.tap = FeatureTap(engine.model, (0, 1))
        if attention == "triton_tree":
            graphs = OpGraphs()
            engine._runner._launches = RecordedLaunches(graphs)
        rounds = Rounds(engine, 3, SAMPLINGS)
        rounds.start(4)
        rounds.step(0)
        features = []
        for number in range(8):
            if number != 5:
                tap.open()
            rounds.step(2)
            if number != 5:
                features.append(tap.take(3))
        taken.append(features)
    assert graphs.replays >= 3
    for ours, theirs in zip(*taken, strict=True):
        np.testing.assert_allclose(ours.cpu().numpy(), theirs.cpu().numpy(), atol=2e-5)
