"""Whether a row's bits depend on its company: the library's products by rows, and one Triton tile of a fixed shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from tests.gpu.experiments.setting import Setting

_TIERS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@triton.jit
def fixed_tile_kernel(
    x, weight, out, rows, outputs,
    INPUTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """out = x weight^T, in tiles of one shape and sums of one order."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for first in range(0, INPUTS, TILE_K):
        k = first + tl.arange(0, TILE_K)
        left = tl.load(x + m[:, None] * INPUTS + k[None], mask=m[:, None] < rows, other=0.0)
        right = tl.load(weight + n[:, None] * INPUTS + k[None], mask=n[:, None] < outputs, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    tl.store(out + m[:, None] * outputs + n[None], total, mask=(m[:, None] < rows) & (n[None] < outputs))


def fixed_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), len(weight), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(len(x), 16), triton.cdiv(len(weight), 64))
    fixed_tile_kernel[grid](x, weight, out, len(x), len(weight), INPUTS=x.shape[1], TILE_M=16, TILE_N=64, TILE_K=32)
    return out


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    for inputs, outputs in setting.of(((4096, 4096), (4096, 28672), (14336, 4096)), ((64, 96),)):
        weight = torch.randn(outputs, inputs, device=setting.device, dtype=setting.dtype)
        most = torch.randn(_TIERS[-1], inputs, device=setting.device, dtype=setting.dtype)
        for name, product in (("library", linear), ("fixed tiles", fixed_tiles)):
            bits = set()
            tiers = setting.of(_TIERS, (1, 2, 18))
            for rows in tiers:
                for place in {0, rows // 2, rows - 1}:
                    company = most[:rows].clone()
                    company[place] = most[0]
                    bits.add(product(company, weight)[place].float().cpu().numpy().tobytes())
            row = most[: setting.of(16, 2)]
            ms = setting.time(lambda product=product, row=row, weight=weight: product(row, weight))
            yield {
                "product": f"{inputs}x{outputs}", "by": name, "different bits of one row": len(bits),
                "tiers": len(tiers), "16 rows, us": ms.median * 1e3,
            }  # fmt: skip
