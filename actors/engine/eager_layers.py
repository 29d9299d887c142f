"""Parts of a model on an accelerator that stays uncompiled: one kernel each instead of eight or nine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.cpu_kernels.rms_norm import agree, eps_of
from actors.engine.rotary import turns_by_position
from actors.models.loader import max_model_len

_MOST_TABLE_BYTES = 256 << 20
_MORE_POSITIONS = 512  # a draft tree at the end of the longest text is not read beyond the table


class DeviceRmsNorm(nn.Module):
    """As `cpu_kernels.rms_norm.RmsNorm`, by a Triton kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., width] -> [..., width]"""
        outputs: Tensor = torch.ops.paceline.rms_norm(inputs.contiguous(), self.weight, self._eps)
        return outputs


class RotaryTable(nn.Module):
    """Cosines and sines of a model's rotary embedding, looked up by position."""

    def __init__(self, rotary: nn.Module, positions: int, like: Tensor) -> None:
        """like: any tensor of the model's device and dtype."""
        super().__init__()
        self._split = [0, 0]
        parts = rotary(like, torch.arange(positions, device=like.device)[None])
        self._split = [part.shape[-1] for part in parts]
        self._table = torch.cat(parts, dim=-1)[0]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """position_ids: int64 [1, rows] -> cosines and sines, [1, rows, dim] each."""
        return self._table.index_select(0, position_ids[0])[None].split(self._split, dim=-1)


@torch.inference_mode()
def fuse_eager_layers(model: PreTrainedModel) -> None:
    """Replace RMS norms and the rotary embedding in place, where that gives the same outputs."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            eps = eps_of(child)
            if eps is not None:
                norm = DeviceRmsNorm(child.weight.detach(), eps)
                if norm.weight.is_meta or agree(child, norm):
                    setattr(module, name, norm)
    rotary, config = getattr(model.base_model, "rotary_emb", None), model.config.get_text_config()
    if rotary is None or not turns_by_position(rotary):
        return
    positions, like = max_model_len(config) + _MORE_POSITIONS, next(model.parameters())[:0]
    size = 2 * rotary.inv_freq.numel() * 2 * positions * like.element_size()
    if size <= _MOST_TABLE_BYTES:
        model.base_model.rotary_emb = RotaryTable(rotary, positions, like)


def _rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Imported late: machines without a GPU may have no Triton.
    from actors.engine.rms_norm_kernel import launch

    outputs = torch.empty_like(inputs)
    launch(inputs, weight, outputs, eps)
    return outputs


def _fake_rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(inputs)


_library = torch.library.Library("paceline", "FRAGMENT")
_library.define("rms_norm" + torch.library.infer_schema(_rms_norm, mutates_args=()))
for _device in ("CPU", "CUDA"):
    _library.impl("rms_norm", _rms_norm, _device)
torch.library.register_fake("paceline::rms_norm", _fake_rms_norm, lib=_library)
