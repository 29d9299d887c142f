"""The gate of a link server: decides which clients may connect and counts connections.

It runs in a thread of its own, so that a client gets through the handshake while the worker computes. The thread
sleeps unless a connection comes or goes, and ends when the server's ZeroMQ context does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from actors.links.keys import check_public_key
from actors.links.stats import LinkStats, count_event, open_monitor

ZAP_DOMAIN = b"paceline"


class Gate:
    """Answers ZeroMQ's authentication requests (ZAP, RFC 27) for the one server socket of a context."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        allowed: Iterable[bytes],
        stats: LinkStats,
    ) -> None:
        """Call before `socket` is bound. `allowed`: public keys of clients, Z85."""
        self._stats = stats
        self.allow(allowed)
        zap = context.socket(zmq.REP)
        zap.linger = 0
        zap.bind("inproc://zeromq.zap.01")
        socket.zap_domain = ZAP_DOMAIN
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody gets in
        monitor = open_monitor(socket, "gate-monitor")
        self._thread = threading.Thread(target=self._run, args=(zap, monitor), name="link-gate", daemon=True)
        self._thread.start()

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Replace the admitted keys (any thread). Open connections stay open."""
        self._allowed = frozenset(z85.decode(check_public_key(key)) for key in public_keys)

    def join(self) -> None:
        """Wait for the thread, after the context was terminated."""
        self._thread.join()

    def _run(self, zap: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is zap:
                        zap.send_multipart(self._verdict(zap.recv_multipart()))
                    else:
                        count_event(self._stats, recv_monitor_message(monitor)["event"])
        except zmq.ContextTerminated:
            pass
        finally:
            zap.close()
            monitor.close()

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, routing id, mechanism, client key
        request_id = request[1] if len(request) > 1 else b""
        admitted = len(request) == 7 and request[2] == ZAP_DOMAIN and request[5] == b"CURVE"
        admitted = admitted and request[6] in self._allowed
        return [b"1.0", request_id, b"200" if admitted else b"400", b"", b"", b""]
