"""The router's end of what gateways hear without asking."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

import zmq

from actors.errors import LinkError
from actors.links.gate import Gate
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import bindable
from actors.links.settings import LinkSettings
from actors.links.stats import LinkStats

QUEUE_MESSAGES = 4096  # for a gateway that is busy for some seconds; what is beyond is lost


class Publisher:
    """Gateways connect to `address`, encrypted; only those with an admitted key hear anything. A message reaches those
    that have subscribed to its topic, unless they read too slowly. Belongs to one thread."""

    def __init__(self, client_public_keys: Iterable[bytes], host: str) -> None:
        """host: the IP address to bind and to tell gateways. Raises LinkError if it cannot be bound."""
        host = bindable(host)
        self.subscribers = Counter[bytes]()  # gateways by topic, as of the last `meet`
        keys = LinkKeys.generate()
        self._context = zmq.Context()  # not shared: a context has one authentication handler
        self._socket = self._context.socket(zmq.XPUB)
        self._gate: Gate | None = None
        try:
            LinkSettings(queue_messages=QUEUE_MESSAGES).apply(self._socket)
            self._socket.set(zmq.XPUB_VERBOSER, 1)  # every gateway that comes and goes is told
            self._socket.ipv6 = host.startswith("[")
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret
            self._gate = Gate(self._context, self._socket, client_public_keys, LinkStats())
            self._socket.bind(f"tcp://{host}:*")
            endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"cannot listen on {host}: {error}") from None
        except BaseException:
            self.close()
            raise
        self.address = LinkAddress(endpoint, keys.public)

    def meet(self) -> set[bytes]:
        """Count the gateways that have come and gone. The topics to which one has subscribed."""
        topics = set[bytes]()
        while True:
            try:
                event = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return topics
            comes, topic = event[:1] == b"\x01", event[1:]
            self.subscribers[topic] += 1 if comes else -1
            if self.subscribers[topic] <= 0:
                del self.subscribers[topic]
            if comes:
                topics.add(topic)

    def send(self, topic: bytes, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([topic, data], zmq.DONTWAIT)

    def close(self) -> None:
        """May be called twice."""
        if self._context.closed:
            return
        self._socket.close(linger=0)
        self._context.term()
        if self._gate is not None:
            self._gate.join()
