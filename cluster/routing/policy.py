"""Serve's request router: sends a request to the router that is expected to answer it soonest."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from actors.links.keys import LinkAddress
from actors.messages import GenerationRequest
from actors.workers.directory_actor import read_client_keys
from cluster.routing.heard_statuses import heard_statuses
from cluster.routing.known_routers import MOST_COMPARED, KnownRouters, routed_prompt
from cluster.routing.replica_choice import soonest_first
from cluster.routing.router_news import NEWS, WHOLE, decode_news
from cluster.routing.subscriber import Subscriber

logger = logging.getLogger(__name__)

# Keys of the statistics that routers report to Serve by `record_routing_stats`. They change seldom: Serve's controller
# sends all of them to all gateways when one does.
READY = "ready"
ROUTER_ID = "router_id"
ENDPOINT = "endpoint"
PUBLIC_KEY = "public_key"

_ASK_AGAIN_S = 5.0
NEWS_PAUSE_S = 0.01  # routers announce every 250 ms


class SoonestFirst(RequestRouter):
    """Ray Serve makes one instance for each handle.

    Reports of `READY` are up to seconds old: a router that is not ready refuses what still comes to it (see
    `cluster.gateway.resume`). Where none is ready, any router gets the request and may say why it cannot serve.
    """

    def initialize_state(self, directory_name: str) -> None:
        """Called by Serve with the policy's arguments."""
        self._directory_name = directory_name
        self._known = KnownRouters()
        self._statuses = heard_statuses(directory_name)
        self._listener: Subscriber | None = None
        self._asking: asyncio.Task[None] | None = None
        self._listed: list[RunningReplica] = []  # Serve makes another list when they change
        self._ready: dict[str, RunningReplica] = {}  # of these, by router id
        self._others: list[RunningReplica] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas or what they report has changed: routers are heard before the first request."""
        super().update_replicas(replicas)
        self._take_in(self._replicas_list)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas by rank: Serve takes the shortest queue of the first rank that has room."""
        if candidate_replicas is not self._listed:
            self._take_in(candidate_replicas)
        others = _some(self._others)
        if pending_request is None:
            return [_some(list(self._ready.values())), others]
        pending_request.routing_context.should_backoff = True  # where all are full, or this would spin
        request = next(iter(pending_request.args), None)
        if not isinstance(request, GenerationRequest):
            return [_some(list(self._ready.values())), others]
        prompt = routed_prompt(request)
        return [*soonest_first(self._known, self._ready, request, prompt, time.monotonic()), others]

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give the replica to the request that it was chosen for. Serve itself looks for it by an id that all calls
        within one HTTP request share, such as those for its `n` answers, and would route one of them alone.

        request_metadata: each pending request has its own.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return

    def _take_in(self, replicas: list[RunningReplica]) -> None:
        self._listed = replicas
        self._ready, self._others = {}, []
        for replica in replicas:
            stats = replica.routing_stats
            if stats.get(READY):
                self._ready[stats.get(ROUTER_ID) or str(replica.replica_id)] = replica
            else:
                self._others.append(replica)
        self._follow()

    def _follow(self) -> None:
        """Listen to the listed routers, and to no others."""
        if self._listener is None:
            self._asking = self._asking or asyncio.create_task(self._start_to_listen())
            return
        announced = [stats for replica in self._listed if (stats := replica.routing_stats).get(ENDPOINT)]
        addresses = {stats[ROUTER_ID]: LinkAddress(stats[ENDPOINT], stats[PUBLIC_KEY]) for stats in announced}
        self._listener.follow(addresses.values())
        self._known.forget_all_but(addresses.keys())
        self._statuses.follow(addresses, len(self._listed))

    async def _start_to_listen(self) -> None:
        """With the key that routers admit. Until then, requests go to whoever has fewest."""
        while self._listener is None:
            try:
                keys = await read_client_keys(self._directory_name)
                topics = NEWS, WHOLE + secrets.token_hex(8).encode()
                self._listener = Subscriber(keys, *topics, hear=self._hear, pause_s=NEWS_PAUSE_S)
                self._follow()
            except Exception as error:
                logger.warning("the gateway does not hear routers yet: %r", error)
                await asyncio.sleep(_ASK_AGAIN_S)

    def _hear(self, data: bytes) -> None:
        news, now = decode_news(data), time.monotonic()
        self._known.hear(news, now)
        if news.status is not None:
            self._statuses.hear(news.router_id, news.status, now)


def _some(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """In random order, since Serve takes the first of equals; of many, those that it may probe."""
    return random.sample(replicas, min(len(replicas), MOST_COMPARED))
