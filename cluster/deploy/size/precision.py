"""What a number takes in memory, and how fast a GPU multiplies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.errors import InvalidRequest
from cluster.deploy.size.hardware import Gpu

_FLOAT32_SLOWER = 16.0  # than bfloat16 on tensor cores, where float32 stays float32


@dataclass(frozen=True, slots=True)
class Precision:
    name: str
    weight_bytes: float  # of a weight, scales of its group included
    kv_bytes: float  # of one number in the KV cache, unless another is asked for
    is_served: bool = True  # by Paceline's own engine

    def flops(self, gpu: Gpu) -> float:
        """Floating-point operations a second at the peak. Weights of fewer bits are multiplied in bfloat16."""
        if self.name == "float32":
            return gpu.tflops * 1e12 / _FLOAT32_SLOWER
        if self.name == "fp8" and gpu.tflops_fp8 is not None:
            return gpu.tflops_fp8 * 1e12
        return gpu.tflops * 1e12


PRECISIONS: Mapping[str, Precision] = {
    one.name: one
    for one in (
        Precision("float32", 4.0, 4.0),
        Precision("bfloat16", 2.0, 2.0),
        Precision("float16", 2.0, 2.0),
        Precision("fp8", 1.0, 2.0, is_served=False),
        Precision("int8", 1.0, 2.0),
        Precision("int4", 0.53, 2.0),  # 4 bits, and a scale with an offset for each group of 128
    )
}
QUANTIZED = ("int8", "int4")  # weights alone, by target.quantization
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KV_BYTES: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}


def find_precision(name: str, field: str) -> Precision:
    """Raises InvalidRequest."""
    found = PRECISIONS.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        raise InvalidRequest(field, name, f"it must be one of {', '.join(PRECISIONS)}")
    return found


def find_kv_bytes(name: str, precision: Precision) -> float:
    """`auto`: that of the weights' arithmetic. Raises InvalidRequest."""
    if name.lower() == "auto":
        return precision.kv_bytes
    found = KV_BYTES.get(_SHORT.get(name.lower(), name.lower()))
    if found is None:
        raise InvalidRequest("--kv-dtype", name, f"it must be auto or one of {', '.join(KV_BYTES)}")
    return found
