"""Which router a request goes to, as far as Paceline decides: Ray Serve, or a simulation of it, does the rest."""

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
