"""Compiles the kernels of attention and quantized products for NVIDIA GPUs, without one; prints a JSON line for each.

A program of its own, because it must import Triton without its interpreter. Its argument is
"each kernel" or "other shapes".
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actors.engine.attention import tree_kernels
from actors.engine.attention.exact_kernel import attend_row_kernel, row_constants
from actors.engine.attention.triton_tree import _LARGE_SHARED, attend_constants, combine_constants
from actors.models.weight_kernels import int4_kernel, int8_kernel, launch_options, product_constants

NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INT64, FLOAT32 = ("slots", "ancestors"), ("scale", "softcap")
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes of a program, by capability
POINTERS = ("first_rows", "begins", "tree_starts", "block_tables", "visible_ends", "row_positions", "node_positions")


def compiled(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    types: dict[str, str],
    options: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Shared memory and spilled registers of one kernel, in bytes."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("_stride") or name in ("num_inputs", "num_outputs")
    }
    options = options or {"num_warps": 4, "num_stages": 2}
    source = ASTSource(kernel, signature, constants, aligned)
    log = io.StringIO()
    with redirect_stdout(log):  # Triton prints what ptxas says
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    told = log.getvalue()
    assert architecture in told, told
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", told)))
    return {"kernel": made.name, "architecture": architecture, "shared": made.metadata.shared, "spilled": spilled}


def attend(capability: int, dtype: torch.dtype, **case: Any) -> dict[str, Any]:
    types = dict.fromkeys(POINTERS, "*i32") | dict.fromkeys(INT64, "*i64") | dict.fromkeys(FLOAT32, "fp32")
    types |= dict.fromkeys(("query", "keys", "values", "pool_keys", "pool_values", "sinks"), NAMES[dtype])
    types |= {"output": "*fp32" if case["is_split"] else NAMES[dtype], "log_sums": "*fp32"}
    constants = attend_constants(dtype=dtype, block_size=16, **case)
    return {**compiled(tree_kernels.attend_kernel, capability, constants, types), "dtype": str(dtype), **case}


def product(capability: int, group: int, rows: int, in_features: int, out_features: int) -> dict[str, Any]:
    types = {"inputs": "*bf16", "output": "*bf16", "weight": "*u8", "scales": "*i32"}
    if not group:
        types |= {"weight": "*i8", "scales": "*fp32"}
    constants = product_constants(rows, in_features, out_features, group, torch.bfloat16)
    options = launch_options(rows, out_features, group, torch.bfloat16, SHARED_MEMORY[capability])
    made = compiled(int4_kernel if group else int8_kernel, capability, constants, types, options)
    limit = {"limit": SHARED_MEMORY[capability], "group": group, "rows": rows}
    return {**made, **limit, "in_features": in_features, "out_features": out_features}


LLAMA = {
    "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "rows_per_sequence": 64, "is_split": True,
    "window": 0, "has_softcap": False, "has_sinks": False,
}  # fmt: skip
EVERYTHING = {
    "heads": 9, "kv_heads": 3, "head_dim": 256, "value_dim": 80, "rows_per_sequence": 64, "is_split": False,
    "window": 1024, "has_softcap": True, "has_sinks": True,
}  # fmt: skip
DEEPSEEK = LLAMA | {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "shares_values": True}


def each_kernel() -> Iterator[dict[str, Any]]:
    """Every kernel once, and every architecture."""
    yield attend(90, torch.bfloat16, **DEEPSEEK)
    yield attend(80, torch.bfloat16, **EVERYTHING)
    yield compiled(
        tree_kernels.combine_kernel,
        80,
        combine_constants(heads=32, value_dim=128, num_splits=128, has_sinks=True),
        dict.fromkeys(("parts", "log_sums"), "*fp32")
        | dict.fromkeys(("output", "sinks"), "*bf16")
        | dict.fromkeys(("first_rows", "begins"), "*i32"),
    )
    yield compiled(
        attend_row_kernel,
        80,
        row_constants(heads=32, kv_heads=8, head_dim=256, value_dim=256, has_softcap=True),
        dict.fromkeys(("query", "keys", "values", "output"), "*bf16")
        | dict.fromkeys(("context", "starts"), "*i64")
        | dict.fromkeys(FLOAT32, "fp32"),
    )
    yield product(90, 32, 64, 4096, 28672)
    yield product(86, 0, 64, 4096, 4096)
    yield product(80, 32, 64, 4000, 4096)


def other_shapes() -> Iterator[dict[str, Any]]:
    yield attend(90, torch.bfloat16, **LLAMA)
    largest_tile = LLAMA | {"rows_per_sequence": 8, "keys": 2048, "has_large_shared": True}
    yield attend(80, torch.bfloat16, **largest_tile) | {"limit": _LARGE_SHARED}
    yield product(90, 0, 64, 4096, 28672)
    yield product(86, 32, 64, 4096, 28672)
    yield product(80, 0, 64, 4000, 4096)


def main() -> None:
    triton.knobs.nvidia.dump_ptxas_log = True
    lines = {"each kernel": each_kernel, "other shapes": other_shapes}[sys.argv[1]]
    for line in lines():
        print(json.dumps(line))


if __name__ == "__main__":
    main()
