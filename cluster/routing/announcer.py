"""The router's end: publishes its load and the prompts that its target has computed."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable

import msgspec
import numpy as np
import zmq

from actors.errors import LinkError
from actors.links.gate import Gate
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.settings import LinkSettings
from actors.links.stats import LinkStats
from cluster.routing.prefix_blocks import BLOCK_TOKENS, namespace_block, prefix_blocks
from cluster.routing.router_load import RouterLoad
from cluster.routing.router_news import RouterNews, packed
from cluster.routing.warm_blocks import WarmBlocks

_encode = msgspec.msgpack.Encoder().encode


class Announcer:
    """Gateways connect to `address`, encrypted; only those with an admitted key hear anything. A gateway that reads too
    slowly misses news, which costs warmth. Belongs to one thread."""

    def __init__(self, router_id: str, client_public_keys: Iterable[bytes], host: str) -> None:
        """host: the IP address to bind and to tell gateways. Raises LinkError if it cannot be bound."""
        self._router_id = router_id
        self._warm = WarmBlocks()
        self._used: list[int] = []  # since the last news
        self._num_gateways = 0
        self._has_forgotten = False  # since the last news
        keys = LinkKeys.generate()
        self._context = zmq.Context()  # not shared: a context has one authentication handler
        self._socket = self._context.socket(zmq.XPUB)
        self._gate: Gate | None = None
        try:
            LinkSettings().apply(self._socket)
            self._socket.set(zmq.XPUB_VERBOSER, 1)  # every gateway that comes and goes is told
            self._socket.ipv6 = ":" in host
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret
            self._gate = Gate(self._context, self._socket, client_public_keys, LinkStats())
            self._socket.bind(f"tcp://{_in_endpoint(host)}:*")
            endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"cannot listen on {host}: {error}") from None
        except BaseException:
            self.close()
            raise
        self.address = LinkAddress(endpoint, keys.public)

    def use(self, token_ids: np.ndarray, prefix_namespace: str, namespace: str) -> None:
        """The target has computed these tokens, int32 [n]. The beginning of a prompt outlives its end, which is of no
        use without it."""
        blocks = [*reversed(prefix_blocks(token_ids, prefix_namespace)), namespace_block(namespace)]
        self._warm.use(blocks)
        if self._num_gateways:
            self._used += blocks

    def forget(self) -> None:
        """The target has lost its prefix cache."""
        self._warm.clear()
        self._has_forgotten = True

    def announce(self, load: RouterLoad | None, num_tokens: int) -> None:
        """load: None: it takes no requests. num_tokens: that the target's prefix cache holds."""
        self._warm.capacity = num_tokens // BLOCK_TOKENS
        has_newcomer = self._meet()
        if not self._num_gateways:
            return
        is_whole = has_newcomer or self._has_forgotten or len(self._used) > len(self._warm)
        news = RouterNews(
            router_id=self._router_id,
            load=load,
            num_gateways=self._num_gateways,
            num_blocks=self._warm.capacity,
            blocks=packed(list(self._warm) if is_whole else self._used),
            is_whole=is_whole,
        )
        self._used, self._has_forgotten = [], False
        with contextlib.suppress(zmq.Again):
            self._socket.send(_encode(news), zmq.DONTWAIT)

    def close(self) -> None:
        if self._context.closed:
            return
        self._socket.close(linger=0)
        self._context.term()
        if self._gate is not None:
            self._gate.join()

    def _meet(self) -> bool:
        """Count the gateways that have come and gone. Whether one has come."""
        has_newcomer = False
        while True:
            try:
                event = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return has_newcomer
            comes = event[:1] == b"\x01"
            has_newcomer |= comes
            self._num_gateways = max(0, self._num_gateways + (1 if comes else -1))


def _in_endpoint(host: str) -> str:
    return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
