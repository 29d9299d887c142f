"""What one rank of eight has of a 70B, without the all-reduces; and a whole 70B in fp8 on one card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.experiments.decoding import Decoding
from tests.gpu.experiments.rounds import bytes_read, read_rate
from tests.gpu.experiments.setting import SHAPES, Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    bandwidth = read_rate(setting)
    for is_eager in setting.of((True, False), (True,)):
        model = setting.model("70B/8")
        weights = bytes_read(model)
        for sequences in setting.of((1, 8, 32), (1,)):
            engine = setting.engine(model, sequences * 1900, is_eager=is_eager)
            decoding = Decoding(engine, sequences, setting.of(1024, 20))
            for _ in range(setting.of(4, 1)):
                decoding.round(7)
            ms = setting.wall(lambda decoding=decoding: decoding.round(7))
            floor = weights / bandwidth / 1e9
            yield {
                "70B": "one rank of 8", "compiled": not is_eager, "sequences": sequences, "nodes": 7, "ms": ms.median,
                "floor": floor, "x": ms.median / floor, "all-reduces of 10 us": 160 * 0.01,
            }  # fmt: skip
            if not is_eager:
                break  # a model is compiled for one engine
            del engine, decoding
            setting.release()
        del model
        setting.release()
    yield from _eights(setting)


def _eights(setting: Setting) -> Iterator[dict[str, Any]]:
    """The products of a 70B in fp8, which fits one card: 70 GB of weights."""
    if setting.device.type != "cuda":
        yield {"70B": "fp8", "skipped": "fp8 products need CUDA"}
        return
    shape = SHAPES["70B"]
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    sizes = [(hidden, hidden + 2048), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    one = torch.ones((), device=setting.device)
    weights = [
        [torch.randn(outputs, inputs, device=setting.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
         for inputs, outputs in sizes] for _ in range(layers)
    ]  # fmt: skip
    total = sum(weight.nbytes for layer in weights for weight in layer)
    for rows in (16, 32, 64, 128):
        inputs = [torch.randn(rows, width, device=setting.device).to(torch.float8_e4m3fn) for width, _ in sizes]

        def forward(inputs: list[torch.Tensor] = inputs) -> None:
            for layer in weights:
                for x, weight in zip(inputs, layer, strict=True):
                    torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        ms = setting.time(forward, repeats=5)
        yield {"70B": "fp8 products", "rows": rows, "ms": ms.median, "TB/s": total / ms.median / 1e9}
