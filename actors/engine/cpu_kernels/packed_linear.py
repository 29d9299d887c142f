"""Linear layers with weights laid out once for small row counts on CPU.

`torch.nn.Linear` passes its weights unpacked to the matrix library, which packs them in every call: for the few rows of
a round that costs as much as the product. oneDNN's packed weights (as in models frozen by torch's compiler) are packed
once, for the instructions of this processor, such as AMX.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS_HINT = 8  # row count that the layout is chosen for; others work, too


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
