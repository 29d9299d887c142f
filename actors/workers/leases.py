"""Values that expire unless they are renewed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Leases(Generic[Value]):
    """Values by name. Expiring them costs as much as have expired, however many there are, and a little for each
    different time that they last: among those of the same time, one is looked at when those that were renewed before it
    have expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[Value, float]] = {}  # values, and the seconds that they last
        # Times of renewal by name, for each time that they last; the one renewed longest ago is first.
        self._renewed: defaultdict[float, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def renew(self, name: str, value: Value, ttl_s: float) -> None:
        self.pop(name)
        self._held[name] = value, ttl_s
        self._renewed[ttl_s][name] = self._clock()

    def get(self, name: str) -> Value | None:
        held = self._held.get(name)
        return None if held is None else held[0]

    def pop(self, name: str) -> Value | None:
        held = self._held.pop(name, None)
        if held is None:
            return None
        del self._renewed[held[1]][name]
        return held[0]

    def values(self) -> Iterable[Value]:
        return (value for value, _ in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def expire(self) -> list[tuple[str, Value]]:
        """End those that were not renewed in time."""
        now, expired = self._clock(), []
        for ttl_s, renewed in list(self._renewed.items()):
            while renewed:
                name, renewed_at = next(iter(renewed.items()))
                if renewed_at >= now - ttl_s:
                    break
                del renewed[name]
                expired.append((name, self._held.pop(name)[0]))
            if not renewed:
                del self._renewed[ttl_s]
        return expired
