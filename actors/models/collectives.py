"""Sums and gathers over the ranks of a tensor-parallel group, as operators that torch's compiler does not look into.

On CUDA, sums of decoding rounds go through symmetric memory, where ranks read each other's buffers: one kernel up to
512 KiB; above, the switch adds up where it can (multimem). Larger sums go through NCCL, and so does every sum if
symmetric memory is missing or gives other sums than NCCL. CPUs use gloo. NCCL and gloo add up an element in an order
that depends on its place. After `sum_in_rank_order`, each rank gets the whole parts of all ranks and adds them up in
the order of ranks.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_ONE_SHOT_BYTES = 512 << 10  # up to which each rank reads the buffers of all others
_BUFFER_BYTES = 8 << 20
_CHECKED_BYTES = (4 << 10, _ONE_SHOT_BYTES, 2 << 20)


def rank_of_group() -> tuple[int, int]:
    """(rank, number of ranks)"""
    return dist.get_rank(), dist.get_world_size()


def all_reduce(partial: Tensor) -> Tensor:
    """The sum over the ranks, of the same shape and dtype."""
    total: Tensor = torch.ops.paceline.all_reduce(partial)
    return total


def gather_columns(part: Tensor, width: int) -> Tensor:
    """The columns of all ranks side by side, [..., width]. All but the last rank with columns have equally many."""
    whole: Tensor = torch.ops.paceline.gather_columns(part, width)
    return whole


def gather_ranks(part: Tensor) -> Tensor:
    """What all ranks pass, stacked by rank: [ranks, ...]."""
    whole: Tensor = torch.ops.paceline.gather_ranks(part, dist.get_world_size())
    return whole


def _all_reduce(partial: Tensor) -> Tensor:
    if _is_in_rank_order:
        first, *others = _gather_ranks(partial, dist.get_world_size()).unbind()
        total = first.clone()
        for other in others:
            total += other
        return total
    if _symmetric is not None and _symmetric.can_sum(partial):
        return _symmetric.all_reduce(partial)
    return _library_sum(partial)


def _fake_all_reduce(partial: Tensor) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


def _library_sum(partial: Tensor) -> Tensor:
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _gather_columns(part: Tensor, width: int) -> Tensor:
    share = -(-width // dist.get_world_size())
    if part.shape[-1] < share:
        part = torch.nn.functional.pad(part, (0, share - part.shape[-1]))
    stacked = _gather_ranks(part, dist.get_world_size())
    return torch.cat(stacked.unbind(), dim=-1)[..., :width].contiguous()


def _fake_gather_columns(part: Tensor, width: int) -> Tensor:
    return part.new_empty((*part.shape[:-1], width))


def _gather_ranks(part: Tensor, ranks: int) -> Tensor:
    whole = part.new_empty((ranks, *part.shape))
    dist.all_gather_into_tensor(whole.view(-1), part.contiguous().view(-1))
    return whole


def _fake_gather_ranks(part: Tensor, ranks: int) -> Tensor:
    return part.new_empty((ranks, *part.shape))


class SymmetricMemory:
    """A buffer that all ranks of a node read and write. Needs GPUs that reach each other; all ranks make it at once."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError."""
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        self._bytes = symmetric_memory.empty(_BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._has_multimem = symmetric_memory.rendezvous(self._bytes, group).multicast_ptr != 0

    def can_sum(self, partial: Tensor) -> bool:
        if not partial.is_cuda or partial.nbytes % 16:
            return False
        return partial.nbytes <= (_BUFFER_BYTES if self._has_multimem else _ONE_SHOT_BYTES)

    def all_reduce(self, partial: Tensor) -> Tensor:
        ops = torch.ops.symm_mem
        partial = partial.contiguous()
        buffer = self._bytes[: partial.nbytes].view(partial.dtype)
        if partial.nbytes <= _ONE_SHOT_BYTES:
            return ops.one_shot_all_reduce_copy(buffer, partial.view(-1), "sum", self._group).view_as(partial)
        buffer.copy_(partial.view(-1))
        ops.multimem_all_reduce_(buffer, "sum", self._group)
        return buffer.clone().view_as(partial)


_symmetric: SymmetricMemory | None = None
_is_in_rank_order = False


def sum_in_rank_order() -> None:
    """From now on, add up the parts in the order of ranks, so that the bits of an element do not depend on its place.
    All ranks call this."""
    global _is_in_rank_order
    _is_in_rank_order = True


def use_symmetric_memory(device: torch.device, dtype: torch.dtype) -> None:
    """Sum through symmetric memory from now on, if all ranks get the sums of NCCL that way. All ranks call this."""
    global _symmetric
    made, reason = None, "its sums differ from those of NCCL"
    try:
        made = SymmetricMemory(device)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    if not _agree(made is not None, device):
        made = None
    is_right = made is not None and all(_sums_right(made, num_bytes, device, dtype) for num_bytes in _CHECKED_BYTES)
    if not _agree(is_right, device):
        logger.warning("ranks exchange through NCCL, which is slower: no symmetric memory: %s", reason)
        made = None
    _symmetric = made


def _sums_right(memory: SymmetricMemory, num_bytes: int, device: torch.device, dtype: torch.dtype) -> bool:
    partial = checked_partial(num_bytes // dtype.itemsize, dist.get_rank(), device, dtype)
    right = _library_sum(partial)  # before what may raise: all ranks pair their collectives
    if not memory.can_sum(partial):
        return True
    try:
        return torch.equal(memory.all_reduce(partial), right)
    except RuntimeError:
        return False


def checked_partial(count: int, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[count]: small integers, whose sums over up to 16 ranks are exact in 16 bits in any order."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randint(-16, 17, (count,), device=device, generator=generator).to(dtype)


def _agree(is_so: bool, device: torch.device) -> bool:
    votes = torch.tensor([is_so], dtype=torch.int32, device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


_library = torch.library.Library("paceline", "FRAGMENT")
_library.define("all_reduce(Tensor partial) -> Tensor")
_library.define("gather_columns(Tensor part, int width) -> Tensor")
_library.define("gather_ranks(Tensor part, int ranks) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _device)
    _library.impl("gather_columns", _gather_columns, _device)
    _library.impl("gather_ranks", _gather_ranks, _device)
torch.library.register_fake("paceline::all_reduce", _fake_all_reduce, lib=_library)
torch.library.register_fake("paceline::gather_columns", _fake_gather_columns, lib=_library)
torch.library.register_fake("paceline::gather_ranks", _fake_gather_ranks, lib=_library)
