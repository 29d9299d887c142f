"""A connection between two processes that may be cut for some time."""

from __future__ import annotations

import math

from actors.links.settings import LinkSettings
from cluster.simulate.events import Events

NOTICED_S = LinkSettings().heartbeat_s + LinkSettings().dead_after_s  # of silence, until both ends give it up


class Connection:
    """Messages wait for the end of a cut; if that takes too long, the connection breaks and they are lost."""

    __slots__ = ("_cut_at", "_events", "_until")

    def __init__(self, events: Events) -> None:
        self._events = events
        self._cut_at = self._until = -math.inf

    def cut(self, seconds: float) -> None:
        """From now on. Two cuts at a time last as long as the longer one."""
        now = self._events.now
        if not self.is_cut:
            self._cut_at = now
        self._until = max(self._until, now + seconds)

    @property
    def is_cut(self) -> bool:
        return self._events.now < self._until

    @property
    def is_broken(self) -> bool:
        """Whether both ends have noticed the cut."""
        return self.is_cut and self._events.now >= self._cut_at + NOTICED_S

    @property
    def passes_at(self) -> float | None:
        """When a message that is sent now gets through, in the order of sending; None: the connection breaks before."""
        now = self._events.now
        return max(now, self._until) if self._until - now <= NOTICED_S else None
