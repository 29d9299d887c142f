"""The machine, and the two rates that every floor is made of."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import triton

from tests.gpu.experiments.setting import Setting


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    is_cuda = setting.device.type == "cuda"
    yield {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
    }  # fmt: skip
    for gigabytes in setting.of((1, 8), (0.001,)):
        weights = torch.randn(int(gigabytes * 2**30) // 4, device=setting.device)
        ms = setting.time(lambda weights=weights: weights.sum())
        yield {"reads GB": gigabytes, "ms": ms.least, "TB/s": weights.nbytes / ms.least / 1e9}
        if not setting.is_dry:
            other = torch.empty_like(weights)
            ms = setting.time(lambda weights=weights, other=other: other.copy_(weights))
            yield {"copies GB": gigabytes, "ms": ms.least, "TB/s": 2 * weights.nbytes / ms.least / 1e9}
        del weights
        setting.release()
    side = setting.of(8192, 64)
    one, two = (torch.randn(side, side, device=setting.device, dtype=setting.dtype) for _ in range(2))
    ms = setting.time(lambda: one @ two)
    yield {"multiplies": side, "ms": ms.least, "TFLOP/s": 2 * side**3 / ms.least / 1e9}
