"""The namespaces of the shared cache that a router follows."""

from __future__ import annotations

from collections.abc import Callable

from cache_service.index.index_edition import WarmIndexSettings

_STAY_S = WarmIndexSettings().stay_s


class Followed:
    """As `WarmIndex`, where each namespace has another owner: beyond the most that there may be, the least recently
    used one gives way, or the new one is refused if that was used a moment ago."""

    def __init__(self, most: int, begin: Callable[[str], object], end: Callable[[str], object]) -> None:
        """most: `cache.max_namespaces`. begin, end: called with a namespace when it is followed and no longer is."""
        self._most = most
        self._begin = begin
        self._end = end
        self._used: dict[str, float] = {}  # time of the last use, least recent first

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._used

    def use(self, namespace: str, now: float) -> None:
        """Follow it, or mark it as used."""
        if self._used.pop(namespace, None) is not None:
            self._used[namespace] = now
            return
        if len(self._used) >= self._most:
            oldest, used = next(iter(self._used.items()))
            if now - used < _STAY_S:
                return
            del self._used[oldest]
            self._end(oldest)
        self._used[namespace] = now
        self._begin(namespace)

    def clear(self) -> None:
        for namespace in self._used:
            self._end(namespace)
        self._used.clear()
