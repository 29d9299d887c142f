"""GPUs as their makers describe them, this machine's CPU as measured, and the formats of weights and KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from actors.errors import InvalidRequest

CPU = "cpu"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_FLOAT32_SLOWER = 16.0  # than bfloat16 on tensor cores
_READ_BYTES = 256 * 2**20  # larger than any cache
_PRODUCT_SIZE, _PRODUCT_ROWS = 1024, 16  # a square weight and the rows of a round
_MEASURE_S = 0.25  # for each rate; the fastest call counts


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


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """Devices of one node that share a model by tensor parallelism."""

    name: str
    gpu: Gpu
    count: int


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
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        limit = f"{where}: {first['msg']}; a GPU has {', '.join(Gpu.model_fields)}"
    raise InvalidRequest("--hardware", str(path), limit)


def parse_gpus(text: str, field: str = "--gpus", known: Mapping[str, Gpu] = GPUS) -> GpuGroup:
    """`h200:8`, or `h200` for one. Raises InvalidRequest, which lists the known ones."""
    name, colon, number = text.partition(":")
    if (gpu := known.get(name.lower())) is None:
        limit = f"known GPUs are {', '.join(sorted(known))}; describe others in a file: --hardware"
        raise InvalidRequest(field, name, limit)
    number = number if colon else "1"
    if not (number.isascii() and number.isdigit() and len(number) <= 6 and int(number) >= 1):
        raise InvalidRequest(field, text, "write name:number, such as h200:8")
    if int(number) > gpu.per_node:
        limit = f"a target group stays within a node, which has {gpu.per_node} of them; size one group and multiply"
        raise InvalidRequest(field, text, limit)
    return GpuGroup(name.lower(), gpu, int(number))


# Bytes of a weight. int4: 4 bits, and a scale with an offset for each group of 128.
WEIGHT_BYTES: Mapping[str, float] = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53
}  # fmt: skip
KV_BYTES: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}  # bytes of a number
QUANTIZED = ("int8", "int4")  # weights only: target.quantization
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def find_dtype(name: str, field: str) -> str:
    """The format of weights by its full name. Raises InvalidRequest."""
    if (found := _SHORT.get(name.lower(), name.lower())) not in WEIGHT_BYTES:
        raise InvalidRequest(field, name, f"it must be one of {', '.join(WEIGHT_BYTES)}")
    return found


def find_kv_bytes(name: str, dtype: str) -> float:
    """Bytes of a number in the KV cache; `auto`: as the model with weights of `dtype` computes. Raises
    InvalidRequest."""
    if name.lower() == "auto":
        return 4.0 if dtype == "float32" else 2.0
    if (found := KV_BYTES.get(_SHORT.get(name.lower(), name.lower()))) is None:
        raise InvalidRequest("--kv-dtype", name, f"it must be auto or one of {', '.join(KV_BYTES)}")
    return found


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
    """Seconds of the fastest call; the first one is not counted."""
    work()
    seconds: list[float] = []
    while sum(seconds) < _MEASURE_S:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
