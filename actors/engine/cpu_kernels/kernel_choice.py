"""Chooses the kernel of each linear layer by measuring on this machine, at the first start with a shape.

Processors differ too much for a rule: matrix instructions, widths of vectors, bandwidth, and libraries that favour
their maker's. Measurements are stored in $PACELINE_HOME/cpu_kernels.json, so that later starts make the same choice.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import logging
import math
import operator
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from pathlib import Path

import llvmlite.binding as llvm
import torch
from numba import config
from torch import Tensor, nn

from actors.engine.cpu_kernels.block_weights import BlockWeights, blocks_of_int4, code_bits, find_blocks, grid_of
from actors.engine.cpu_kernels.byte_product import ByteProduct
from actors.engine.cpu_kernels.entry_points import SOURCES
from actors.engine.cpu_kernels.microkernel import AHEAD_BYTES
from actors.engine.cpu_kernels.packed_linear import PackedLinear
from actors.engine.cpu_kernels.panel_linear import (
    DTYPES,
    PanelKernel,
    PanelLinear,
    Panels,
    has_bfloat16_pairs,
    has_multiply_add,
)
from actors.engine.cpu_kernels.threads import has_openmp
from actors.engine.cpu_kernels.weight_formats import CODE_BITS
from actors.home import paceline_home
from actors.models.quantization import Int4Linear, Int8Linear, Product
from actors.options import Dtype

logger = logging.getLogger(__name__)

_LIBRARY_LINEARS = (nn.Linear, PackedLinear)
_PANELS = {
    "panel": PanelKernel(),
    "panel ahead": PanelKernel(ahead_bytes=AHEAD_BYTES),
    "panel dense": PanelKernel(in_blocks=False),
    "pairs": PanelKernel(rounds_inputs=True),
    "pairs ahead": PanelKernel(rounds_inputs=True, ahead_bytes=AHEAD_BYTES),
}
_IN_BLOCKS = ("panel", "panel ahead")
KERNELS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    **{name: partial(PanelLinear, kernel=kernel) for name, kernel in _PANELS.items()},
    "packed": PackedLinear,
    "plain": lambda linear: linear,
}
INT8_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Product]] = {  # of weight and scales
    "panel": lambda weight, scales: Panels(weight, _PANELS["panel"], scales=scales),
    "panel ahead": lambda weight, scales: Panels(weight, _PANELS["panel ahead"], scales=scales),
    "bytes": ByteProduct,
}
_WIDENED = "widened"  # an Int8Linear without a product
_ROWS = (1, 2, 4, 8, 16, 64)  # decoding without and with drafts, alone and in company, and prefill
_RUNS = 3
_HOPELESS = 4.0  # a kernel so many times slower than another is not measured further
_BYTES = 64 << 20  # weights of a measurement: more than caches hold, as a model has
_MOST_COPIES = 32
_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LEAST_GAIN = 1.1  # for which bfloat16 is worth its rounding
_MOST_LOSS = 1.25  # largest slowdown of products accepted for fusing
_SMALL = 1 << 18  # bytes of weights for which the call costs more than the product


def replace_linears(model: nn.Module) -> bool:
    """Replace plain `nn.Linear`s of a CPU model in place by the kernels chosen for their shapes, and give products to
    those in 8 and 4 bits.

    Returns whether forwards should be padded to few different row counts: libraries keep a kernel and memory for each.
    Other devices, tensor-parallel shards and layers with hooks stay as they are. Tied weights stay tied for the module
    that is no Linear: an embedding keeps its own copy.
    """
    choices = _choices_of(paceline_home() / "cpu_kernels.json")
    for module in list(model.modules()):
        reads_weights = _reads_weights(module)
        for name, child in list(module.named_children()):
            if _is_plain(child) and not reads_weights:
                kernel = choices.kernel(*_shape_of(child.weight))
                setattr(module, name, KERNELS[kernel](child))
    for module in model.modules():
        if not isinstance(module, (Int8Linear, Int4Linear)) or module.product or module.weight.device.type != "cpu":
            continue
        shape = module.in_features, module.out_features
        if isinstance(module, Int4Linear):
            if has_openmp() and has_multiply_add():
                panels = partial(Panels, kernel=choices.panels_in_codes(*shape, 4))
                module.take_product(lambda *numbers, panels=panels: panels(blocks_of_int4(*numbers)))
        elif (product := choices.kernel(torch.int8, *shape)) != _WIDENED:
            module.take_product(INT8_PRODUCTS[product])
    return any(
        isinstance(module, _LIBRARY_LINEARS)
        or isinstance(getattr(module, "product", None), ByteProduct)
        or (isinstance(module, Int4Linear) and module.product is None)
        for module in model.modules()
    )


def choose_panels(weight: Tensor | BlockWeights) -> PanelKernel | None:
    """How panels multiply a weight [out_features, in_features] in a fused layer; None where another kernel is so much
    faster that it pays more than fusing."""
    choices = _choices_of(paceline_home() / "cpu_kernels.json")
    if isinstance(weight, BlockWeights):
        out_features, in_features = weight.shape
        return choices.panels_in_codes(in_features, out_features, CODE_BITS[weight.kind])
    return _PANELS.get(choices.panels(*_shape_of(weight)))


def fastest_dtype(in_features: int, out_features: int) -> Dtype:
    """In which a CPU model with weights in bfloat16 is faster here: measured once on products of this shape."""
    return _choices_of(paceline_home() / "cpu_kernels.json").dtype(in_features, out_features)


def _reads_weights(module: nn.Module) -> bool:
    """Whether a module's forward multiplies with the weights of its parts by itself, as some routers of experts do."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "weight" in code.co_names


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight.data
    # A tensor-parallel shard is a DTensor, which carries its plan with it.
    return type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype in DTYPES


def _shape_of(weight: Tensor) -> tuple[torch.dtype, int, int, int]:
    """dtype, in_features, out_features and bits of the codes that a weight is stored in, 0 for none."""
    return weight.dtype, weight.shape[1], len(weight), code_bits(weight) if has_multiply_add() else 0


@lru_cache
def _choices_of(path: Path) -> KernelChoices:
    """One for a process: models with equal shapes, such as a draft model and a copy of it, get equal kernels."""
    return KernelChoices(path)


class KernelChoices:
    """Names of the fastest kernels by dtype and shape, from a file of this machine or measured.

    One process measures at a time, and the others take what it has found: two that compute with different kernels would
    round differently.
    """

    def __init__(self, path: Path) -> None:
        """The file need not exist. If it cannot be read, kernels are measured again."""
        self._path = path
        self._machine = _machine()
        self._known = self._read().get(self._machine, {})

    def kernel(self, dtype: torch.dtype, in_features: int, out_features: int, bits: int = 0) -> str:
        """bits: of the codes in which the weight can be stored, 0 for none."""
        if _is_small(dtype, in_features, out_features):
            return "panel"
        key = f"{_name(dtype)} {in_features}x{out_features}{_of_bits(bits)}"
        return self._choice(key, lambda: fastest_kernel(measure(dtype, in_features, out_features, bits=bits)))

    def panels(self, dtype: torch.dtype, in_features: int, out_features: int, bits: int = 0) -> str:
        """A kernel of panels, or "plain"."""
        if _is_small(dtype, in_features, out_features):
            return "panel"
        key = f"{_name(dtype)} {in_features}x{out_features}{_of_bits(bits)} in fused layers"
        return self._choice(key, lambda: fastest_panels(measure(dtype, in_features, out_features, bits=bits)))

    def panels_in_codes(self, in_features: int, out_features: int, bits: int) -> PanelKernel:
        """For weights that are codes, whatever else is faster."""
        name = self.panels(torch.float32, in_features, out_features, bits)
        return _PANELS[name if name in _IN_BLOCKS else "panel"]

    def dtype(self, in_features: int, out_features: int) -> Dtype:
        """In which products with weights in bfloat16 are faster; float32, which rounds nothing, if it is not slower."""

        def measured() -> str:
            seconds = {}
            for name, dtype in _DTYPES.items():
                times = measure(dtype, in_features, out_features, stored=torch.bfloat16)
                seconds[name] = times[fastest_kernel(times)]
            ratio = math.prod(map(operator.truediv, seconds["float32"], seconds["bfloat16"])) ** (1 / len(_ROWS))
            return "bfloat16" if ratio >= _LEAST_GAIN else "float32"

        choice = self._choice(f"dtype of {in_features}x{out_features} in bfloat16", measured)
        return "bfloat16" if choice == "bfloat16" else "float32"

    def _choice(self, key: str, measured: Callable[[], str]) -> str:
        if key not in self._known:
            with _locked(self._path.with_suffix(".lock")):
                known = self._read()
                self._known |= known.get(self._machine, {})
                if key not in self._known:
                    self._known[key] = measured()
                    logger.info("%s: %r is the fastest here", key, self._known[key])
                    self._write(known | {self._machine: self._known})
        return self._known[key]

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            machines = json.loads(self._path.read_text(encoding="utf-8"))
            return {
                machine: {key: name for key, name in known.items() if name in _names_for(key)}
                for machine, known in machines.items()
                if isinstance(known, dict)
            }
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return {}

    def _write(self, machines: dict[str, dict[str, str]]) -> None:
        """A home that cannot be written costs the next start the same time."""
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(json.dumps(machines, indent=1), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            logger.info("measured kernels are not kept: %s", error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive across processes if the lock file can be created."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("kernels are measured without a lock: %s", error)
        yield


def _machine() -> str:
    """What the speed of a kernel depends on, as far as it can change under one home: also our own code."""
    masks = " ".join(filter(None, (os.environ.get("ONEDNN_MAX_CPU_ISA"), config.CPU_NAME, config.CPU_FEATURES)))
    if not has_openmp():
        masks += " without OpenMP"
    cpu = f"{platform.machine()} {llvm.get_host_cpu_name()} {torch.backends.cpu.get_cpu_capability()} {masks}".strip()
    return f"{cpu}, torch {torch.__version__}, {torch.get_num_threads()} threads, kernels {SOURCES:x}"


def fastest_kernel(seconds: dict[str, list[float]]) -> str:
    """The kernel with the smallest product of its times, which counts ratios at all row counts alike."""
    return min(seconds, key=lambda name: sum(map(math.log, seconds[name])))


def fastest_panels(seconds: dict[str, list[float]]) -> str:
    """The fastest kernel of panels, or "plain" where there is none or another is too much faster."""
    panels = {name: times for name, times in seconds.items() if name in _PANELS}
    if not panels:
        return "plain"
    best, fastest = panels[fastest_kernel(panels)], seconds[fastest_kernel(seconds)]
    loss = math.prod(map(operator.truediv, best, fastest)) ** (1 / len(best))
    return fastest_kernel(panels) if loss <= _MOST_LOSS else "plain"


def _is_small(dtype: torch.dtype, in_features: int, out_features: int) -> bool:
    return in_features * out_features * dtype.itemsize <= _SMALL and has_openmp()


def _names_for(key: str) -> Collection[str]:
    """What a record may hold under a key."""
    if key.startswith("dtype of"):
        return _DTYPES
    panels = [name for name, kernel in _PANELS.items() if not kernel.rounds_inputs]
    if key.startswith("bfloat16") and has_bfloat16_pairs():
        panels = list(_PANELS)
    if key.endswith("in fused layers"):
        return [*panels, "plain"]
    return [*INT8_PRODUCTS, _WIDENED] if key.startswith("int8") else [*panels, "packed", "plain"]


def _of_bits(bits: int) -> str:
    return f" in {bits} bits" if bits else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.inference_mode()
def measure(
    dtype: torch.dtype, in_features: int, out_features: int, stored: torch.dtype | None = None, bits: int = 0
) -> dict[str, list[float]]:
    """Seconds of a product by kernel, for each of `_ROWS`, in memory that no cache holds; inf for what was given up.

    Of large matrices, a part of the outputs is measured. stored: what weights are rounded to before, if not to `dtype`.
    bits: of codes that the weights can be stored in; 0 for none.
    """
    bytes_per_output = in_features * ((bits + 1) / 8 if bits else dtype.itemsize)
    outputs = min(out_features, max(16, int(_BYTES / 4 / bytes_per_output)))
    copies = max(2, min(_MOST_COPIES, int(_BYTES / (outputs * bytes_per_output))))
    best = [math.inf] * len(_ROWS)
    seconds = {}
    for name, layers in _built(dtype, stored or dtype, in_features, outputs, copies, bits):
        seconds[name] = [math.inf] * len(_ROWS)
        for index, rows in enumerate(_ROWS):
            inputs = torch.randn(1, rows, in_features, dtype=dtype if dtype.is_floating_point else torch.float32)
            seconds[name][index] = min(_time(layers, inputs) for _ in range(_RUNS))
            if seconds[name][index] > _HOPELESS * best[index]:
                break
            best[index] = min(best[index], seconds[name][index])
    return seconds


def _built(
    dtype: torch.dtype, stored: torch.dtype, in_features: int, out_features: int, copies: int, bits: int
) -> Iterator[tuple[str, list[nn.Module]]]:
    is_int8 = dtype == torch.int8
    weight = torch.randn(out_features, in_features).to(torch.float32 if is_int8 else stored)
    if bits:
        weight = grid_of(weight, bits).to(stored)
    blocks = find_blocks(weight) if bits else None  # once: that takes longer than the copies
    for name in (*INT8_PRODUCTS, _WIDENED) if is_int8 else KERNELS:
        if name == "panel dense" and not bits:
            continue  # the same as "panel"
        layers: list[nn.Module] = []
        for _ in range(copies):
            linear = nn.Linear(in_features, out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(
                weight.clone() if is_int8 else weight.to(dtype, copy=True), requires_grad=False
            )
            try:
                if blocks is not None and name in _IN_BLOCKS:
                    layers.append(PanelLinear(linear, _PANELS[name], blocks))
                else:
                    layers.append(_int8_layer(linear, name) if is_int8 else KERNELS[name](linear))
            except (
                RuntimeError,
                OSError,
                AttributeError,
            ):  # this processor lacks instructions for it, or torch its library
                break
        if layers:
            yield name, layers


def _int8_layer(linear: nn.Linear, product: str) -> Int8Linear:
    layer = Int8Linear(linear, torch.device("cpu"))
    if product != _WIDENED:
        layer.take_product(INT8_PRODUCTS[product])
    return layer


def _time(layers: list[nn.Module], inputs: Tensor) -> float:
    """Seconds of one product, the mean over the layers."""
    started = time.perf_counter()
    for layer in layers:
        layer(inputs)
    return (time.perf_counter() - started) / len(layers)
