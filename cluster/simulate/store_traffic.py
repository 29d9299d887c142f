"""Bytes and messages between routers and the store of the shared cache, counted by namespace."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.log.compactor import CompactorSettings
from cache_service.log.fold_plan import num_absorbed

_TOKEN_BYTES = 2.5  # of a token in an entry or segment, compressed
_ENTRY_BYTES = 80  # of an entry's own


@dataclass(slots=True)
class StoreTraffic:
    """Bytes, and messages to the store."""

    written: float = 0.0
    read: float = 0.0
    rewritten: float = 0.0  # by folds, beside what is new
    messages: float = 0.0
    reads: int = 0  # that followers of exact groups have had of what was written
    read_delay_s: float = 0.0  # of all these, since it was written
    dropped_tokens: int = 0  # while the store was away, beyond what publishers keep


@dataclass(slots=True)
class _Namespace:
    num_tokens: int = 0
    num_followers: int = 0
    segments: list[int] = field(default_factory=list)  # tokens of each
    num_unfolded: int = 0  # tokens


class StoreMeter:
    """Every follower of a namespace reads each entry and what folds write."""

    def __init__(self) -> None:
        self.traffic = StoreTraffic()
        self._namespaces: dict[str, _Namespace] = {}
        self._unfolded: dict[str, _Namespace] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens written to all namespaces, each once."""
        return sum(known.num_tokens for known in self._namespaces.values())

    def write(self, namespace: str, num_tokens: int, num_entries: float = 1.0) -> float:
        """Returns the bytes."""
        known = self._of(namespace)
        known.num_tokens += num_tokens
        known.num_unfolded += num_tokens
        self._unfolded[namespace] = known
        num_bytes = _ENTRY_BYTES * num_entries + _TOKEN_BYTES * num_tokens
        self.traffic.messages += num_entries
        self.traffic.written += num_bytes
        return num_bytes

    def read_on(self, namespace: str, num_bytes: float, num_entries: float = 1.0) -> None:
        """All followers read what was written."""
        num_followers = self._of(namespace).num_followers
        self.traffic.messages += num_entries * num_followers
        self.traffic.read += num_bytes * num_followers

    def follow(self, namespace: str) -> None:
        """There is one follower more."""
        self._of(namespace).num_followers += 1

    def leave(self, namespace: str) -> None:
        """There is one follower less."""
        self._namespaces[namespace].num_followers -= 1

    def read(self, namespace: str) -> float:
        """A new follower reads what there is. Returns the bytes."""
        num_bytes = _TOKEN_BYTES * self._of(namespace).num_tokens
        self.traffic.messages += 1
        self.traffic.read += num_bytes
        return num_bytes

    def fold(self) -> dict[str, float]:
        """Write to segments what has come since the last fold. Returns the bytes by namespace."""
        folded = {name: _TOKEN_BYTES * self._fold(known) for name, known in self._unfolded.items()}
        self._unfolded.clear()
        return folded

    def _fold(self, known: _Namespace) -> int:
        """Returns the tokens that are written."""
        most = CompactorSettings().limits.segment_tokens
        absorbed = num_absorbed(known.segments, known.num_unfolded, most)
        rewritten = sum(known.segments[len(known.segments) - absorbed :])
        num_tokens = rewritten + known.num_unfolded
        known.segments[len(known.segments) - absorbed :] = [num_tokens]
        self.traffic.written += _TOKEN_BYTES * num_tokens
        self.traffic.rewritten += _TOKEN_BYTES * rewritten
        self.traffic.read += _TOKEN_BYTES * num_tokens * known.num_followers
        self.traffic.messages += 2 + known.num_followers
        known.num_unfolded = 0
        return num_tokens

    def _of(self, namespace: str) -> _Namespace:
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = _Namespace()
        return known
