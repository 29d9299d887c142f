"""What goes wrong, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal[
    "target", "router", "group", "zone", "store", "draft_worker", "gateway",
    "gateway_link", "target_link", "draft_link", "store_link",
]  # fmt: skip
_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at` on, for so many seconds. number: which one, of those that there are then, or which zone.

    group: a target group with its router. Links, which are cut for two of their ends while others reach each other:
    gateway_link: of a gateway and a router; target_link: of a router and its target; draft_link: of a router and all
    draft workers; store_link: of a router and the store, and of a gateway and the store."""

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
