"""Quantizes weights one by one while `transformers` loads them: what is whole in memory is one tensor.

With tensor parallelism every rank quantizes its own shard, and the shards are slices of what one rank would have: the
scale of an output in int8 or fp8 is that of its whole row, and the groups of int4 are not cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import ConversionOps
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from actors.errors import ModelError
from actors.models.quantization import (
    check_int4_shard,
    kind_of_layer,
    largest_of_rows,
    no_linears,
    output_layer,
    quantize_linear,
)
from actors.options import Quantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHOD = "paceline"


@register_quantization_config(_METHOD)
class WhileLoading(QuantizationConfigMixin):
    """The argument `quantization_config` of `from_pretrained`.

    keep_head: the output layer stays as it is in the checkpoint.
    """

    def __init__(self, quantization: Quantization, ranks: int = 1, keep_head: bool = False) -> None:
        self.quant_method = _METHOD
        self.quantization: Quantization = quantization
        self.ranks = ranks
        self.keep_head = keep_head
        self.problem: ModelError | None = None  # of a layer; the loader reports only that there was one

    def __deepcopy__(self, _: object) -> WhileLoading:  # the caller reads `problem` on its own object
        return self


@register_quantizer(_METHOD)
class LinearQuantizer(HfQuantizer):
    """Replaces each `nn.Linear` when its weight is read. Afterwards nothing of it stays with the model.

    A tied output layer is quantized at last, from the embeddings, which stay whole.
    """

    quantization_config: WhileLoading

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config, plan = self.quantization_config, model.tp_plan
        self._head = output_layer(model)
        self._names = {
            name
            for name, module in model.named_modules()
            if type(module) is nn.Linear and not (config.keep_head and module is self._head)
        }
        if not self._names and not config.keep_head:
            raise no_linears(model, config.quantization)
        self._tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        if config.ranks == 1:
            return
        for name in self._names:
            style, linear = plan.get(replace_layer_number_by_wildcard(name), ""), model.get_submodule(name)
            if self._kind(linear, linear is self._head) == "int4" and style.startswith("rowwise"):
                check_int4_shard(name, linear, config.ranks)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        is_linear = param_name.endswith(".weight") and param_name.removesuffix(".weight") in self._names
        return is_linear and param_name not in self._tied

    @property
    def quantized_element_size(self) -> float:
        return 0.5 if self.quantization_config.quantization == "int4" else 1.0

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        for name in sorted(self._names):  # tensors that the checkpoint does not contain under their name
            weight = model.get_submodule(name).weight
            self.replace(model, name, weight.to_local() if isinstance(weight, DTensor) else weight)
        self.remove_quantization_config(model)

    def replace(self, model: PreTrainedModel, name: str, weight: Tensor) -> None:
        """Put a quantized layer in the place of a linear one. weight: this rank's, [outputs, inputs]."""
        linear = model.get_submodule(name)
        part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        part.weight = nn.Parameter(weight, requires_grad=False)
        kind = self._kind(linear, linear is self._head)
        if kind == "fp8":
            kind = self._kind(part, False)  # the part may not divide into blocks though the whole does
        maxima = None if kind == "int4" else _maxima_of_whole_rows(weight.detach(), linear.weight)
        quantized = quantize_linear(part, weight.device, kind, maxima)
        quantized.bias = linear.bias  # perhaps not loaded yet
        quantized._is_hf_initialized = True
        quantized.whole_out_features = linear.out_features  # `shards` asks a rank's part
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, quantized)
        self._names.discard(name)

    def _kind(self, linear: nn.Linear, is_head: bool) -> Quantization:
        return kind_of_layer(linear, self.quantization_config.quantization, is_head)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Quantize(ConversionOps):
    def __init__(self, quantizer: LinearQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, missing_keys: set[str], **_: Any
    ) -> dict[str, Any]:
        """Replace the layers of these weights; return the tensors that are loaded as they are."""
        others = {}
        for name, value in input_dict.items():
            if self._quantizer.param_needs_quantization(model, name):
                weight = value[0] if isinstance(value, list) else value
                layer = name.removesuffix(".weight")
                try:
                    self._quantizer.replace(model, layer, weight)
                except ModelError as error:
                    config = self._quantizer.quantization_config
                    config.problem = config.problem or ModelError(f"{layer}: {error}")
                    raise
                missing_keys.discard(name)
            else:
                others[name] = value
        return others


def _maxima_of_whole_rows(weight: Tensor, placeholder: Tensor) -> Tensor:
    """float32 [outputs]; ranks that have other inputs of the same outputs agree. All ranks load in the same order."""
    maxima = largest_of_rows(weight)
    if isinstance(placeholder, DTensor):
        for dimension, placement in enumerate(placeholder.placements):
            if placement.is_shard(1) or placement.is_shard(-1):
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=placeholder.device_mesh.get_group(dimension))
    return maxima


@contextlib.contextmanager
def read_by_tensor() -> Iterator[None]:
    """Copy tensors from the mapped file, whose pages stay resident until it is closed."""
    from transformers import modeling_utils

    original = modeling_utils.safe_open

    def opened(file: str, **options: Any) -> Any:
        return original(file, **{**options, "backend": "pread"})

    modeling_utils.safe_open = opened
    try:
        yield
    finally:
        modeling_utils.safe_open = original
