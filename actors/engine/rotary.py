"""What is known of rotary embeddings (RoPE, Su et al., 2021)."""

from __future__ import annotations

from torch import nn

_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def turns_by_position(rotary: nn.Module) -> bool:
    """Whether its cosines and sines depend on nothing but the position, and may be kept in a table."""
    return getattr(rotary, "rope_type", "") in _STATIC_ROPE_TYPES
