"""Groups as the rest of the cluster sees them, whichever way their rounds are simulated, and counts of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from actors.messages import GenerationRequest
from actors.workers.demand import DraftDemand, TargetDemand
from cluster.router.round import RouterEvent

Deliver = Callable[[RouterEvent], object]


@dataclass(slots=True)
class RoundCounts:
    rounds: int = 0
    tokens: int = 0
    sequences: int = 0  # that emitted, over all rounds
    rows: int = 0
    seconds: float = 0.0
    draft_s: float = 0.0  # of draft workers, without prompts

    def add(self, other: RoundCounts) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.sequences += other.sequences
        self.rows += other.rows
        self.seconds += other.seconds
        self.draft_s += other.draft_s


class Group(Protocol):
    """A router and its target group, as gateways and autoscaling see them."""

    name: str
    zone: int

    @property
    def is_ready(self) -> bool: ...
    @property
    def num_open(self) -> int: ...
    def accept(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Raises what a router raises. deliver: gets every event of the request at the moment of its commit."""
        ...

    def cancel(self, request_id: str) -> None: ...
    def target_demand(self) -> TargetDemand | None: ...
    def draft_demand(self) -> DraftDemand: ...
    def lose_target(self) -> None: ...
    def bring_target(self) -> None: ...
    def lose_router(self) -> None: ...
    def bring_router(self) -> None: ...
    def drain(self) -> None: ...
