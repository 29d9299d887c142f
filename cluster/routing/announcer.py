"""Tells gateways a router's load and status, and the prompts that its target has computed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from cluster.routing.prefix_blocks import BLOCK_TOKENS, namespace_block
from cluster.routing.publisher import Publisher
from cluster.routing.router_load import RouterLoad
from cluster.routing.router_news import NEWS, WHOLE, RouterNews, packed
from cluster.routing.router_status import RouterStatus
from cluster.routing.warm_blocks import WarmBlocks

_STATUS_EVERY = 4  # news, if it stays the same: a second

_encode = msgspec.msgpack.Encoder().encode


class Announcer:
    """A gateway that misses news sends requests to where less is warm. When it connects again it hears all of it, on a
    topic of its own, so that nobody else has to."""

    def __init__(self, router_id: str, publisher: Publisher) -> None:
        self._router_id = router_id
        self._publisher = publisher
        self._warm = WarmBlocks()
        self._used: list[int] = []  # since the last news
        self._has_forgotten = False  # since then
        self._newcomers = set[bytes]()  # since then: topics of gateways
        self._status: RouterStatus | None = None  # as gateways know it
        self._num_since = 0  # news since they were told

    def use(self, prefix_blocks: Sequence[int], namespace: str) -> None:
        """The target has computed the tokens of these blocks. The beginning of a prompt outlives its end, which is of
        no use without it."""
        blocks = [*reversed(prefix_blocks), namespace_block(namespace)]
        self._warm.use(blocks)
        if self._publisher.subscribers[NEWS] and len(self._used) <= self._warm.capacity:  # beyond, all are told anyway
            self._used += blocks

    def forget(self) -> None:
        """The target has lost its prefix cache."""
        self._warm.clear()
        self._has_forgotten = True

    def meet(self) -> None:
        """Learn which gateways listen."""
        self._newcomers |= {topic for topic in self._publisher.meet() if topic.startswith(WHOLE)}

    def announce(self, load: RouterLoad | None, num_tokens: int, status: RouterStatus | None = None) -> None:
        """Call it four times a second. load: None: it takes no requests. num_tokens: that the target's prefix cache
        holds. status: None: gateways ask for it."""
        self._warm.capacity = num_tokens // BLOCK_TOKENS
        self.meet()
        if not (num_gateways := self._publisher.subscribers[NEWS]):
            self._newcomers.clear()  # they have gone again
            return
        is_whole = self._has_forgotten or len(self._used) > len(self._warm)
        news = RouterNews(
            router_id=self._router_id,
            load=load,
            num_gateways=num_gateways,
            num_blocks=self._warm.capacity,
            blocks=packed(list(self._warm) if is_whole else self._used),
            is_whole=is_whole,
            status=self._due(status),
        )
        self._publisher.send(NEWS, _encode(news))
        if self._newcomers:
            whole = _encode(replace(news, blocks=packed(list(self._warm)), is_whole=True, status=status))
            for topic in sorted(self._newcomers):
                self._publisher.send(topic, whole)
        self._used, self._newcomers, self._has_forgotten = [], set(), False

    def _due(self, status: RouterStatus | None) -> RouterStatus | None:
        self._num_since += 1
        if status == self._status and self._num_since < _STATUS_EVERY:
            return None
        self._status, self._num_since = status, 0
        return status
