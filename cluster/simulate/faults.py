"""What goes wrong, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["target", "router", "group", "zone", "store", "draft_worker"]
_KINDS: tuple[FaultKind, ...] = ("target", "router", "group", "zone", "store", "draft_worker")


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at` on, for so many seconds. group: a target group with its router; number: which one, of those that there
    are then, or which zone."""

    at: float
    kind: FaultKind
    number: int
    seconds: float


def random_faults(seed: int, count: int, within_s: float, longest_s: float) -> list[Fault]:
    drawn = random.Random(seed)
    return [
        Fault(
            drawn.uniform(0.0, within_s), drawn.choice(_KINDS), drawn.randrange(1 << 16), drawn.uniform(0.1, longest_s)
        )
        for _ in range(count)
    ]
