"""Connection events of a socket: who came, who was refused, who left."""

from __future__ import annotations

import struct

import zmq

from actors.links.stats import DropReason, LinkStats

_EVENT = struct.Struct("=HI")  # event, value
_HANDSHAKE_FAULTS: dict[int, DropReason] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthenticated",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}
_MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def open_monitor(socket: zmq.Socket[bytes], name: str) -> zmq.Socket[bytes]:
    """A PAIR socket on which `event_of` reads the events of `socket`. `name` is unique in the socket's context."""
    socket.monitor(f"inproc://{name}", _MONITORED)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(f"inproc://{name}")
    return monitor


def event_of(frames: list[bytes]) -> int:
    """The zmq.EVENT_* number in a message of a monitor socket."""
    event: int = _EVENT.unpack_from(frames[0])[0]
    return event


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
