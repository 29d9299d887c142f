"""Compiled layers and recorded launches against eager ones: rounds, time to compile, memory of graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from actors.models.quantization import quantize_linears
from tests.gpu.experiments.decoding import Decoding
from tests.gpu.experiments.rounds import busy, bytes_read, read_rate
from tests.gpu.experiments.setting import Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    bandwidth = read_rate(setting)
    texts: dict[tuple[int, int], list[list[int]]] = {}
    for is_eager in setting.of((False, True), (True,)):
        model = setting.model("8B")
        weights = bytes_read(model)
        started = time.perf_counter()
        sequences_of = setting.of(((1, 1024), (8, 1024), (32, 8192)), ((1, 20),))[: 1 if is_eager else 3]
        engine = setting.engine(model, max(count * (length + 900) for count, length in sequences_of), is_eager=is_eager)
        for sequences, context in sequences_of:
            decoding = Decoding(engine, sequences, context)
            first_s = time.perf_counter() - started
            for nodes in setting.of((0, 7, 15), (0, 3)):
                before = allocated(setting)
                for _ in range(setting.of(4, 1)):  # compiles, and records
                    decoding.round(nodes)
                ms = setting.wall(lambda decoding=decoding, nodes=nodes: decoding.round(nodes), repeats=20)
                floor = weights / bandwidth / 1e9
                yield {
                    "compiled": not is_eager, "sequences": sequences, "context": context, "nodes": nodes,
                    "ms": ms.median, "least": ms.least, "floor of weights": floor,
                    "x": ms.median / floor, "first s": first_s, "graph MB": (allocated(setting) - before) / 2**20,
                    **busy(setting, decoding, nodes),
                }  # fmt: skip
            text = [decoding.output(index)[:16] for index in range(sequences)]
            usual = texts.setdefault((sequences, context), text)
            yield {"compiled": not is_eager, "sequences": sequences, "same tokens": f"{_same(usual, text):.3f}"}
            decoding.finish()
        del engine, decoding, model
        setting.release()


def quantized(setting: Setting) -> Iterator[dict[str, Any]]:
    """Compiled rounds of an 8B by the bits of its weights."""
    for bits in setting.of(("none", "fp8", "int8", "int4"), ("int8",)):
        model = setting.model("8B")
        quantize_linears(model, bits, setting.device)
        setting.release()
        engine = setting.engine(model, 8 * 1900, is_eager=setting.is_dry)
        for sequences in setting.of((1, 8), (1,)):
            decoding = Decoding(engine, sequences, setting.of(512, 20))
            for nodes in setting.of((0, 7), (3,)):
                for _ in range(setting.of(4, 1)):
                    decoding.round(nodes)
                ms = setting.wall(lambda decoding=decoding, nodes=nodes: decoding.round(nodes), repeats=20)
                yield {
                    "weights": bits, "sequences": sequences, "nodes": nodes, "ms": ms.median, "least": ms.least,
                    **busy(setting, decoding, nodes),
                }  # fmt: skip
            decoding.finish()
        del engine, decoding, model
        setting.release()


def _same(one: list[list[int]], two: list[list[int]]) -> float:
    """Share of tokens that are equal at the same place."""
    pairs = [(a, b) for left, right in zip(one, two, strict=True) for a, b in zip(left, right, strict=False)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def allocated(setting: Setting) -> int:
    return torch.cuda.memory_reserved() if setting.device.type == "cuda" else 0
