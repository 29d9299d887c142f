"""Counters of one end of a link, for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DropReason = Literal[
    "garbage",  # not a frame, or not a message
    "version",  # a frame of another protocol version
    "oversize",  # a frame above the size limit
    "unencodable",  # a message of ours that is not part of the protocol
    "unauthenticated",  # a connection whose key is not admitted
    "handshake",  # a connection that does not speak CURVE, or not with our key
    "full",  # our outgoing queue to the peer has no room
    "gone",  # an answer to a peer that has left
    "late",  # an answer that nobody waits for any more
    "unexpected",  # an answer of the wrong kind, or a message that only the other side may send
]


@dataclass(slots=True)
class LinkStats:
    """Everything only grows. Each counter has one writing thread; any thread may read."""

    sent: int = 0  # messages
    received: int = 0  # messages, those that were dropped not counted
    sent_bytes: int = 0
    received_bytes: int = 0
    accepted: int = 0  # TCP connections (server only)
    admitted: int = 0  # connections that got through the handshake; accepted - admitted were refused or are in it
    closed: int = 0  # connections that ended, admitted or not
    timeouts: int = 0  # calls without an answer in time (client only)
    dropped: dict[DropReason, int] = field(default_factory=dict)

    def drop(self, reason: DropReason) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
