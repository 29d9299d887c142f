"""Chooses how a device attends."""

from __future__ import annotations

import torch

from actors.options import AttentionBackend

_LEAST_CAPABILITY = (8, 0)  # Ampere: asynchronous copies and bfloat16 products


def choose_attention(device: torch.device) -> AttentionBackend:
    """`triton_tree` where its kernels can be compiled, `padded` elsewhere."""
    return "padded" if missing_for_triton_tree(device) else "triton_tree"


def missing_for_triton_tree(device: torch.device) -> str | None:
    """What the kernels of `triton_tree` need and this process lacks; None: they can be compiled."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "a GPU from Ampere (sm80) on"
    return None if has_triton() else "Triton"


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def has_varlen_kernel(device: torch.device) -> bool:
    """Whether torch has attention of ragged batches on a device that attends by `triton_tree`."""
    return device.type == "meta" or (device.type == "cuda" and torch.backends.cuda.is_flash_attention_available())
