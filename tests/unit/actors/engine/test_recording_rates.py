"""How often rounds of a busy engine find their launches recorded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from actors.engine.device_rounds import DeviceRounds, _Launched
from actors.engine.options import EngineOptions
from actors.engine.recorded_launches import RecordedLaunches
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from paceline_testing.drafting import tree_to_verify
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 61
SAMPLINGS = [
    *[SamplingParams(1, temperature=0.0)] * 4,
    *[SamplingParams(2, temperature=0.8)] * 3,
    *[SamplingParams(3, temperature=0.8, top_p=0.9)] * 2,
    SamplingParams(4, temperature=0.7, repetition_penalty=1.2),
]
ROUNDS = 1500
WARM = 300


class Counting:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record(self, launch):
        self.counts["recorded"] += 1
        return lambda: self.counts.update(["replayed"]), launch()


class Traffic:
    """Sequences that come and go, up to 32 at a time. Answers are random, and so are sizes and shapes of trees."""

    def __init__(self, engine: TargetEngine, seed: int) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.lengths: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.num_started = 0
        self.plain_rounds = 0  # without parts of prompts

    def start(self) -> None:
        self.num_started += 1
        self.lengths[self.num_started] = int(self.rng.lognormal(6.0, 1.0)) + 4
        self.known[self.num_started], self.left[self.num_started] = 0, int(self.rng.exponential(150.0)) + 5

    def step(self, busy: float) -> None:
        if not self.lengths or (len(self.lengths) < 32 and self.rng.random() < busy):
            self.start()
        items = []
        drafted = int(self.rng.choice([16, 32, 48, 64]))  # rows that pay, by what else the device has to do
        for seq_id, length in self.lengths.items():
            known = self.known[seq_id]
            begin = None if known else SequenceStart(SAMPLINGS[seq_id % len(SAMPLINGS)], length)
            most = min(15, 2 * drafted // len(self.lengths))
            nodes = int(self.rng.integers(0, most + 1))
            parents = [int(self.rng.integers(-1, node)) for node in range(nodes)]
            delta = SequenceDelta(seq_id, known, np.zeros(length - known, np.int32))
            items.append(VerifyItem(delta, 256, tree_to_verify(list(range(nodes)), parents), begin))
            self.known[seq_id] = length
        result = self.engine.verify(VerifyBatch(1, items, num_successors=8))
        assert not result.stale_seq_ids
        assert not result.starved_seq_ids
        self.plain_rounds += all(verdict.rows == 1 + verdict.num_nodes for verdict in result.verdicts)
        ended = []
        for verdict in result.verdicts:
            if verdict.next_token >= 0:
                self.lengths[verdict.seq_id] += 1
                self.left[verdict.seq_id] -= 1
                if self.left[verdict.seq_id] <= 0:
                    ended.append(verdict.seq_id)
        self.engine.verify(VerifyBatch(1, [], ended))
        for seq_id in ended:
            del self.lengths[seq_id], self.known[seq_id], self.left[seq_id]


@pytest.mark.parametrize("busy", [0.02, 0.2], ids=["few sequences", "many sequences"])
def test_few_recordings_serve_nearly_all_rounds_without_prompts(monkeypatch, busy):
    def zeros(self, inputs, shape):
        """As if launched: every tree is refused, and says token 0."""
        logits = inputs.logit_rows.shape[0]
        walked = (inputs.more[3].shape[0] - 1) * (2 + shape.nodes)
        result = torch.zeros(walked + logits * shape.successors, dtype=torch.int64)
        return _Launched(result, result.new_zeros(logits), None, None)

    monkeypatch.setattr(DeviceRounds, "_launch", zeros)
    monkeypatch.setattr(DeviceRounds, "_compute", lambda self, inputs: None)
    model = make_tiny_model("llama", layers=1, vocab_size=VOCAB, hidden_size=16, heads=2, kv_heads=2)
    engine = TargetEngine(model, EngineOptions(16_384, 16, prefix_cache=False, attention="triton_tree"))
    recorder = Counting()
    engine._runner._launches = RecordedLaunches(recorder)
    traffic = Traffic(engine, 5)
    for _ in range(WARM):
        traffic.step(busy)
    at_first = recorder.counts["recorded"]
    recorder.counts.clear()
    traffic.plain_rounds = 0
    for _ in range(ROUNDS):
        traffic.step(busy)
    counts = recorder.counts
    assert traffic.plain_rounds > ROUNDS / 3
    assert at_first + counts["recorded"] <= 128
    assert counts["recorded"] <= 0.06 * traffic.plain_rounds
    assert counts["replayed"] >= 0.85 * traffic.plain_rounds
