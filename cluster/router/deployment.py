"""Routers as a Ray Serve deployment, one replica for each possible target group. A request is one Serve call; rounds go
over links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.util import get_node_ip_address

from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import create_drafters, expand_drafters
from actors.errors import Overloaded, RouterLost, Unavailable
from actors.grammar.grammars import Grammars
from actors.logs import ObservabilityConfig, configure_logging, request_id
from actors.messages import GenerationRequest, TokenChunk, WorkerInfo
from actors.models.loader import ModelInfo
from actors.pool_names import FIRST_POOL
from actors.workers.directory import Asked, Told
from actors.workers.directory_actor import find_directory
from actors.workers.directory_contact import Contact, DirectoryContact
from actors.workers.directory_relay import RELAY_TIMEOUT_S
from actors.workers.serve_log import tell_refusals_briefly
from cache_service.counts.soft_exchange import DELTA_BYTES
from cache_service.formats.namespaces import OPEN
from cluster.cache.promotion import PromotionSource
from cluster.cache.regions import RegionsSource
from cluster.cache.shared_cache import open_shared_cache
from cluster.config import CacheConfig, DraftConfig, DraftModelConfig, RouterConfig, SpeculationConfig
from cluster.interpreter import put_event_loop_first
from cluster.node_metrics import NodeMetrics
from cluster.router.connections import Connections, keep_connected
from cluster.router.core import RouterCore
from cluster.router.directory_view import DirectoryView
from cluster.router.driver import RouterDriver
from cluster.router.guarded_sink import SharedLearning
from cluster.router.metrics import RouterMetrics
from cluster.router.status import router_status
from cluster.router.worker_drafting import DraftShape
from cluster.routing.announcer import Announcer
from cluster.routing.chunk_streams import ChunkSender
from cluster.routing.policy import ENDPOINT, PUBLIC_KEY, READY, ROUTER_ID, SoonestFirst
from cluster.routing.prefix_blocks import prefix_blocks
from cluster.routing.publisher import Publisher
from cluster.routing.router_status import RouterStatus
from cluster.text.tokenizer import read_tokenizer

logger = logging.getLogger(__name__)

MAX_ONGOING_REQUESTS = 8192  # a backstop: the core's queue is the bound that clients meet
_STATUS_CALLS = 32  # status calls that may wait beside requests while there is no replica
_DRAIN_S = 60.0
_ASK_PERIOD_S = 0.25  # between questions to the directory, at least
_ANSWER_TIMEOUT_S = 5.0  # beyond the time for which the directory waits for something new
_STATS_PERIOD_S = 0.5  # between readiness reports to gateways, sent through Serve's controller
_DISMISSED_S = 3.0  # without a health check: Serve's controller has told this router to stop
_LOOK_AGAIN_S = 0.05
_EARLY_RETRY_S = 5.0
_ANNOUNCE_PERIOD_S = 0.25  # between announcements to gateways


@dataclass(frozen=True)
class RouterSettings:
    config: RouterConfig
    speculation: SpeculationConfig
    draft: DraftConfig
    cache: CacheConfig
    model: ModelInfo
    tokenizer_dir: str  # of the target, for grammars
    directory_name: str
    promotion: PromotionSource | None = None  # None: phrases of tenants stay in their namespaces
    regions: RegionsSource | None = None  # None: nothing is exchanged with other clusters
    observability: ObservabilityConfig | None = None  # None: logging stays as the process has it
    # File with the progress of the draft model's build, told in the status until a draft worker is there.
    build_progress: Path | None = None
    more_drafts: Mapping[str, DraftModelConfig] = field(default_factory=dict)  # further pools of draft workers, by name
    metrics_by_node: bool = False  # no page asks for this router's: see `cluster.node_metrics`


class Router:
    """Owns the sequences of the target group that the directory assigns to it, or stands by for one.

    upstream: deployments that Serve must start beside it.
    """

    async def __init__(self, settings: RouterSettings, *upstream: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        if settings.observability is not None:
            configure_logging(settings.observability, "router")
        tell_refusals_briefly()
        self._settings = settings
        self._model = settings.model.fingerprint
        self._router_id = secrets.token_hex(8)
        self._contact = DirectoryContact(settings.directory_name)
        keys = await find_directory(settings.directory_name).client_keys.remote()
        self._connections = Connections(keys)
        self._view = DirectoryView()
        self._publisher = Publisher([keys.public], get_node_ip_address())
        self._announcer = Announcer(self._router_id, self._publisher)
        self._chunks = ChunkSender(self._publisher)
        self._driver: RouterDriver | None = None
        self._incarnation: int | None = None  # of the target whose prefix cache is announced
        self._num_early = 0  # requests that came before the first target
        self._metrics: RouterMetrics | None = None
        self._telling: asyncio.Task[None] | None = None
        self._cache = open_shared_cache(
            settings.cache,
            settings.model.fingerprint,
            settings.model.vocab_size,
            promotion=settings.promotion,
            regions=settings.regions,
        )
        # Kernels compile here, before the first request.
        self._drafters: dict[str, CpuDrafter] = create_drafters(
            expand_drafters(settings.speculation.drafters, pools=tuple(settings.more_drafts)),
            corpora=settings.speculation.corpora,
            tokenizer_fingerprint=settings.model.tokenizer_fingerprint,
            index=None if self._cache is None else self._cache.index,
            delta_bytes=0 if self._cache is None else DELTA_BYTES,
            options=settings.speculation.drafter_options,
        )
        self._soft_sharing = None if self._cache is None else self._cache.share_counts(self._drafters)
        if self._soft_sharing is not None:
            self._soft_sharing.follow(OPEN)  # tenants' namespaces are followed with their first request
        self._asked_at = time.monotonic()  # when Serve's controller last asked how this router is
        self._has_left = False
        self._following = asyncio.create_task(self._follow_directory())
        self._task = asyncio.create_task(keep_connected(self._connections, self._view.workers, self._adopt))
        self._announcing = asyncio.create_task(self._announce())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The chunks that do not go to the gateway beside Serve; the last one is always among them."""
        request_id.set(request.caller_id)  # for all that is logged in this task
        self._check_group()
        logger.info("%s came with %d tokens", request.request_id, len(request.prompt_token_ids))
        chunks = (self._driver or await self._first_rounds()).generate(request)
        answer: list[int] = []
        attempt = secrets.token_hex(8)
        self._announcer.meet()
        try:
            async for chunk in chunks:
                if not answer:
                    self._note_computed(request, answer)
                answer.extend(chunk.token_ids)
                chunk = msgspec.structs.replace(chunk, attempt=attempt)
                if chunk.finish_reason is None and self._chunks.reaches(request.gateway):
                    self._chunks.send(request.gateway, chunk)
                else:
                    yield chunk
        except Overloaded as error:
            if request.asks_another:
                error.router_id = self._router_id
            raise
        finally:
            await chunks.aclose()
            if answer:
                self._note_computed(request, answer)
            logger.info("%s left with %d tokens", request.request_id, len(answer))

    def _note_computed(self, request: GenerationRequest, answer: list[int]) -> None:
        tokens = np.concatenate([request.prompt_token_ids, np.array(answer, np.int32)])
        blocks = prefix_blocks(tokens, request.prefix_namespace or request.namespace)
        self._announcer.use(blocks, request.namespace)

    async def _announce(self) -> None:
        while True:
            try:
                core = None if self._driver is None else self._driver.core
                status = self._status()
                load = core.load() if core is not None and status.ready else None
                self._announcer.announce(load, 0 if core is None else core.prefix_cache_tokens, status)
            except Exception:
                logger.exception("gateways do not hear how this router is")
            await asyncio.sleep(_ANNOUNCE_PERIOD_S)

    def _check_group(self) -> None:
        if self._connections.is_standby:
            raise RouterLost("this router has no target group; others have")

    async def _first_rounds(self) -> RouterDriver:
        """Wait for the first target: when an application is updated, the new routers may start before it. The caller
        enforces the deadline. Raises Overloaded where too many requests wait."""
        most = self._settings.config.max_running + self._settings.config.max_waiting
        if self._num_early >= most:
            raise Overloaded(f"{most} requests wait for the target group to start; that is the limit", _EARLY_RETRY_S)
        self._num_early += 1
        try:
            while self._driver is None:
                await asyncio.sleep(_LOOK_AGAIN_S)
                self._check_group()
        finally:
            self._num_early -= 1
        return self._driver

    async def status(self) -> RouterStatus:
        """For gateways that do not hear this router."""
        return msgspec.structs.replace(self._status(), told_by=(self._router_id, self._publisher.address))

    def _status(self) -> RouterStatus:
        return router_status(self._driver, self._connections, self._settings.build_progress)

    async def own_metrics(self) -> tuple[str, str]:
        """The router's id, and its metrics in Prometheus text format."""
        return self._router_id, self._metrics.text() if self._metrics is not None else ""

    def record_routing_stats(self) -> dict[str, Any]:
        """Readiness, and where gateways hear more: see `SoonestFirst`."""
        self._asked_at = time.monotonic()
        address = self._publisher.address
        return {
            READY: self._status().ready,
            ROUTER_ID: self._router_id,
            ENDPOINT: address.endpoint,
            PUBLIC_KEY: address.server_public_key,
        }

    async def check_health(self) -> None:
        self._asked_at = time.monotonic()
        if self._task.done() or self._following.done():
            raise Unavailable("the router no longer follows the directory")
        if self._driver is not None and self._driver.failure is not None:
            raise Unavailable(f"rounds have stopped: {self._driver.failure}")

    async def __del__(self) -> None:
        self._asked_at = -math.inf  # no health check will come
        self._leave_group()
        if self._driver is not None:
            await self._driver.drain(_DRAIN_S)
            self._driver.close()
        self._task.cancel()
        self._following.cancel()
        self._announcing.cancel()
        if self._telling is not None:
            self._telling.cancel()
        self._publisher.close()
        self._connections.close()
        if self._cache is not None:
            await asyncio.to_thread(self._cache.close)

    async def _follow_directory(self) -> None:
        while True:
            began = time.monotonic()
            try:
                contact: Contact = self._contact.found or await asyncio.to_thread(self._contact.find)
                limit_s = RELAY_TIMEOUT_S if self._contact.uses_relay else _ANSWER_TIMEOUT_S
                async with asyncio.timeout(self._view.longest_wait_s + limit_s):
                    told: Told | None = await contact.follow.remote(self._question(began))
                if told is not None:
                    self._view.take(told)
                    self._contact.answered(told.relay)
            except Exception as error:
                logger.warning("the directory did not answer: %r", error)
                self._contact.failed(error)
            await asyncio.sleep(began + _ASK_PERIOD_S - time.monotonic())

    def _question(self, now: float) -> Asked:
        drafts, targets = None, None
        if self._driver is not None:
            core = self._driver.core
            drafts = {pool: scaling.demand(now) for pool, scaling in core.draft_scaling.items()}
            targets = core.target_demand(now) if self._driver.has_target else None
        return Asked(
            router_id=self._router_id,
            model=self._model,
            held=self._connections.target_id,
            mark=self._view.mark,
            is_leaving=self._is_dismissed,
            drafts=drafts,
            targets=targets,
        )

    @property
    def _is_dismissed(self) -> bool:
        return time.monotonic() - self._asked_at > _DISMISSED_S

    def _leave_group(self) -> None:
        if not self._has_left:
            self._has_left = True
            # If too many calls wait there, the claim expires.
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                self._contact.find().release_target.remote(self._router_id)

    def _adopt(self) -> None:
        """Start rounds with the first target, and give the driver the present links. A router that is told to stop
        leaves its group to another one; running requests finish on it all the same."""
        if self._is_dismissed:
            self._leave_group()
        else:
            self._has_left = False
        if self._driver is None and self._connections.target is not None:
            self._driver = self._start_rounds(self._connections.target[0])
        if self._connections.target is not None and self._connections.target[0].incarnation != self._incarnation:
            self._incarnation = self._connections.target[0].incarnation
            self._announcer.forget()
        if self._driver is not None:
            self._driver.follow(self._connections)

    def _start_rounds(self, info: WorkerInfo) -> RouterDriver:
        draft, more_drafts = self._settings.draft, self._settings.more_drafts
        core = RouterCore(
            info,
            self._settings.config,
            self._settings.speculation,
            self._drafters,
            draft_shapes={
                pool: DraftShape(options.gamma, options.branch)
                for pool, options in {FIRST_POOL: draft, **more_drafts}.items()
            },
            shared=SharedLearning(self._cache, self._soft_sharing),
        )
        model, tokenizer_dir = self._settings.model, self._settings.tokenizer_dir
        grammars = Grammars(lambda: read_tokenizer(tokenizer_dir), info.vocab_size, model.eos_token_ids, model.name)
        limits_s = self._settings.config.verify_timeout_s, draft.deadline_ms / 1e3
        pool_deadlines_s = {pool: options.deadline_ms / 1e3 for pool, options in more_drafts.items()}
        driver = RouterDriver(core, *limits_s, grammars=grammars, pool_deadlines_s=pool_deadlines_s)
        self._metrics = RouterMetrics(core, driver, self._connections, self._cache)
        if self._settings.metrics_by_node:
            told = NodeMetrics(self._metrics.registry, "router", self._router_id)
            self._telling = asyncio.create_task(told.keep_telling())
        put_event_loop_first()
        return driver


def router_application(settings: RouterSettings, *upstream: Any, replicas: int = 1) -> serve.Application:
    """replicas: the maximum number of target groups; routers without a group are on standby."""
    deployment = serve.deployment(Router).options(
        name="Router",
        num_replicas=replicas,
        request_router_config=RequestRouterConfig(
            # Named by a path through this module. Serve pickles classes of the named module by value; unpickling such a
            # class in this process would replace the methods of the original class by copies with separate globals.
            request_router_class=f"{__name__}.{SoonestFirst.__name__}",
            request_router_kwargs={"directory_name": settings.directory_name},
            request_routing_stats_period_s=_STATS_PERIOD_S,
        ),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        # While there is no replica, as many requests wait as it would accept.
        max_queued_requests=settings.config.max_running + settings.config.max_waiting + _STATUS_CALLS,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1.0,  # gateways try a broken router for seconds only
        graceful_shutdown_wait_loop_s=0.5,  # gateways hear at once that a replica goes
        graceful_shutdown_timeout_s=_DRAIN_S,
    )
    return deployment.bind(settings, *upstream)
