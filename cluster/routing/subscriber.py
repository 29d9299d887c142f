"""The gateway's end of what routers tell without being asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from actors.links.keys import LinkAddress, LinkKeys
from actors.links.settings import LinkSettings, milliseconds
from cluster.routing.publisher import QUEUE_MESSAGES

logger = logging.getLogger(__name__)


class Subscriber:
    """One topic of all routers, over one socket. Belongs to the event loop it was made in."""

    def __init__(self, keys: LinkKeys, topic: bytes, hear: Callable[[bytes], None]) -> None:
        """keys: the cluster's client keys. hear: called with every message; what it cannot read is logged, if it raises
        MsgspecError or ValueError."""
        self._hear = hear
        self._followed: dict[str, LinkAddress] = {}  # by router id
        settings = LinkSettings(queue_messages=QUEUE_MESSAGES)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        settings.apply(self._socket)  # type: ignore[arg-type]  # it sets options, which are the same
        self._socket.ipv6 = True
        self._socket.reconnect_ivl = milliseconds(settings.reconnect_s)
        self._socket.reconnect_ivl_max = milliseconds(settings.reconnect_max_s)
        self._socket.curve_publickey = keys.public
        self._socket.curve_secretkey = keys.secret
        self._socket.subscribe(topic)
        self._task = asyncio.create_task(self._listen())

    def follow(self, addresses: Mapping[str, LinkAddress]) -> None:
        """Listen to these routers, by id, and to no others."""
        for router_id, address in [*self._followed.items()]:
            if addresses.get(router_id) != address:
                del self._followed[router_id]
                self._socket.disconnect(address.endpoint)
        for router_id, address in addresses.items():
            if router_id not in self._followed:
                self._socket.curve_serverkey = address.server_public_key  # of connections from now on
                try:
                    self._socket.connect(address.endpoint)
                except zmq.ZMQError as error:
                    logger.warning("cannot listen to the router at %r: %s", address.endpoint, error)
                    continue
                self._followed[router_id] = address

    def close(self) -> None:
        self._task.cancel()
        self._socket.close(linger=0)

    async def _listen(self) -> None:
        while True:
            _, data = await self._socket.recv_multipart()
            try:
                self._hear(data)
            except (msgspec.MsgspecError, ValueError) as error:
                logger.warning("what a router says cannot be read: %s", error)
