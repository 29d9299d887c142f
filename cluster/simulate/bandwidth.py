"""What a network interface lets through."""

from __future__ import annotations

from actors.links.codec import pack
from actors.messages import Message
from cluster.simulate.events import Events, Server


class Bandwidth:
    """Bytes go through in the order in which they come."""

    def __init__(self, events: Events, bytes_per_s: float | None) -> None:
        """bytes_per_s: None: no limit."""
        self._bytes_per_s = bytes_per_s
        self._server = Server(events)

    @property
    def busy_s(self) -> float:
        """What all bytes so far take, those that still wait included."""
        return self._server.busy_s

    def passed_at(self, num_bytes: float, comes_at: float) -> float:
        """When so many bytes are through that come then."""
        if self._bytes_per_s is None:
            return comes_at
        return self._server.take(num_bytes / self._bytes_per_s, comes_at)

    def message_passed_at(self, message: Message, comes_at: float) -> float:
        """The same for a message as links encode it."""
        return comes_at if self._bytes_per_s is None else self.passed_at(len(pack(message)), comes_at)
