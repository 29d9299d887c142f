"""Matrix products of the layers by rows: bfloat16, merged projections, fp8, weights in int8 and int4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear

from actors.models.quantization import Fp8Linear, Int4Linear, Int8Linear
from tests.gpu.experiments.setting import SHAPES, Setting

_ROWS = (1, 8, 16, 32, 64, 128, 256)
_COPIES = 8  # so that no cache holds the weights


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    for name in setting.of(("8B", "70B/8"), ("8B",)):
        shape = SHAPES[name]
        hidden = setting.of(shape["hidden_size"], 64)
        inner = setting.of(shape["intermediate_size"], 96)
        head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
        query, key = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
        if setting.is_dry:
            query, key = 64, 32
        groups = {"qkv": (query, key, key), "o": (hidden,), "gate up": (inner, inner), "down": (hidden,)}
        for rows in setting.of(_ROWS, (1, 2)):
            for group, outputs in groups.items():
                inputs = {"o": query, "down": inner}.get(group, hidden)
                yield {"shape": name, "rows": rows, "product": group, **_times(setting, rows, inputs, outputs)}


def _times(setting: Setting, rows: int, inputs: int, outputs: tuple[int, ...]) -> dict[str, float]:
    """Microseconds."""
    device, dtype = setting.device, setting.dtype
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    merged = [torch.randn(sum(outputs), inputs, device=device, dtype=dtype) for _ in range(setting.of(_COPIES, 2))]
    parts = [weight.split(list(outputs)) for weight in merged]
    found = {
        "apart": lambda: [linear(x, part) for weight in parts for part in weight],
        "merged": lambda: [linear(x, weight) for weight in merged],
    }
    if len(outputs) == 1:
        del found["apart"]
    if device.type == "cuda":
        eights = [weight.to(torch.float8_e4m3fn) for weight in merged]
        scale = torch.ones((), device=device)
        if rows % 16 == 0:  # what the library takes
            x8 = x.to(torch.float8_e4m3fn)
            found["fp8"] = lambda: [
                torch._scaled_mm(x8, weight.t(), scale_a=scale, scale_b=scale, out_dtype=dtype) for weight in eights
            ]
    layers: dict[str, list[torch.nn.Module]] = {}
    for weight in merged[:2]:
        layer = torch.nn.Linear(inputs, sum(outputs), bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layers.setdefault("int8, widened", []).append(Int8Linear(layer, device, has_kernel=False))
        if device.type == "cuda":
            layers.setdefault("int8", []).append(Int8Linear(layer, device))
            layers.setdefault("int4", []).append(Int4Linear(layer, device))
            layers.setdefault("fp8 with its quantizer", []).append(Fp8Linear(layer, device))
    found |= {name: lambda those=those: [layer(x) for layer in those] for name, those in layers.items()}
    times = {name: setting.time(launch).median * 1e3 for name, launch in found.items()}
    return {name: value / len(layers.get(name, merged)) for name, value in times.items()}
