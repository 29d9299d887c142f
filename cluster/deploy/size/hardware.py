"""GPUs as their makers describe them, and this machine's CPU as measured."""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from actors.errors import InvalidRequest
from cluster.validation import describe

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_FLOAT32_SLOWER = 16.0  # than bfloat16 on tensor cores
_READ_BYTES = 256 * 2**20  # larger than any cache
_PRODUCT_SIZE, _PRODUCT_ROWS = 1024, 16  # a square weight and the rows of a round


class Gpu(BaseModel):
    """One kind of device. Rates are peaks, without sparsity; memory is what a process can allocate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: _Positive
    bandwidth_tb_s: _Positive  # memory bandwidth, 1e12 bytes/s
    tflops: _Positive  # matrix products in bfloat16
    tflops_fp8: _Positive | None = None  # None: fp8 weights are multiplied in bfloat16
    tflops_float32: _Positive | None = None  # None: a sixteenth of tflops
    link_gb_s: _Positive = 25.0  # to other GPUs of the node, one direction, 1e9 bytes/s; PCIe 4 by default
    link_latency_us: Annotated[float, Field(ge=0, le=1e6)] = 20.0  # an empty all-reduce
    per_node: Annotated[int, Field(ge=1, le=128)] = 8

    def flops(self, dtype: str) -> float:
        """Peak floating-point operations a second. Quantized weights are multiplied in bfloat16."""
        if dtype == "float32":
            return (self.tflops_float32 or self.tflops / _FLOAT32_SLOWER) * 1e12
        return ((dtype == "fp8" and self.tflops_fp8) or self.tflops) * 1e12


_COLUMNS = ("memory_gib", "bandwidth_tb_s", "tflops", "link_gb_s", "link_latency_us", "tflops_fp8")
_GPU_TABLE = """
a10g       22.0   0.6    70    25  20
l4         22.0   0.3    121   25  20  242
l40s       44.3   0.864  362   25  20  733
a100-40gb  39.4   1.555  312   300 8
a100       79.2   2.039  312   300 8
h20        95.0   4.0    148   450 8   296
h100       79.1   3.35   989   450 8   1979
h200       139.8  4.8    989   450 8   1979
b200       178.3  8.0    2250  900 8   4500
"""
GPUS: Mapping[str, Gpu] = {
    name: Gpu.model_validate(dict(zip(_COLUMNS, numbers, strict=False)))
    for name, *numbers in map(str.split, _GPU_TABLE.strip().splitlines())
}


def read_hardware(path: Path) -> dict[str, Gpu]:
    """GPUs by lower-case name from a YAML file with the fields of `Gpu`. Raises InvalidRequest."""
    try:
        given = TypeAdapter(dict[str, Gpu]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        return {name.lower(): gpu for name, gpu in given.items()}
    except OSError as error:
        limit = f"it cannot be read: {error.strerror or error}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        limit = f"it is not valid YAML: {' '.join(str(error).split())}"
    except ValidationError as error:
        limit = f"{describe(error)}; a GPU has {', '.join(Gpu.model_fields)}"
    raise InvalidRequest("--hardware", str(path), limit)


def parse_gpus(text: str, field: str = "--gpus", known: Mapping[str, Gpu] = GPUS) -> tuple[str, Gpu, int]:
    """`h200:8`, or `h200` for one -> (name, kind, number). Raises InvalidRequest."""
    name, separator, number = text.partition(":")
    if (gpu := known.get(name.lower())) is None:
        limit = f"known GPUs are {', '.join(sorted(known))}; describe others in a file: --hardware"
        raise InvalidRequest(field, name, limit)
    if separator and not re.fullmatch("[1-9][0-9]{0,5}", number):
        raise InvalidRequest(field, text, "write name:number, such as h200:8")
    count = int(number or 1)
    if count > gpu.per_node:
        limit = f"a target group stays within a node, which has {gpu.per_node} of them; size one group and multiply"
        raise InvalidRequest(field, text, limit)
    return name.lower(), gpu, count


def measure_cpu(dtype: str, memory_gib: float | None = None, bandwidth_gb_s: float | None = None) -> Gpu:
    """This machine's CPU: memory, read bandwidth and rate of products in `dtype`, with torch's threads, in about
    a second. What is given is not measured."""
    import torch

    if bandwidth_gb_s is None:
        matrix = torch.ones(_READ_BYTES // 4 // 4096, 4096)
        bandwidth_gb_s = _READ_BYTES / _fastest(lambda: torch.mv(matrix, matrix[0])) / 1e9
    weight = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.float32 if dtype == "float32" else torch.bfloat16)
    rows = weight[:_PRODUCT_ROWS].clone()
    tflops = 2 * rows.numel() * _PRODUCT_SIZE / _fastest(lambda: torch.nn.functional.linear(rows, weight)) / 1e12
    return Gpu(
        memory_gib=memory_gib or psutil.virtual_memory().total / 2**30,
        bandwidth_tb_s=bandwidth_gb_s / 1000,
        tflops=tflops,
        tflops_float32=tflops,
        per_node=1,
    )


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of 20 calls."""
    return min(timeit.repeat(work, number=1, repeat=20))
