"""What a device has of the sequences of a round is what they are, whatever rounds failed before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import SamplingParams
from actors.records import addresses_of
from actors.sampling import adjustment_table
from actors.sampling.adjustment_table import AdjustmentTable
from actors.sampling.rows import Paths, rows_for
from actors.sampling.sequence_sampling import ADJUSTMENT, SequenceSampling
from paceline_testing.sampled_rows import rows_of_table

KINDS = [
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "logit_bias": ((700, 2.0), (3, -1.0))},
    {"logit_bias": ((1, 1.0),)},
]


def write(table: AdjustmentTable) -> None:
    table.write(*map(torch.from_numpy, table.updates))


@given(st.data())
def test_a_table_has_the_adjustments_of_every_round(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjustment_table, "_FIRST_CAPACITY", 64)
        table = AdjustmentTable(torch.device("cpu"))
    samplings = [SequenceSampling(SamplingParams(seed, **KINDS[seed % len(KINDS)]), 3) for seed in range(8)]
    for _ in range(data.draw(st.integers(1, 25))):
        chosen = data.draw(st.lists(st.sampled_from(samplings), min_size=1, max_size=5, unique=True))
        for sampling in chosen:
            most = data.draw(st.sampled_from([3, 3, 60]))
            sampling.extend(np.array(data.draw(st.lists(st.integers(0, 99), max_size=most)), np.int32))
        path = np.array(data.draw(st.lists(st.integers(0, 99), max_size=4)), np.int32)
        index = np.arange(len(chosen))
        paths = Paths(np.tile(path, len(chosen)), np.arange(len(chosen) + 1) * len(path))
        table.assign(addresses_of([one for one in chosen if one.adjusts]))
        rows = rows_of_table(chosen, index, index + 9, paths)
        outcome = data.draw(st.sampled_from(["done"] * 4 + ["not sent", "not confirmed"]))
        if outcome == "not sent":
            continue
        assert outcome == "not confirmed" or len(table.updates[0]) <= table.capacity
        write(table)
        if outcome == "not confirmed":
            continue
        table.confirm()
        contents = table.tensor.numpy().view(ADJUSTMENT)[:, 0]
        whole = rows_for(chosen, index, index + 9, paths)
        for found, wanted in zip(rows.records, whole.records, strict=True):
            shared = contents[found["begin"] : found["end"]]
            assert shared.tolist() == whole.adjustments[wanted["begin"] : wanted["end"]].tolist()
            own = rows.adjustments[found["own_begin"] : found["own_end"]]
            assert own.tolist() == whole.adjustments[wanted["own_begin"] : wanted["own_end"]].tolist()


def test_only_what_has_changed_is_sent():
    table = AdjustmentTable(torch.device("cpu"))
    sampling = SequenceSampling(SamplingParams(1, frequency_penalty=0.1), 0)
    sampling.extend(np.arange(1000, dtype=np.int32))
    sent = []
    for told in ([], [5, 6, 5], [2000], [], range(3000, 5000)):
        sampling.extend(np.array(told, np.int32))
        table.assign(addresses_of([sampling]))
        sent.append(len(table.updates[0]))
        write(table)
        table.confirm()
    assert sent == [1024, 4, 1, 0, 4096]  # 1000, 3, 1, 0 and 3001 with padding


def test_a_table_that_cannot_grow_keeps_its_capacity_and_grows_when_there_is_memory(monkeypatch):
    monkeypatch.setattr(adjustment_table, "_FIRST_CAPACITY", 64)
    table = AdjustmentTable(torch.device("cpu"))
    sampling = SequenceSampling(SamplingParams(1, frequency_penalty=0.1), 0)
    sampling.extend(np.arange(1000, dtype=np.int32))

    def without_memory(*sizes, **kwargs):
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(adjustment_table.torch, "zeros", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            table.assign(addresses_of([sampling]))
    assert (table.capacity, len(table.tensor), table.generation) == (64, 65, 0)
    table.assign(addresses_of([sampling]))
    write(table)
    table.confirm()
    assert len(table.tensor) == table.capacity + 1 > 1000
    assert table.generation == 1
    assert table.tensor.numpy().view(ADJUSTMENT)["token"][:1000, 0].tolist() == list(range(1000))
