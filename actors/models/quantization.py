"""Linear layers with weights in fp8, int8 or int4; what goes in and comes out keeps the model's dtype.

int8: one scale an output. Activations are not cut to 8 bits. An engine on a CPU gives each layer the kernel that is
fastest there (`engine.cpu_kernels.byte_product`); on a GPU, `weight_products` has one for few rows. Without a kernel,
weights are widened in every call.

int4: a scale and an offset for every 32 weights of an output. The output layer has int8, and so has a layer whose
inputs are no whole groups.

fp8: float8_e4m3fn with one scale an output; activations are rounded to it likewise, with a scale a row, and multiplied
by `torch._scaled_mm`. That is for Hopper, whose product without scales is twice as fast as the one with scales by row;
a CPU computes the same slowly. The output layer has int8, and so has a layer of a shape that the product does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from actors.errors import ModelError
from actors.models.weight_products import GROUP, has_weight_kernel, weight_product, widened_int4, widened_int8
from actors.options import Quantization

_MOST_INT4_WEIGHT = 65504.0  # the largest number of float16, in which int4 has its offsets
_LEAST_SCALE = 2.0**-24  # of int4, the smallest of float16
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_FP8_UNIT = 16  # inputs and outputs of an fp8 product are multiples of it
_BLOCK = 1 << 22  # weights that are widened at a time while they are quantized


# The rows of a product, float32 [n, in_features] -> float32 [n, out_features].
Product = Callable[[Tensor], Tensor]


class Int8Linear(nn.Module):
    """y = x W^T + b with W = weight * scales[:, None] rounded to the nearest of 255 steps an output."""

    def __init__(
        self,
        linear: nn.Linear,
        device: torch.device,
        row_maxima: Tensor | None = None,
        has_kernel: bool | None = None,
    ) -> None:
        """row_maxima: float32 [out_features], the largest magnitudes of whole rows, of which the linear has a part.
        has_kernel: of `weight_products`; None: where the device has it."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        whole = linear.weight.detach().to(device)
        maxima = largest_of_rows(whole) if row_maxima is None else row_maxima
        scales = maxima.clamp_min(torch.finfo(torch.float32).tiny) / 127
        weight = torch.empty(whole.shape, dtype=torch.int8, device=device)
        for rows in _row_blocks(whole):
            weight[rows] = (whole[rows].float() / scales[rows, None]).round_().to(torch.int8)
        self.register_buffer("scales", scales)  # float32 [out_features]
        self.register_buffer("weight", weight)  # int8 [out_features, in_features]
        self.bias = _bias_on(linear, device)
        self.product: Product | None = None
        self._has_kernel = has_weight_kernel(device) if has_kernel is None else has_kernel

    def take_product(self, make: Callable[[Tensor, Tensor], Product]) -> None:
        """Multiply by a kernel made of weight and scales from now on. It has its own copy of the weight."""
        self.product = make(self.weight, self.scales)
        del self.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        if self.product is not None:
            output = self.product(inputs.reshape(-1, self.in_features).float())
        elif self._has_kernel:
            output = weight_product(inputs.reshape(-1, self.in_features), self.weight, self.scales)
        else:
            return nn.functional.linear(inputs, widened_int8(self.weight, self.scales, inputs.dtype), self.bias)
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], self.out_features).to(inputs.dtype)


class Fp8Linear(nn.Module):
    """y = x W^T + b with W and x rounded to float8_e4m3fn, W with a scale an output and x with a scale a row."""

    def __init__(
        self,
        linear: nn.Linear,
        device: torch.device,
        row_maxima: Tensor | None = None,
        scales_afterwards: bool | None = None,
    ) -> None:
        """row_maxima: see Int8Linear. scales_afterwards: apply scales to what was multiplied without; None: on CUDA."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        whole = linear.weight.detach().to(device)
        maxima = largest_of_rows(whole) if row_maxima is None else row_maxima
        scales = maxima.clamp_min(torch.finfo(torch.float32).tiny) / _FP8_MAX
        weight = torch.empty(whole.shape, dtype=_FP8, device=device)
        for rows in _row_blocks(whole):
            weight[rows] = _to_fp8(whole[rows].float() / scales[rows, None])
        self.register_buffer("scales", scales)  # float32 [out_features]
        self.register_buffer("weight", weight)  # [out_features, in_features]
        self.bias = _bias_on(linear, device)
        self._scales_afterwards = _scales_afterwards(device) if scales_afterwards is None else scales_afterwards
        self.register_buffer("unit", torch.ones((), device=device) if self._scales_afterwards else None)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        rows = inputs.reshape(-1, self.in_features).float()
        scales = rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _FP8_MAX
        output = _fp8_product(_to_fp8(rows / scales), scales, self.weight, self.scales, self.unit, inputs.dtype)
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], self.out_features)


def _to_fp8(numbers: Tensor) -> Tensor:
    # The cast returns NaN for values that are too large; by rounding, the largest value of a row may be.
    return numbers.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _scales_afterwards(device: torch.device) -> bool:
    # On an H200, cuBLAS without scales is 1.6 to 1.8 times as fast as in bfloat16, and torch's kernel with scales by
    # row is slower than bfloat16.
    return device.type == "cuda"


def _fp8_product(
    rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, unit: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[n, out_features]. rows, weight: fp8; scales: float32 [n, 1]; weight_scales: float32 [out_features]; unit: 1.0 in
    float32, to multiply without scales and apply them afterwards.

    Without them, 28672 inputs make up to 448 * 448 * 28672 = 6e9, which float16 does not hold and bfloat16 does.
    """
    if unit is None:
        return torch._scaled_mm(rows, weight.t(), scale_a=scales, scale_b=weight_scales[None], out_dtype=dtype)
    wide = torch.float32 if dtype == torch.float16 else dtype
    product = torch._scaled_mm(rows, weight.t(), scale_a=unit, scale_b=unit, out_dtype=wide)
    return (product * scales * weight_scales).to(dtype)  # in float32, as the scales are


def check_fp8(device: torch.device) -> None:
    """Raises ModelError for a device that does not multiply in fp8."""
    numbers = torch.ones(_FP8_UNIT, _FP8_UNIT, device=device).to(_FP8)
    scales = torch.ones(_FP8_UNIT, device=device)
    unit = scales[0] if _scales_afterwards(device) else None
    try:
        _fp8_product(numbers, scales[:, None], numbers, scales, unit, torch.bfloat16)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"quantization is 'fp8' on device {str(device)!r}, which does not multiply in fp8: {reason}; it needs a "
            "GPU from Hopper on, or a CPU"
        ) from None


class Int4Linear(nn.Module):
    """y = x W^T + b with W = code * scale + offset, a code of 0 to 15 a weight, scale and offset a group of 32."""

    def __init__(self, linear: nn.Linear, device: torch.device, has_kernel: bool | None = None) -> None:
        """has_kernel: see Int8Linear. Raises ModelError for weights that float16 does not reach."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        largest = float(linear.weight.detach().abs().max())
        if not largest <= _MOST_INT4_WEIGHT:
            raise ModelError(
                f"quantization is 'int4'; the largest weight of a {self.in_features} x {self.out_features} layer is "
                f"{largest:g}; it must be at most {_MOST_INT4_WEIGHT:g}"
            )
        whole = linear.weight.detach().to(device).view(self.out_features, -1, GROUP)
        codes = torch.empty(whole.shape, dtype=torch.uint8, device=device)
        scales = torch.empty((*whole.shape[:2], 1), dtype=torch.float16, device=device)
        offsets = torch.empty_like(scales)
        for rows in _row_blocks(whole):
            groups = whole[rows].float()
            low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
            # Rounded to what is kept before codes are chosen, so that they make up for it.
            scales[rows] = ((high - low) / 15).clamp_min(_LEAST_SCALE).half()
            offsets[rows] = low.half()
            steps = (groups - offsets[rows].float()) / scales[rows].float()
            codes[rows] = steps.round_().clamp_(0, 15).to(torch.uint8)
        self.bias = _bias_on(linear, device)
        # float16 [groups of an output, out_features, scale and offset]
        self.register_buffer("scales_and_offsets", torch.cat([scales, offsets], dim=2).transpose(0, 1).contiguous())
        pairs = codes.view(self.out_features, -1, 2)
        self.register_buffer("weight", pairs[:, :, 0] << 4 | pairs[:, :, 1])
        self.product: Product | None = None
        self._has_kernel = has_weight_kernel(device) if has_kernel is None else has_kernel

    def take_product(self, make: Callable[[Tensor, Tensor], Product]) -> None:
        """Multiply by a kernel made of weight, scales and offsets from now on. It has its own copy of them."""
        self.product = make(self.weight, self.scales_and_offsets)
        del self.weight, self.scales_and_offsets

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        rows = inputs.reshape(-1, self.in_features)
        if self.product is not None:
            output = self.product(rows.float())
        elif self._has_kernel:
            output = weight_product(rows, self.weight, self.scales_and_offsets)
        else:
            wide = widened_int4(self.weight, self.scales_and_offsets).to(inputs.dtype)
            return nn.functional.linear(inputs, wide, self.bias)
        if self.bias is not None:
            output += self.bias
        return output.view(*inputs.shape[:-1], self.out_features).to(inputs.dtype)


def quantize_linears(model: nn.Module, quantization: Quantization, device: torch.device) -> None:
    """Replace every `nn.Linear` of a model in place by one on `device`, its weights in 8 or 4 bits.

    Layers that hold their weights otherwise (GPT-2's blocks, fused experts) stay. Raises ModelError for a model without
    any linear layer, and for a device that cannot compute it.
    """
    if quantization == "none":
        return
    check_device(quantization, device)
    head = output_layer(model)
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                kind = kind_of_layer(child, quantization, child is head)
                setattr(module, name, quantize_linear(child, device, kind))
                replaced += 1
    if not replaced:
        raise no_linears(model, quantization)


def quantize_linear(
    linear: nn.Linear, device: torch.device, kind: Quantization, row_maxima: Tensor | None = None
) -> Int8Linear | Int4Linear | Fp8Linear:
    """A layer, or one rank's part of it, on `device`. row_maxima: see Int8Linear."""
    if kind == "int4":
        return Int4Linear(linear, device)
    return (Fp8Linear if kind == "fp8" else Int8Linear)(linear, device, row_maxima)


def kind_of_layer(linear: nn.Linear, quantization: Quantization, is_head: bool) -> Quantization:
    """What a layer, or one rank's part of it, has: int8 where it is the output layer or does not fit."""
    units = {"int4": (GROUP, 1), "fp8": (_FP8_UNIT, _FP8_UNIT)}.get(quantization)
    if units is None or is_head or linear.in_features % units[0] or linear.out_features % units[1]:
        return "int8"
    return quantization


def check_device(quantization: Quantization, device: torch.device) -> None:
    """Raises ModelError where a device cannot compute a quantization."""
    if quantization == "fp8":
        check_fp8(device)


def check_int4_shard(name: str, linear: nn.Linear, ranks: int) -> None:
    """Raises ModelError where ranks that have a part of the inputs each would have parts of int4 groups."""
    if linear.in_features % (GROUP * ranks):
        raise ModelError(
            f"quantization is 'int4' with tensor_parallel {ranks}; the {linear.in_features} inputs of {name} do not "
            f"divide into {ranks} multiples of {GROUP}"
        )


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes the logits, if the model says which it is."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def no_linears(model: nn.Module, quantization: Quantization) -> ModelError:
    return ModelError(f"quantization is {quantization!r}; {type(model).__name__} has no linear layers")


def largest_of_rows(weight: Tensor) -> Tensor:
    """The largest magnitude of each row, float32 [out_features]."""
    low, high = weight.aminmax(dim=1)
    return torch.maximum(high, -low).float()


def _row_blocks(weight: Tensor) -> Iterator[slice]:
    """The rows of a weight, _BLOCK weights at a time: a widened copy of it all might exceed what was loaded before."""
    count = max(1, _BLOCK // max(1, weight[0].numel()))
    return (slice(start, start + count) for start in range(0, len(weight), count))


def _bias_on(linear: nn.Linear, device: torch.device) -> nn.Parameter | None:
    # A parameter, as the row-wise style of transformers looks for it there, to add it once and not on every rank.
    return None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
