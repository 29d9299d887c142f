"""The gateway as a Ray Serve deployment: each replica answers HTTP and gRPC through Serve's proxies."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig, HTTPOptions, ProxyLocation
from ray.serve.grpc_util import RayServegRPCContext

from actors.logs import ObservabilityConfig, configure_logging
from actors.workers.directory_actor import read_client_keys
from cluster.cache.tenant_leases import lease_renewal
from cluster.config import CacheConfig
from cluster.gateway import SERVICER_FUNCTIONS
from cluster.gateway.door.front_door import FrontDoor
from cluster.gateway.door.gateway_sockets import socket_path
from cluster.gateway.errors import UNAVAILABLE_RETRY_AFTER_S
from cluster.gateway.grpc.registration import HostedGrpcOptions
from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.http.socket_listener import SocketListener
from cluster.gateway.http_app import create_app, paceline_version
from cluster.gateway.observability.metrics import GatewayMetrics, merged, missing_text
from cluster.gateway.observability.metrics_page import metrics_listener
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.router_client import RouterClient, ask_all
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.interpreter import put_event_loop_first
from cluster.node_metrics import MOST_ON_PAGE, NodeMetrics
from cluster.routing.heard_statuses import heard_statuses
from cluster.tenants.access import TenantAccess
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.text.tokenizer import read_tokenizer

logger = logging.getLogger(__name__)

# A backstop in each replica, for calls through Serve; the router's bounded queue refuses first.
MAX_ONGOING_REQUESTS = 4096
MAX_QUEUED_REQUESTS = 1024  # in a proxy, while there is no replica; beyond: 429 / RESOURCE_EXHAUSTED
_SIBLINGS_S = 3.0  # time limit for other gateways' metrics
_DRAIN_S = 120.0  # time limit for open streams after a replica is told to stop


class Gateway(InferenceServicer):
    """Built by `gateway_application`. Serve finds gRPC methods by name and passes `grpc_context` by keyword."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        router: Any,
        tokenizer_dir: str,
        model: ServedModel,
        config: GatewayConfig,
        access: TenantAccess | None = None,
        observability: ObservabilityConfig | None = None,
        directory_name: str | None = None,
        cache: CacheConfig | None = None,
        num_routers: int = 1,
        metrics_by_node: bool = False,
    ) -> None:
        """router: a deployment handle, for `RouterClient`. access None: no keys are required. directory_name: with the
        keys of links; None: routers are reached through Serve alone. cache: whose server has the limits of tenants;
        None: each gateway enforces an equal share. num_routers: at most. metrics_by_node: see
        `cluster.node_metrics`."""
        if observability is not None:
            configure_logging(observability, "gateway")
        tokenizer = read_tokenizer(tokenizer_dir)
        metrics = self._metrics = GatewayMetrics()
        self._gateway_id = secrets.token_hex(8)
        self._replicas = config.replicas
        self._metrics_by_node = metrics_by_node
        self._siblings: Any = None  # handle of all gateway replicas, made on first use
        refusals, failures = metrics.tenant_refusals, metrics.tenant_registry_failures
        renewal = None if access is None or config.replicas == 1 or cache is None else lease_renewal(cache)
        self._renewing = None if renewal is None else asyncio.create_task(renewal.run())
        gatekeeper = (
            None if access is None else Gatekeeper(access, config.replicas, refusals, failures, renewal=renewal)
        )
        self._tracing = None
        if observability is not None and observability.otlp_endpoint is not None:
            from cluster.gateway.observability.tracing import open_tracing  # OpenTelemetry loads slowly

            self._tracing = open_tracing(observability, paceline_version())
        router._init(_run_router_in_separate_loop=False)  # a call would cross to another thread and back
        client_keys = None if directory_name is None else partial(read_client_keys, directory_name)
        heard = None if directory_name is None else heard_statuses(directory_name)
        router_client = RouterClient(router, client_keys=client_keys, num_routers=num_routers, heard=heard)
        service = GenerationService(
            router_client,
            tokenizer,
            model,
            config,
            metrics=metrics,
            gatekeeper=gatekeeper,
            tracing=self._tracing,
            all_gateways=self._metrics_of_all,
        )
        super().__init__(service, config)
        self._app = create_app(service, config, answers_request_id=False)
        self._open = AsyncExitStack()
        await self._open.enter_async_context(metrics_listener(config, service.metrics_page))
        self._following = asyncio.create_task(service.follow_router())
        self._telling = None
        if metrics_by_node:
            told = NodeMetrics(metrics.registry, "gateway", self._gateway_id)
            self._telling = asyncio.create_task(told.keep_telling())
        self._listener = await _listener_for_proxy(self._app)
        put_event_loop_first()

    async def __del__(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for task in (self._renewing, self._telling):
            if task is not None:
                task.cancel()
        await self._open.aclose()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def own_metrics(self) -> tuple[str, str]:
        """This gateway's id, and its metrics in Prometheus text format."""
        return self._gateway_id, self._metrics.text()

    async def _metrics_of_all(self) -> str:
        """Metrics of all replicas that answer in time, since a scraper reaches only one; of many, of this one alone."""
        texts, missing = dict([await self.own_metrics()]), self._replicas - 1
        if self._replicas > 1 and not self._metrics_by_node:
            try:
                if self._siblings is None:
                    context = serve.get_replica_context()
                    self._siblings = await asyncio.to_thread(
                        serve.get_deployment_handle, context.deployment, context.app_name
                    )
                answers, missing = await ask_all(self._siblings, "own_metrics", _SIBLINGS_S)
                texts |= dict(answers)
            except Exception as error:
                logger.warning("no metrics from other gateways: %r", error)
        return merged("gateway", texts) + missing_text("gateways", missing)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        chunks = super().GenerateStream(request, grpc_context)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()
        if grpc_context.code():  # it failed; see `grpc/registration.py` for why there is one more message
            yield inference_pb2.GenerateChunk()


async def _listener_for_proxy(app: FastAPI) -> SocketListener | None:
    listener = SocketListener(app, socket_path(serve.get_replica_context().replica_id.unique_id))
    try:
        await listener.open()
    except OSError as error:
        logger.warning("HTTP comes through Serve, at a higher cost: %r", error)
        return None
    return listener


def gateway_application(
    router: Any,
    tokenizer_dir: str,
    model: ServedModel,
    config: GatewayConfig,
    access: TenantAccess | None = None,
    observability: ObservabilityConfig | None = None,
    directory_name: str | None = None,
    cache: CacheConfig | None = None,
    num_routers: int = 1,
) -> serve.Application:
    """A Serve application of `config.replicas` gateways in front of `router` (a deployment handle or bound deployment).

    access: who may call; None: everybody. observability None: logging stays as configured in the process.
    directory_name, cache, num_routers: see `Gateway`.
    """
    deployment = serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway",
        num_replicas=config.replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=UNAVAILABLE_RETRY_AFTER_S),
        health_check_period_s=1.0,  # a lost gateway is soon replaced
        health_check_timeout_s=10.0,  # a stopped one is replaced after three checks
        graceful_shutdown_wait_loop_s=0.5,  # proxies hear at once that a replica goes
        graceful_shutdown_timeout_s=min(_DRAIN_S, config.request_timeout_s),
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployment.bind(
        router,
        tokenizer_dir,
        model,
        config,
        access=access,
        observability=observability,
        directory_name=directory_name,
        cache=cache,
        num_routers=num_routers,
        metrics_by_node=config.replicas > MOST_ON_PAGE,
    )


def start_proxies(config: GatewayConfig, access: TenantAccess | None = None) -> None:
    """Start Serve with the gateway's ports and gRPC services. Call once, before `serve.run`. access: None: no keys are
    asked for."""
    door = FrontDoor.of(config, access)
    files = {"ssl_keyfile": door.tls.key_file, "ssl_certfile": door.tls.certificate_file}
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(
            host=config.host,
            port=config.http_port,
            **{name: str(file) for name, file in files.items() if file is not None},
        ),
        grpc_options=HostedGrpcOptions(
            front_door=door,
            port=config.grpc_port,
            grpc_servicer_functions=list(SERVICER_FUNCTIONS),
            enable_reflection=config.grpc_reflection,
        ),
    )
