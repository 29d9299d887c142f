"""Linears with one input, such as those of queries, keys and values, as one matrix product.

Which linears have one input is found by running the model once, not by their names. Their weights become slices of one
tensor, so nothing is held twice. Only compiled layers make one product of them; elsewhere each multiplies its slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from actors.engine.layer_shapes import ShapeProbe

_PROBED_ROWS = 2


class LinearSlice(nn.Linear):
    """A linear whose weight, and bias if it has one, are rows of tensors that it shares with others."""

    def __init__(self, merged: Tensor, merged_bias: Tensor | None, first: int, size: int) -> None:
        """merged: [all outputs, inputs]; merged_bias: [all outputs]."""
        super().__init__(merged.shape[1], size, bias=False, device="meta")
        self._merged, self._merged_bias = merged, merged_bias
        self._first = first
        self.weight = nn.Parameter(merged[first : first + size], requires_grad=False)
        if merged_bias is not None:
            self.bias = nn.Parameter(merged_bias[first : first + size], requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # `share_products` makes the product once
            return linear(inputs, self._merged, self._merged_bias).narrow(-1, self._first, self.out_features)
        return linear(inputs, self.weight, self.bias)


@torch.inference_mode()
def merge_linears(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Replace the linears of decoder layers that have one input in place by slices.

    Linears that are more than torch's, have hooks, are shared, or are shards of a tensor-parallel group stay. Needs
    memory for the merged weights of one layer beyond the model's own.
    """
    groups = list(_groups_of_one_input(model, [child for layer in layers for child in layer.modules()]))
    parents = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    while groups:
        group = groups.pop(0)
        for linear_module, part in zip(group, _slices(group), strict=True):
            parent, name = parents[linear_module]
            setattr(parent, name, part)
        del linear_module, group
        if part.weight.is_cuda:
            torch.cuda.empty_cache()  # the parts' memory is too small for the next merged one


def _groups_of_one_input(model: PreTrainedModel, modules: list[nn.Module]) -> Iterator[list[nn.Linear]]:
    """Linears among the modules that are called with the same tensor, in the order of their calls."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    calls: list[tuple[nn.Linear, Tensor]] = []  # inputs are kept, so that no other tensor gets their identity
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args[0])))
        for module in modules
        if _is_plain(module) and uses[id(module.weight)] == 1
    ]
    ids = torch.zeros(1, _PROBED_ROWS, dtype=torch.long, device=model.device)
    positions = torch.arange(_PROBED_ROWS, device=model.device).unsqueeze(0)
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, paged_plan=ShapeProbe())
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[Any, ...], list[nn.Linear]] = {}
    times = Counter(module for module, _ in calls)
    for module, given in calls:
        if times[module] == 1:
            groups.setdefault((id(given), module.weight.dtype, module.bias is None), []).append(module)
    yield from (group for group in groups.values() if len(group) > 1)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is torch's own linear, called as torch calls it; transformers' shards have a forward of their own."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return type(module.weight.data) is Tensor and not (module._forward_hooks or module._forward_pre_hooks)


def _slices(group: list[nn.Linear]) -> list[LinearSlice]:
    merged = torch.cat([module.weight for module in group])
    bias = None if group[0].bias is None else torch.cat([module.bias for module in group])
    ends = torch.tensor([module.out_features for module in group]).cumsum(0).tolist()
    return [
        LinearSlice(merged, bias, end - module.out_features, module.out_features)
        for module, end in zip(group, ends, strict=True)
    ]


def share_products(graph: torch.fx.Graph) -> None:
    """Make products of a traced graph that have the same arguments once."""
    made: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=linear)):
        first = made.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
