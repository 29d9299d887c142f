"""How target ranks and draft workers divide the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

_UNITS = 10_000  # Ray counts shares of a GPU in these
_MOST_ON_A_GPU = 10  # draft workers
_BESIDE_A_RANK = 0.2  # of its GPU, for draft workers


@dataclass(frozen=True, slots=True)
class GpuShares:
    """GPU share that each process requests from Ray. A rank takes more than half a GPU, so that no two ranks are on
    one."""

    rank: float = 1.0
    draft: float = 1.0


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """Processes that need a GPU."""

    groups: int  # target groups; 0: they run on CPUs
    tensor_parallel: int  # ranks of a group, all on one node
    workers: int  # draft workers of one rank; 0: none, or on CPUs
    draft_groups: tuple[int, ...] = ()  # ranks of each draft worker of several, all on one node

    @property
    def ranks(self) -> int:
        """Ranks of all target groups. Draft workers of one rank may be on their GPUs, too."""
        return self.groups * self.tensor_parallel


def share_gpus(
    nodes: Sequence[int], least: GpuDemand, most: GpuDemand, rank: float | None = None, draft: float | None = None
) -> GpuShares | None:
    """The largest shares with which all workers can be placed: the maximum of autoscaling, or else its minimum.

    nodes: GPUs of each node. least, most: the bounds of autoscaling. rank, draft: configured shares; None: chosen here.
    Ranks get whole GPUs if the draft workers fit on the other GPUs; else the draft workers of a GPU together get a
    fifth of it. The ranks of a draft worker with several ranks always get whole GPUs. Returns None if not even `least`
    can be placed.
    """
    for demand in (most, least):
        for shares in _candidates(rank, draft):
            if _can_be_placed(nodes, demand, shares):
                return shares
    return None


def needed_gpus(demand: GpuDemand, rank: float | None = None, draft: float | None = None) -> int:
    """The fewest GPUs of one node on which all can be placed."""
    return next(gpus for gpus in count(1) if share_gpus([gpus], demand, demand, rank, draft) is not None)


def _candidates(rank: float | None, draft: float | None) -> Iterator[GpuShares]:
    """From large to small."""
    beside = _BESIDE_A_RANK if draft is None or draft >= 0.5 else draft
    ranks = (1.0, round(1.0 - beside, 4)) if rank is None else (rank,)
    drafts = [_UNITS // number / _UNITS for number in range(1, _MOST_ON_A_GPU + 1)] if draft is None else [draft]
    for rank_share in ranks:
        for draft_share in drafts:
            yield GpuShares(rank_share, draft_share)


def _can_be_placed(nodes: Sequence[int], demand: GpuDemand, shares: GpuShares) -> bool:
    rank, draft = round(shares.rank * _UNITS), round(shares.draft * _UNITS)
    if not _have_nodes(nodes, [*[demand.tensor_parallel] * demand.groups, *demand.draft_groups]):
        return False
    alone = (sum(nodes) - demand.ranks - sum(demand.draft_groups)) * (_UNITS // draft)
    return demand.workers <= alone + demand.ranks * ((_UNITS - rank) // draft)


def _have_nodes(nodes: Sequence[int], groups: Sequence[int]) -> bool:
    """Whether groups with these numbers of ranks fit, each on one node and each rank on a whole GPU. Places the largest
    group first, on the node that keeps the fewest GPUs free."""
    free = list(nodes)
    for ranks in sorted(groups, reverse=True):
        fitting = [node for node, gpus in enumerate(free) if gpus >= ranks]
        if not fitting:
            return False
        free[min(fitting, key=free.__getitem__)] -= ranks
    return True
