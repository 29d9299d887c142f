"""Compiles the parts of a model in place: one graph for all decoder layers of a kind, and one for each small module
beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from actors.engine.attention.carried_plan import carries_plan
from actors.engine.attention.interface import AttentionPlan
from actors.engine.attention.own_attention import has_own_attention
from actors.engine.compiled.merged_linears import merge_linears, share_products
from actors.engine.compiled.opaque_attention import OpaquePlan, attending
from actors.engine.decoder_layers import decoder_layers
from actors.errors import ModelError

_OPAQUE = OpaquePlan()

logger = logging.getLogger(__name__)

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]

_OPTIONS = {
    "force_pointwise_cat": True,  # halves of rotated heads are put together where they are used, not in memory
    "emulate_precision_casts": True,  # values between fused operations are rounded as between kernels
}


def inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """torch's compiler, with products of equal arguments made once."""
    from torch._inductor.compile_fx import compile_fx

    share_products(graph.graph)
    graph.recompile()
    return compile_fx(graph, inputs, config_patches=_OPTIONS)


def compile_model(model: PreTrainedModel, backend: Backend = inductor) -> None:
    """Compile a model in place, at its first calls. Embeddings and the output layer, a kernel each, stay as they are.

    The model must attend through `paged_attention`. Where a part cannot be traced or compiled, one line is logged and
    everything runs as it was. A model that is compiled already stays as it is.
    """
    name = type(model).__name__
    try:
        layers = decoder_layers(model)
        if layers and all(map(_is_compiled, layers)):
            return
        indices = [_layer_index(layer) for layer in layers]
    except ModelError as error:
        logger.warning("%s is not compiled: %s", name, error)
        return
    merge_linears(model, layers)
    kinds: dict[type, _CompiledKind] = {}

    def compiled(module: nn.Module) -> _CompiledKind:
        return kinds.setdefault(type(module), _CompiledKind(type(module), name, backend))

    for layer, index in zip(layers, indices, strict=True):
        layer.forward = partial(_layer_forward, compiled(layer), layer, index)
    for module in model.base_model.children():
        is_one_kernel = type(module).__module__.startswith("torch.")
        if not is_one_kernel and not isinstance(module, nn.Embedding) and "forward" not in vars(module):
            module.forward = partial(compiled(module).run, module)


def _is_compiled(layer: nn.Module) -> bool:
    forward = vars(layer).get("forward")
    return isinstance(forward, partial) and forward.func is _layer_forward


def _layer_index(layer: nn.Module) -> int:
    """Index of the layer's cache. Raises ModelError unless it attends once, in a forward that nobody has replaced."""
    found = {module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")}
    if carries_plan(layer):
        raise ModelError(
            f"{type(layer).__name__} passes no arguments on; hooks bring them, which one graph cannot hold"
        )
    if has_own_attention(layer):
        raise ModelError(f"{type(layer).__name__} attends in a method of its own, which one graph cannot hold")
    if len(found) != 1 or "forward" in vars(layer):
        raise ModelError(
            f"{type(layer).__name__} has {len(found)} caches and {'another' if 'forward' in vars(layer) else 'its own'}"
            " forward; it must have one cache and its own forward"
        )
    return int(found.pop())


def _layer_forward(
    kind: _CompiledKind, layer: nn.Module, index: int, *args: Any, paged_plan: AttentionPlan, **kwargs: Any
) -> Any:
    if kind.is_eager:
        return kind.run(layer, *args, paged_plan=paged_plan, **kwargs)
    with attending(paged_plan, index):
        return kind.run(layer, *args, paged_plan=_OPAQUE, **kwargs)


class _CompiledKind:
    """The forward of a kind of module in one model. It runs uncompiled for good once it cannot be compiled."""

    def __init__(self, kind: type[nn.Module], model_name: str, backend: Backend) -> None:
        self.is_eager = False
        self._kind = kind
        self._model_name = model_name
        self._compiled = torch.compile(_forward_of(kind), fullgraph=True, backend=backend)

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.is_eager:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                    maybe_mark_dynamic(tensor, 1)  # rows: one graph serves all numbers of them
            try:
                return self._compiled(module, *args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self.is_eager = True
                reason = str(error).strip().splitlines() or [type(error).__name__]
                logger.warning(
                    "%s of %s runs eagerly: it cannot be compiled: %s",
                    self._kind.__name__, self._model_name, reason[0],
                )  # fmt: skip
        return self._kind.forward(module, *args, **kwargs)


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """A copy of the function with a separate code object: torch counts recompilations by code object, which decorated
    methods share."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(module, *args, **kwargs)

    own = forward.__code__.replace(co_name=f"forward of {kind.__name__}")
    return FunctionType(own, forward.__globals__, closure=forward.__closure__)
