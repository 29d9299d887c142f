"""Demand for draft workers and target groups: what routers report to the directory, and what was set by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from actors.workers.leases import Leases

_COMBINED_S = 0.25  # all workers ask for the same demand, which is combined at most so often

Demand = TypeVar("Demand")


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """Late drafts, and the effect of one draft worker more or fewer on tokens a second."""

    late_share: float = 0.0  # drafts that came too late / drafts waited for
    gain: float = 0.0  # relative gain by one more worker; 0.1: a tenth
    loss: float = 0.0  # relative loss with one worker fewer
    held: int = 0  # number of workers that was set by hand; 0: none was
    stretch: int = 1  # times that a worker is to go by this answer: the directory has very many callers


@dataclass(frozen=True, slots=True)
class TargetDemand:
    """Waiting time for a target group, and use of its room."""

    queue_s: float = 0.0  # age of the oldest request that waits for its first round
    used_share: float = 0.0  # 0 to 1: share of running sequences or KV blocks in use, whichever is larger
    held: int = 0  # number of groups that was set by hand; 0: none was
    stretch: int = 1  # as in `DraftDemand`


def combined_drafts(demands: Iterable[DraftDemand]) -> DraftDemand:
    """The maximum, because workers serve all routers."""
    told = list(demands)
    return DraftDemand(
        late_share=max((demand.late_share for demand in told), default=0.0),
        gain=max((demand.gain for demand in told), default=0.0),
        loss=max((demand.loss for demand in told), default=0.0),
    )


def combined_targets(demands: Iterable[TargetDemand]) -> TargetDemand:
    """The mean, because each router has its own group and new requests go to the router with the fewest."""
    told = list(demands)
    if not told:
        return TargetDemand()
    return TargetDemand(
        queue_s=sum(demand.queue_s for demand in told) / len(told),
        used_share=sum(demand.used_share for demand in told) / len(told),
    )


class RouterDemands:
    """The recent signals of routers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._told: Leases[tuple[Mapping[str, DraftDemand], TargetDemand | None]] = Leases(clock)
        self._on_drafts = _LateCopies(clock, self._combined_drafts)
        self._on_targets = _LateCopies(clock, self._combined_targets)

    def tell(
        self, router_id: str, drafts: Mapping[str, DraftDemand], targets: TargetDemand | None, ttl_s: float
    ) -> None:
        """Replaces the router's earlier signals. It counts for `ttl_s` seconds."""
        self._told.renew(router_id, (drafts, targets), ttl_s)

    def on_drafts(self, pool: str) -> DraftDemand:
        return self._on_drafts.get(pool)

    def on_targets(self) -> TargetDemand:
        """The demand of all routers that have a target group."""
        return self._on_targets.get("")

    def _combined_drafts(self, pool: str) -> DraftDemand:
        self._told.expire()
        return combined_drafts(drafts[pool] for drafts, _ in self._told.values() if pool in drafts)

    def _combined_targets(self, _: str) -> TargetDemand:
        self._told.expire()
        return combined_targets(targets for _, targets in self._told.values() if targets is not None)


class _LateCopies(Generic[Demand]):
    """Values by name, recomputed at most every `_COMBINED_S` seconds."""

    def __init__(self, clock: Callable[[], float], make: Callable[[str], Demand]) -> None:
        self._clock = clock
        self._make = make
        self._made: dict[str, tuple[float, Demand]] = {}

    def get(self, name: str) -> Demand:
        made, now = self._made.get(name), self._clock()
        if made is None or now - made[0] >= _COMBINED_S:
            made = self._made[name] = now, self._make(name)
        return made[1]
