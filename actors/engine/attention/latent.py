"""Latent attention (DeepSeek's): a token's latent is cached instead of the keys and values that are made of it.

A head's key is a product of the latent, which all heads share, with the head's weights, and a rotated part that all
heads share as well. The weights are multiplied into the query instead, and the values' weights into the output. So all
query heads attend to one key head, [latent, rotated part], whose values are its latent. For a long prompt that takes
about three times the products of expanded keys, and a ninth to a seventieth of their memory in DeepSeek's models.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Largest difference of an expanded latent from the sum of its parts, as a share of the largest number: fp8 rounds
# latents to three bits.
_TOLERANCE = 0.1


class LatentProjection(nn.Module):
    """What makes keys and values of latents, as two factors. Takes the place of a module's `kv_b_proj`.

    A tensor-parallel rank has the factors of its heads.
    """

    def __init__(self, key_factors: Tensor, value_factors: Tensor) -> None:
        """key_factors: [heads, key part, rank]; value_factors: [heads, rank, value_dim]."""
        super().__init__()
        self.register_buffer("key_factors", key_factors)
        self.register_buffer("value_factors", value_factors)

    def absorb_query(self, query: Tensor) -> Tensor:
        """[rows, heads, key part + rotated] -> [rows, heads, rank + rotated]"""
        own, rotated = query.tensor_split([self.key_factors.shape[1]], dim=-1)
        latent = torch.bmm(own.transpose(0, 1), self.key_factors).transpose(0, 1)
        return torch.cat([latent, rotated], dim=-1)

    def expand_values(self, attended: Tensor) -> Tensor:
        """[rows, heads, rank] -> [rows, heads, value_dim]"""
        return torch.bmm(attended.transpose(0, 1), self.value_factors).transpose(0, 1)


def latent_projection(module: nn.Module) -> LatentProjection | None:
    """That of an attention module whose latents are cached, else None."""
    projection = getattr(module, "kv_b_proj", None)
    return projection if isinstance(projection, LatentProjection) else None


@torch.inference_mode()
def cache_latents(model: PreTrainedModel) -> bool:
    """Have the latent-attention modules of a model hand over latents, in place; False for a model without, or one
    whose keys and values are no product of its latents, which stays as it is.

    Weights that are quantized are widened: they were multiplied with the latents of new tokens only.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_lora_rank")]
    if all(latent_projection(module) is not None for module in modules):
        return bool(modules)
    for module in modules:
        if _factors(module, model.dtype) is None:
            logger.warning(
                "%s caches expanded keys and values: those of layer %s are no product of its latents",
                type(model).__name__, module.layer_idx,
            )  # fmt: skip
            return False
    for module in modules:  # one by one, so that the weights of one layer at most are there twice
        factors = _factors(module, model.dtype)
        assert factors is not None
        module.kv_b_proj = LatentProjection(*factors)
        module.expand_kv = _as_one_head
    return True


def _as_one_head(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, rows, rank] and [1, 1, rows, rotated] -> keys [1, 1, rows, rank + rotated] and values, a part of them."""
    keys = torch.cat([latent, rotated], dim=-1)
    return keys, keys[..., : latent.shape[-1]]


def _factors(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """What a module makes of unit latents; None unless it is linear and leaves rotated parts."""
    rank, device = int(module.kv_lora_rank), next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    # The last two rows: zeros, and a latent of any numbers.
    some = torch.randn(rank, generator=generator).to(device, dtype)
    latents = torch.cat([torch.eye(rank, dtype=dtype, device=device), some.new_zeros(1, rank), some[None]])
    rotated = torch.randn(rank + 2, int(module.qk_rope_head_dim), generator=generator).to(device, dtype)
    keys, values = (tensor[0] for tensor in module.expand_kv(latents[None, None], rotated[None, None]))
    own, kept = keys.tensor_split([keys.shape[-1] - rotated.shape[-1]], dim=-1)
    key_factors, value_factors = own[:, :rank].transpose(1, 2).contiguous(), values[:, :rank].contiguous()
    if device.type != "meta":  # which has no numbers
        if not torch.equal(kept, rotated.expand_as(kept)):
            return None
        for made, factors in ((own, key_factors.transpose(1, 2)), (values, value_factors)):
            expected = some @ factors
            off = torch.maximum((made[:, rank + 1] - expected).abs().max(), made[:, rank].abs().max())
            if not off <= _TOLERANCE * expected.abs().max():
                return None
    return key_factors, value_factors
