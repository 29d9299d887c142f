"""GPUs as their makers describe them, and how many of them a target group takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from actors.errors import InvalidRequest

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_ALL_REDUCE_US_PER_GPU = 0.5  # on top of a link's own latency: 10 us among four GPUs and 12 among eight, with NVLink


class Gpu(BaseModel):
    """One kind of GPU. Rates are those of the data sheet, without sparsity; memory is what a process can allocate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: _Positive
    bandwidth_tb_s: _Positive  # of its own memory, 1e12 bytes a second
    tflops: _Positive  # of products in bfloat16
    tflops_fp8: _Positive | None = None  # None: it computes in bfloat16 what is stored in fp8
    link_gb_s: _Positive = 25.0  # to other GPUs of the node, one direction, 1e9 bytes a second; PCIe 4 by default
    link_latency_us: Annotated[float, Field(ge=0, le=1e6)] = 20.0  # of an all-reduce of nothing
    per_node: Annotated[int, Field(ge=1, le=128)] = 8


def _with_nvlink(memory: float, bandwidth: float, tflops: float, fp8: float | None, link: float) -> Gpu:
    return Gpu(
        memory_gib=memory,
        bandwidth_tb_s=bandwidth,
        tflops=tflops,
        tflops_fp8=fp8,
        link_gb_s=link,
        link_latency_us=8.0,
    )


GPUS: Mapping[str, Gpu] = {
    "a10g": Gpu(memory_gib=22.0, bandwidth_tb_s=0.6, tflops=70.0),
    "l4": Gpu(memory_gib=22.0, bandwidth_tb_s=0.3, tflops=121.0, tflops_fp8=242.0),
    "l40s": Gpu(memory_gib=44.3, bandwidth_tb_s=0.864, tflops=362.0, tflops_fp8=733.0),
    "a100-40gb": _with_nvlink(39.4, 1.555, 312.0, None, 300.0),
    "a100": _with_nvlink(79.2, 2.039, 312.0, None, 300.0),
    "h20": _with_nvlink(95.0, 4.0, 148.0, 296.0, 450.0),
    "h100": _with_nvlink(79.1, 3.35, 989.0, 1979.0, 450.0),
    "h200": _with_nvlink(139.8, 4.8, 989.0, 1979.0, 450.0),
    "b200": _with_nvlink(178.3, 8.0, 2250.0, 4500.0, 900.0),
}


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of one node that share a model by tensor parallelism."""

    name: str
    gpu: Gpu
    count: int

    @property
    def all_reduce_latency_s(self) -> float:
        """Of one all-reduce, without its bytes; none on a GPU by itself."""
        return (self.gpu.link_latency_us + _ALL_REDUCE_US_PER_GPU * self.count) * 1e-6 if self.count > 1 else 0.0


def read_hardware(path: Path) -> dict[str, Gpu]:
    """GPUs by name, in small letters, from a YAML file, keys as the fields of `Gpu`. Raises InvalidRequest."""
    try:
        given = TypeAdapter(dict[str, Gpu]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        return {name.lower(): gpu for name, gpu in given.items()}
    except OSError as error:
        raise InvalidRequest("--hardware", str(path), f"it cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest("--hardware", str(path), f"it is not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRequest(
            "--hardware", str(path), f"{where}: {first['msg']}; a GPU has {', '.join(Gpu.model_fields)}"
        ) from None


def find_gpu(name: str, field: str, known: Mapping[str, Gpu] = GPUS) -> Gpu:
    """Raises InvalidRequest, naming those that are known."""
    found = known.get(name.lower())
    if found is None:
        limit = f"known GPUs are {', '.join(sorted(known))}; describe others in a file: --hardware"
        raise InvalidRequest(field, name, limit)
    return found


def parse_gpus(text: str, field: str = "--gpus", known: Mapping[str, Gpu] = GPUS) -> GpuGroup:
    """`h200:8`, or `h200` for one. Raises InvalidRequest."""
    name, colon, number = text.partition(":")
    gpu = find_gpu(name, field, known)
    if not colon:
        number = "1"
    if not (number.isascii() and number.isdigit() and len(number) <= 6 and int(number) >= 1):
        raise InvalidRequest(field, text, "write name:number, such as h200:8")
    if int(number) > gpu.per_node:
        limit = f"a target group stays within a node, which has {gpu.per_node} of them; size one group and multiply"
        raise InvalidRequest(field, text, limit)
    return GpuGroup(name.lower(), gpu, int(number))
