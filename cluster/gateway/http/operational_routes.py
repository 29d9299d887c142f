"""The HTTP routes for operation: probes, version and metrics."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from actors.errors import PacelineError
from cluster.gateway.errors import MetricsElsewhere
from cluster.gateway.http.answers import json_answer
from cluster.gateway.observability.metrics_page import METRICS_TYPE
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig

OPEN_PATHS = frozenset(("/livez", "/readyz", "/health", "/version", "/metrics"))  # for probes and scrapers


def add_operational_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    async def readiness() -> Response:
        try:
            status = await service.recent_status()
        except PacelineError as error:
            return json_answer({"status": "unavailable", "detail": str(error)}, 503)
        return json_answer(
            {"status": "ready" if status.ready else "unavailable", "detail": status.detail},
            200 if status.ready else 503,
        )

    @app.get("/livez", tags=["operation"])
    async def livez() -> Response:
        """503 if the last known status of the router says that its rounds have stopped, which needs a restart."""
        status = service.last_status
        if status is not None and not status.live:
            return json_answer({"status": "stopped", "detail": status.detail}, 503)
        return json_answer({"status": "live"})

    @app.get("/readyz", tags=["operation"])
    async def readyz() -> Response:
        """200 if requests are served, else 503."""
        return await readiness()

    @app.get("/health", tags=["operation"])
    async def health() -> Response:
        """The same as /readyz."""
        return await readiness()

    @app.get("/version", tags=["operation"])
    async def version_of_paceline() -> Response:
        return json_answer({"version": app.version})

    @app.get("/metrics", tags=["operation"])
    async def metrics() -> Response:
        """The metrics of all gateways and routers, in Prometheus text format; 404 where they are not public."""
        if config.metrics_port is not None:
            raise MetricsElsewhere("/metrics is on the port of its own that gateway.metrics_port names")
        if service.has_tenants:
            raise MetricsElsewhere("with tenants /metrics is not on this port; gateway.metrics_port gives it its own")
        return Response(await service.metrics_page.text(), media_type=METRICS_TYPE)
