"""The gateway's end of what routers tell without being asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from actors.links.keys import LinkAddress, LinkKeys
from actors.links.settings import LinkSettings, milliseconds
from cluster.routing.publisher import QUEUE_MESSAGES

logger = logging.getLogger(__name__)

# Before others have their turn: one or two milliseconds.
_MOST_AT_ONCE = 32  # messages
_MOST_BYTES_AT_ONCE = 32_768


class Subscriber:
    """Some topics of all routers, over one socket. Belongs to the event loop it was made in."""

    def __init__(self, keys: LinkKeys, *topics: bytes, hear: Callable[[bytes], None], pause_s: float = 0.0) -> None:
        """keys: the cluster's client keys. hear: called with every message; what it raises is logged. pause_s: after
        all messages have been read, so that more are read together."""
        self._hear = hear
        self._pause_s = pause_s
        self._followed: dict[str, bytes] = {}  # routers' public keys by endpoint
        settings = LinkSettings(queue_messages=QUEUE_MESSAGES)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        settings.apply(self._socket)  # type: ignore[arg-type]  # it sets options, which are the same
        self._socket.ipv6 = True
        self._socket.reconnect_ivl = milliseconds(settings.reconnect_s)
        self._socket.reconnect_ivl_max = milliseconds(settings.reconnect_max_s)
        self._socket.curve_publickey = keys.public
        self._socket.curve_secretkey = keys.secret
        for topic in topics:
            self._socket.subscribe(topic)
        self._unawaited: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._task = asyncio.create_task(self._listen())

    def follow(self, addresses: Iterable[LinkAddress]) -> None:
        """Listen to the routers at these addresses, and to no others. Of two with the same endpoint, whose port the
        system has given again, the last one is there."""
        wanted = {address.endpoint: address.server_public_key for address in addresses}
        for endpoint, key in [*self._followed.items()]:
            if wanted.get(endpoint) != key:
                del self._followed[endpoint]
                self._socket.disconnect(endpoint)
        for endpoint, key in wanted.items():
            if endpoint not in self._followed:
                self._socket.curve_serverkey = key  # of connections from now on
                try:
                    self._socket.connect(endpoint)
                except zmq.ZMQError as error:
                    logger.warning("cannot listen to the router at %r: %s", endpoint, error)
                    continue
                self._followed[endpoint] = key

    def close(self) -> None:
        self._task.cancel()
        self._socket.close(linger=0)

    async def _listen(self) -> None:
        while True:
            await self._socket.poll()
            await asyncio.sleep(0 if self._read_some() else self._pause_s)

    def _read_some(self) -> bool:
        """Whether more may be there. Reads many messages at a time: waiting for one costs more than reading it."""
        num_bytes = 0
        for _ in range(_MOST_AT_ONCE):
            try:
                data = self._unawaited.recv_multipart(zmq.NOBLOCK)[-1]
            except zmq.Again:
                return False
            try:
                self._hear(data)
            except Exception as error:  # or all further news would be lost
                logger.warning("what a router says cannot be read: %r", error)
            num_bytes += len(data)
            if num_bytes >= _MOST_BYTES_AT_ONCE:
                break
        return True
