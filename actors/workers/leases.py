"""Values that expire unless they are renewed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Leases(Generic[Value]):
    """Values by name. Expiring them costs as much as have expired, however many there are."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._held: OrderedDict[str, tuple[float, Value]] = OrderedDict()  # the one renewed longest ago is first

    def renew(self, name: str, value: Value) -> None:
        self._held[name] = self._clock(), value
        self._held.move_to_end(name)

    def get(self, name: str) -> Value | None:
        held = self._held.get(name)
        return None if held is None else held[1]

    def pop(self, name: str) -> Value | None:
        held = self._held.pop(name, None)
        return None if held is None else held[1]

    def values(self) -> Iterable[Value]:
        return (value for _, value in self._held.values())

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def expire(self) -> list[tuple[str, Value]]:
        """End those that were not renewed within `ttl_s` seconds."""
        oldest = self._clock() - self._ttl_s
        expired = []
        while self._held:
            name, (renewed_at, value) = next(iter(self._held.items()))
            if renewed_at >= oldest:
                break
            del self._held[name]
            expired.append((name, value))
        return expired
