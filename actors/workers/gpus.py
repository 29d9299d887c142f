"""Which GPU of its node a process of Ray computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from actors.errors import Unavailable

if TYPE_CHECKING:
    import torch

# Ray then leaves CUDA_VISIBLE_DEVICES alone. The ranks of a group reach each other's memory, so each must see the
# GPUs of all, and choose the one that Ray has assigned to it.
SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def local_index(assigned: Sequence[str], visible: str | None) -> int:
    """Index among the process's CUDA devices of the only GPU assigned to it.

    assigned: ids as Ray gives them, indices or UUIDs. visible: CUDA_VISIBLE_DEVICES of the process, whose entries Ray's
    ids are then; None: all GPUs of the node are visible, in the order of their indices.
    Raises Unavailable if there is not exactly one, or if it is not visible.
    """
    if len(assigned) != 1:
        raise Unavailable(f"a rank needs one GPU, Ray has assigned {len(assigned)}: {', '.join(assigned) or 'none'}")
    (gpu,) = assigned
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries is not None and gpu in entries:
        return entries.index(gpu)
    if entries is None and gpu.isdecimal():
        return int(gpu)
    raise Unavailable(f"Ray has assigned GPU {gpu}; {_VISIBLE} is {visible!r}, which does not have it")


def assigned_index() -> int:
    """`local_index` of this Ray actor. Raises Unavailable."""
    import ray

    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return local_index([str(gpu) for gpu in assigned], os.environ.get(_VISIBLE))


def rank_device(device: str) -> str:
    """The device of this rank: cuda becomes cuda:N, others stay. Raises Unavailable.

    transformers binds a rank to the device of index $LOCAL_RANK, which is set to N.
    """
    if not device.startswith("cuda"):
        return device
    index = assigned_index()
    os.environ["LOCAL_RANK"] = str(index)
    return f"cuda:{index}"


def use_device(device: str) -> None:
    """Make it the calling thread's current device, on which kernels are launched."""
    if device.startswith("cuda:"):  # without an index it is the current one
        import torch

        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The device is the calling thread's current one within this context; a CPU changes nothing."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
