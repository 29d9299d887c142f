"""The limits of a link, the same on both ends."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from actors.links.codec import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Sizes and timeouts of a link.

    A peer that vanishes without closing its connection is noticed within heartbeat_s + dead_after_s. The heartbeats
    are ZeroMQ's own, answered by its I/O thread, so a worker in the middle of a long forward does not look dead.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    queue_messages: int = 64  # limit in each direction for each peer; beyond it, sending fails at once
    heartbeat_s: float = 0.4
    dead_after_s: float = 1.2
    reconnect_s: float = 0.1  # first pause before connecting again; doubles up to reconnect_max_s
    reconnect_max_s: float = 1.0

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options that both ends share, before bind or connect."""
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = self.queue_messages
        # `unpack` refuses and counts what is over the limit; ZeroMQ itself hangs up on what is far over it, unread.
        socket.maxmsgsize = 2 * self.max_frame_bytes
        socket.set(zmq.HEARTBEAT_IVL, milliseconds(self.heartbeat_s))
        socket.set(zmq.HEARTBEAT_TIMEOUT, milliseconds(self.dead_after_s))
        # A heartbeat cannot pass a message that is stuck half sent; there the system's own limit on silence counts.
        socket.set(zmq.TCP_MAXRT, milliseconds(self.heartbeat_s + self.dead_after_s))
        socket.set(zmq.HANDSHAKE_IVL, 5000)  # a connection that says nothing for so long is closed


def milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))
