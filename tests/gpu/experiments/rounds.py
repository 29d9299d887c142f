"""Rounds of the engine as it is, against the floor of reading the weights and the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.gpu.experiments.decoding import Decoding
from tests.gpu.experiments.setting import Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    model = setting.model("8B")
    weights = bytes_read(model)
    bandwidth = read_rate(setting)
    for context in setting.of((1024, 8192), (20,)):
        for sequences in setting.of((1, 8, 32), (1, 2)):
            engine = setting.engine(model, sequences * (context + 900), is_eager=True)
            decoding = Decoding(engine, sequences, context)
            cache = engine._runner.kv.num_bytes * sequences * context / engine.options.num_slots
            for nodes in setting.of((0, 7, 15), (0, 3)):
                ms = setting.wall(lambda decoding=decoding, nodes=nodes: decoding.round(nodes), repeats=10)
                floor = (weights + cache) / bandwidth / 1e9
                yield {
                    "context": context, "sequences": sequences, "nodes": nodes, "ms": ms.median, "least": ms.least,
                    "floor": floor, "x": ms.median / floor, **busy(setting, decoding, nodes),
                }  # fmt: skip
            decoding.finish()
            del engine, decoding
            setting.release()


def growing(setting: Setting) -> Iterator[dict[str, Any]]:
    """torch's own attention while each round has a longer context than the one before: cuDNN plans for each shape."""
    model = setting.model("8B")
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for cudnn in (True, False):
            for sequences in setting.of((1, 8), (1,)):
                context, rounds = setting.of((4096, 24), (20, 2))
                engine = setting.engine(model, sequences * (context + 900), attention="padded")
                torch.backends.cuda.enable_cudnn_sdp(cudnn)  # an engine turns it off
                decoding = Decoding(engine, sequences, context)
                decoding.round(7)
                times = sorted(setting.wall(lambda d=decoding: d.round(7), 1, warm=0).median for _ in range(rounds))
                yield {
                    "cuDNN": cudnn, "context from": context, "sequences": sequences, "rounds": rounds,
                    "ms": times[len(times) // 2], "least": times[0], "most": times[-1],
                }  # fmt: skip
                decoding.finish()
                del engine, decoding
                setting.release()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def busy(setting: Setting, decoding: Decoding, nodes: int, rounds: int = 3) -> dict[str, Any]:
    """Kernels a round, the share of the time in which one runs, and which take most of it, by torch's profiler."""
    if setting.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    setting.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = setting.wall(lambda: decoding.round(nodes), repeats=rounds, warm=0)
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spent = sum(event.device_time for event in kernels) / 1e3
    by_name: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name.split("(")[0].split("<")[0][-48:]] += event.device_time / rounds
    most = ", ".join(f"{name} {microseconds:.0f}" for name, microseconds in by_name.most_common(8))
    return {"kernels": len(kernels) / rounds, "busy": spent / (wall.median * rounds), "most us": most}


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that every forward reads."""
    return sum(parameter.nbytes for parameter in model.parameters()) - model.get_input_embeddings().weight.nbytes


def read_rate(setting: Setting) -> float:
    """TB/s."""
    weights = torch.randn(setting.of(2**31, 2**18), device=setting.device)
    rate = weights.nbytes / setting.time(weights.sum, repeats=5).least / 1e9
    del weights
    setting.release()
    return rate
