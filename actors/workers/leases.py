"""Values that expire unless they are renewed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Leases(Generic[Value]):
    """Values by name. Expiring them costs as much as have expired, however many there are: one is looked at when those
    that were renewed before it have expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Values with their time and the seconds that they last; the one renewed longest ago is first.
        self._held: OrderedDict[str, tuple[Value, float, float]] = OrderedDict()

    def renew(self, name: str, value: Value, ttl_s: float) -> None:
        self._held[name] = value, self._clock(), ttl_s
        self._held.move_to_end(name)

    def get(self, name: str) -> Value | None:
        held = self._held.get(name)
        return None if held is None else held[0]

    def pop(self, name: str) -> Value | None:
        held = self._held.pop(name, None)
        return None if held is None else held[0]

    def values(self) -> Iterable[Value]:
        return (value for value, _, _ in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def expire(self) -> list[tuple[str, Value]]:
        """End those that were not renewed in time."""
        now, expired = self._clock(), []
        while self._held:
            name, (value, renewed_at, ttl_s) = next(iter(self._held.items()))
            if renewed_at >= now - ttl_s:
                break
            del self._held[name]
            expired.append((name, value))
        return expired
