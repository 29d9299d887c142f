"""Routers by whether they take requests: the first ranks of Serve's request router, and of its simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Replica = TypeVar("Replica")


def ready_first(
    candidates: Sequence[Replica],
    is_ready: Callable[[Replica], bool],
    sample: Callable[[Sequence[Replica], int], list[Replica]],
) -> list[list[Replica]]:
    """Replicas by rank: those that are ready, then the others. The shortest queue of the first rank that has room is
    taken, among equally short queues the first. sample: as `random.sample`."""
    mixed = sample(candidates, len(candidates))
    ready = [replica for replica in mixed if is_ready(replica)]
    if len(ready) == len(mixed):
        return [ready, []]
    return [ready, [replica for replica in mixed if not is_ready(replica)]]
