"""KV caches that leave room for the largest round and for the other processes of a GPU."""

from __future__ import annotations

import pytest
import torch

from actors import build
from actors.engine.gpu_memory import GpuMemory, GpuMeter
from actors.engine.options import EngineOptions, RoundLimits
from actors.engine.recorded_launches import MOST_RECORDED
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import largest_round_slots, run_largest_round
from actors.errors import ModelError
from actors.models.source import ModelSource
from actors.options import TargetOptions
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "limit", "share", "left"),
    [
        # total, free, weights, peak, recorded
        ((80, 62, 16, 4), 0.9, 1.0, 72 - 18 - 4),  # 2 in use beside the weights
        ((80, 62, 16, 4), 0.5, 1.0, 40 - 18 - 4),
        ((80, 10, 60, 4), 0.9, 1.0, -2),
        ((80, 62, 16, 4), 0.9, 0.75, 54 - 17 - 4),
        ((80, 42, 16, 4), 0.9, 0.75, 54 - 17 - 4),  # others have taken theirs: the same
        ((80, 70, 2, 1), 0.9, 0.25, 18 - 3 - 1),
        ((80, 62, 16, 4, 5), 0.9, 1.0, 72 - 18 - 4 - 5),  # recorded rounds keep memory of their own
    ],
)
def test_what_model_and_largest_round_leave_of_the_share(memory, limit, share, left):
    sizes = GpuMemory(*(size * GIB for size in memory))
    assert sizes.for_kv_cache(limit, share) == pytest.approx(left * GIB, abs=2)


def test_others_that_use_more_than_their_share_are_told():
    with pytest.raises(ModelError, match=r"20\.0 GiB of this GPU's 80\.0 GiB are free, and 37\.0 GiB are needed for a"):
        GpuMemory(80 * GIB, 20 * GIB, 16 * GIB, 4 * GIB).for_kv_cache(0.9, 0.75)


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        (RoundLimits(40, 3, 16), 100),
        (RoundLimits(40, 3, 16), 17),
        (RoundLimits(1, 1, 0), 2),
        (RoundLimits(32, 4, 2), 17),
    ],
)
def test_the_largest_round_has_all_rows_and_fills_the_slots_that_are_told_beforehand(limits, longest):
    slots = largest_round_slots(limits, longest, 4)
    engine = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(slots // 4, 4))
    rows = limits.prefill_rows + limits.sequences + limits.draft_rows
    assert run_largest_round(engine, limits, longest) == rows
    assert engine.num_sequences == 0
    check_integrity(engine)
    smaller = TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(slots // 4 - 1, 4))
    assert run_largest_round(smaller, limits, longest) < rows


class Meter:
    """A GPU of 64 MiB, of which 4 are in use, and a peak of a KiB for each row of the largest forward."""

    def __init__(self, model_rows: list[int]) -> None:
        self._rows = model_rows
        self.kv_bytes = -1

    def start(self) -> None:
        self._rows.clear()

    def read(self, kv_bytes: int, will_record: bool) -> GpuMemory:
        self.kv_bytes = kv_bytes
        peak = max(self._rows) << 10
        return GpuMemory(64 << 20, 60 << 20, 1 << 20, peak, peak if will_record else 0)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_kv_cache_is_sized_after_the_largest_round_has_run(tmp_path, monkeypatch, enforce_eager):
    make_tiny_model("llama", layers=1, hidden_size=16, heads=2, kv_heads=2).save_pretrained(tmp_path)
    rows: list[int] = []
    meter = Meter(rows)
    load = build.load_model

    def load_model(*arguments: object, **options: object):
        model = load(*arguments, **options)
        model.model.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
        return model

    built: list[EngineOptions] = []

    def target_engine(model, options: EngineOptions, *ranks: int) -> TargetEngine:
        built.append(options)
        return TargetEngine(model, options, *ranks)

    monkeypatch.setattr(build, "TargetEngine", target_engine)
    monkeypatch.setattr(build, "gpu_meter", lambda device: meter)
    monkeypatch.setattr(build, "load_model", load_model)
    options = TargetOptions(
        device="cpu", block_size=16, max_model_len=64, enforce_eager=enforce_eager, attention="padded"
    )
    engine = build.build_target_engine(ModelSource("t", "t", tmp_path), options, limits=RoundLimits(100, 4, 20))
    per_token = 2 * 16 * 4
    assert max(rows) >= 124
    assert meter.kv_bytes == largest_round_slots(RoundLimits(100, 4, 20), 64, 16) * per_token
    assert [(options.is_eager, options.attention) for options in built] == [(enforce_eager, "padded")] * 2
    left = int(0.9 * (64 << 20)) - (4 << 20) - (max(rows) << 10) * (1 if enforce_eager else 2)
    assert engine.pool.num_blocks == left // per_token // 16


@pytest.mark.parametrize(("will_record", "recorded"), [(False, 0), (True, 300 + MOST_RECORDED * (4 << 20))])
def test_recorded_rounds_get_as_much_as_the_largest_round_took_and_some_for_each(monkeypatch, will_record, recorded):
    told = {"get_memory_info": (5000, 9000), "memory_allocated": 1000, "max_memory_allocated": 1700}
    for name, value in told.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    memory = GpuMeter(torch.device("cuda")).read(400, will_record)
    assert memory == GpuMemory(9000, 5000, 0, 300, recorded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_largest_round_fits_beside_a_full_kv_cache(tmp_path):
    make_tiny_model("llama", layers=2, hidden_size=256, heads=4, kv_heads=4).save_pretrained(tmp_path)
    limits = RoundLimits(1024, 16, 64)
    options = TargetOptions(device="cuda", kv_cache_fraction=0.5)
    engine = build.build_target_engine(ModelSource("t", "t", tmp_path), options, limits=limits)
    free, total = torch.cuda.mem_get_info()
    assert run_largest_round(engine, limits, 1024) == 1104
    assert total - torch.cuda.mem_get_info()[0] < 0.55 * total
    assert free > 0.45 * total
