"""Counters of one end of a link, and the connection events of its socket that they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import zmq

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
    """Counters only grow. Each has one writing thread; any thread may read."""

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


_HANDSHAKE_FAULTS: dict[int, DropReason] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthenticated",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}
_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_HANDSHAKE_FAULTS)


def open_monitor(socket: zmq.Socket[bytes], name: str) -> zmq.Socket[bytes]:
    """A PAIR socket that receives the events of `socket`. `name` is unique in the socket's context."""
    socket.monitor(f"inproc://{name}", _MONITORED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(f"inproc://{name}")
    return monitor


def count_event(stats: LinkStats, event: int) -> None:
    """Book one event."""
    if event == zmq.EVENT_ACCEPTED:
        stats.accepted += 1
    elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        stats.admitted += 1
    elif event == zmq.EVENT_DISCONNECTED:
        stats.closed += 1
    elif event in _HANDSHAKE_FAULTS:
        stats.drop(_HANDSHAKE_FAULTS[event])
