"""Rotary positions written out, for references that recompute whole texts."""

import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim], row t at position t."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
