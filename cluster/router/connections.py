"""Keeps a router's links in step with the directory: which workers are there, and which target incarnation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import starmap

import numpy as np

from actors.errors import LinkError, Unavailable
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import (
    Hello,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.directory import WorkerEntry

logger = logging.getLogger(__name__)

_REFRESH_S = 0.25
_HELLO_TIMEOUT_S = 5.0
_WARM_UP_TIMEOUT_S = 60.0
_WARM_UP_ROUND = 0  # the router's own rounds begin at 1
_WARM_UP_PAUSE_S = 1.0  # after a target that gave no token
_TRAFFIC = ("sent", "received", "sent_bytes", "received_bytes", "closed")  # counts of `LinkStats`
_LONGEST_WAIT_S = 0.25  # a refresh waits no longer for the target, which may be busy
_FAILOVER_NOTICE_S = 1.5  # by then gateways know that they should ask another router


class Connections:
    """Links by worker id. Call `refresh` periodically; it never raises for a worker that is away.

    `target` is set once a target has computed a first token. The directory assigns target groups to routers. A router
    without a group is a standby while others have groups. If no router has one, it waits for its group.
    """

    def __init__(self, client_keys: LinkKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client_keys = client_keys
        self._clock = clock
        self.target_id: str | None = None  # the group that this router has, or waits for
        self.others_serve = False  # there are target groups of other routers
        self._leaves_at: float | None = None  # its group is about to stop, and others serve
        # Incarnation of the last target that said it would leave, or that another router got: its end is no loss.
        self.released_incarnation: int | None = None
        self._links: dict[str, tuple[WorkerEntry, AsyncLink]] = {}
        self._greeting: asyncio.Task[None] | None = None
        self._warm_incarnation: int | None = None
        self.target: tuple[WorkerInfo, AsyncLink] | None = None
        self._closed_drops: Counter[tuple[str, str]] = Counter()  # from links that are closed by now
        self._closed_traffic: Counter[str] = Counter()

    @property
    def is_standby(self) -> bool:
        """Other routers serve, and this one has no target group."""
        return self.target_id is None and self.others_serve

    @property
    def is_leaving(self) -> bool:
        """The target group is about to stop, and others serve: running requests go on for a moment, new ones go
        elsewhere."""
        return self._leaves_at is not None

    async def refresh(self, entries: list[WorkerEntry], target_id: str | None) -> None:
        """Open links to new workers, close those of workers that are gone or were replaced.

        target_id: the target group assigned to the router, None if it has none.
        """
        self._choose_target(entries, target_id)
        wanted = {
            entry.worker_id: entry for entry in entries if entry.role == "draft" or entry.worker_id == self.target_id
        }
        for worker_id, (entry, link) in list(self._links.items()):
            if entry.role == "target" and worker_id != self.target_id:
                self._close(worker_id)
                continue
            found = wanted.get(worker_id)
            if found is not None and found.incarnation == entry.incarnation and found.address == entry.address:
                self._links[worker_id] = (found, link)  # its counts are newer
            elif found is not None or not link.is_alive:  # a directory that is filling up does not know all workers yet
                self._close(worker_id)
        for worker_id, entry in wanted.items():
            if worker_id not in self._links:
                self._links[worker_id] = (entry, AsyncLink(entry.address, self._client_keys))
        await self._greet_target()

    def draft_links(self) -> dict[str, AsyncLink]:
        """Links to draft workers that are connected and not leaving."""
        return {
            worker_id: link
            for worker_id, (entry, link) in self._links.items()
            if entry.role == "draft" and link.is_alive and not entry.is_leaving
        }

    def draft_models(self) -> dict[str, dict[str, str]]:
        """The model of each worker of `draft_links`, by pool."""
        found: dict[str, dict[str, str]] = {}
        for worker_id in sorted(self.draft_links()):
            entry, _ = self._links[worker_id]
            found.setdefault(entry.pool, {})[worker_id] = entry.model
        return found

    @property
    def num_draft_links(self) -> int:
        return len(self.draft_links())

    def links(self) -> list[AsyncLink]:
        return [link for _, link in self._links.values()]

    def drops(self) -> Counter[tuple[str, str]]:
        """Messages dropped and calls timed out since the start, over all links, by end and reason. The end is "router",
        or "worker" as the workers last told the directory."""
        return sum(starmap(_drops_of, self._links.values()), self._closed_drops)

    def traffic(self) -> Counter[str]:
        """Counts at the router's end over all links since the start: sent, received (messages), sent_bytes,
        received_bytes, closed (connections that ended)."""
        return sum((_traffic_of(link) for link in self.links()), self._closed_traffic)

    @property
    def num_in_flight(self) -> int:
        """Calls to workers without an answer yet."""
        return sum(link.in_flight for link in self.links())

    def close(self) -> None:
        for worker_id in list(self._links):
            self._close(worker_id)

    def _choose_target(self, entries: list[WorkerEntry], target_id: str | None) -> None:
        targets = {entry.worker_id: entry for entry in entries if entry.role == "target"}
        held, found = targets.get(self.target_id or ""), self._links.get(self.target_id or "")
        self.others_serve = any(not entry.is_leaving for entry in targets.values() if entry.worker_id != target_id)
        leaves_at, self._leaves_at = self._leaves_at, None
        if target_id is not None:
            self.target_id = target_id
        elif self.target_id is not None and self.others_serve:  # else it keeps its group, or waits for one
            if found is None or not found[1].is_alive or (held is not None and not held.is_leaving):
                self.target_id = None
            elif held is not None:
                now = self._clock()
                self._leaves_at = now + _FAILOVER_NOTICE_S if leaves_at is None else leaves_at
                if now >= self._leaves_at:
                    self.target_id = self._leaves_at = None
            # else: a directory that is filling up again does not know the group yet, and its link works
        served = None if self.target is None else self.target[0].incarnation
        if held is not None and held.incarnation == served and (held.is_leaving or held.worker_id != self.target_id):
            self.released_incarnation = served

    async def _greet_target(self) -> None:
        found = self._links.get(self.target_id or "")
        if found is None or (self.target is not None and self.target[1] is found[1]):
            return
        if self._greeting is None or self._greeting.done():
            self._greeting = asyncio.create_task(self._greet(found[1]))
        await asyncio.wait({self._greeting}, timeout=_LONGEST_WAIT_S)

    async def _greet(self, link: AsyncLink) -> None:
        with contextlib.suppress(LinkError):  # closing the link ends the call, too
            answer = await link.call(Hello(), _HELLO_TIMEOUT_S)
            if not isinstance(answer, WorkerInfo) or answer.role != "target":
                return
            if answer.incarnation != self._warm_incarnation:
                try:
                    await _warm_up(link, answer.vocab_size)
                except Unavailable as error:
                    logger.error("%s", error)
                    await asyncio.sleep(_WARM_UP_PAUSE_S)
                    return
                self._warm_incarnation = answer.incarnation
            if link in self.links():
                self.target = (answer, link)

    def _close(self, worker_id: str) -> None:
        entry, link = self._links.pop(worker_id)
        link.close()
        self._closed_drops += _drops_of(entry, link)
        self._closed_traffic += _traffic_of(link)
        if self.target is not None and self.target[1] is link:
            self.target = None


async def _warm_up(link: AsyncLink, vocab_size: int) -> None:
    """Have all ranks compute the token that follows a prompt of one token: the group is whole and has its weights.

    Raises Unavailable where the target answers anything but a token, LinkError where it does not answer in time.
    """
    seq_id = secrets.randbits(62)
    prompt = np.zeros(1, np.int32)
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt), "warm-up")
    item = VerifyItem(SequenceDelta(seq_id, 0, prompt), 1, begin=begin)
    try:
        answer = await link.call(VerifyBatch(_WARM_UP_ROUND, [item], []), _WARM_UP_TIMEOUT_S)
    finally:
        await link.call(VerifyBatch(_WARM_UP_ROUND, [], [seq_id]), _WARM_UP_TIMEOUT_S)
    tokens = [verdict.next_token for verdict in answer.verdicts] if isinstance(answer, VerifyResult) else []
    if len(tokens) != 1 or not 0 <= tokens[0] < vocab_size:
        raise Unavailable(f"no warm-up token came out of the target: {answer}")


def _drops_of(entry: WorkerEntry, link: AsyncLink) -> Counter[tuple[str, str]]:
    drops = Counter({("worker", reason): count for reason, count in entry.link_drops})
    drops.update({("router", reason): count for reason, count in link.stats.dropped.items()})
    drops["router", "timeout"] += link.stats.timeouts
    return +drops


def _traffic_of(link: AsyncLink) -> Counter[str]:
    return Counter({name: getattr(link.stats, name) for name in _TRAFFIC})


async def keep_connected(
    connections: Connections,
    list_workers: Callable[[], Awaitable[tuple[list[WorkerEntry], str | None]]],
    on_change: Callable[[], None],
) -> None:
    """Refresh forever with what `list_workers` returns: the workers, and the id of the router's target group. A
    directory that does not answer leaves everything as it is."""
    while True:
        try:
            await connections.refresh(*await list_workers())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.warning("the directory did not answer: %r", error)
        on_change()
        await asyncio.sleep(_REFRESH_S)
