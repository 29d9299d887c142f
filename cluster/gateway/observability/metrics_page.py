"""What /metrics shows, and a listener that serves nothing else.

Counters that are read while a tenant's answer is generated tell how many tokens each round accepted, and so what is
being said. So with tenants the page is a snapshot, and not on the port that tenants reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.errors import InvalidRequest
from cluster.gateway.door.hosts import HostRequired, allowed_hosts
from cluster.gateway.door.http_limits import LimitedHttpProtocol
from cluster.gateway_config import GatewayConfig

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TENANTS_INTERVAL_S = 15.0  # default where there are tenants
_STARTED_PERIOD_S = 0.01  # between looks at whether uvicorn listens


class MetricsPage:
    """The current metrics, or a snapshot of them, taken at most once an interval."""

    def __init__(
        self,
        current: Callable[[], Awaitable[str]],
        interval_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """interval_s: 0 for a page that is always current; it may change, as tenants may come."""
        self._current = current
        self._interval_s = interval_s
        self._clock = clock
        self._snapshot = ""
        self._period: tuple[float, int] | None = None  # interval, and number of the period that the snapshot is from
        self._taking = asyncio.Lock()

    async def text(self) -> str:
        interval_s = self._interval_s()
        if not interval_s:
            return await self._current()
        period = interval_s, int(self._clock() // interval_s)
        async with self._taking:
            if self._period != period:
                self._snapshot, self._period = await self._current(), period
            return self._snapshot


@contextlib.asynccontextmanager
async def metrics_listener(config: GatewayConfig, page: MetricsPage) -> AsyncIterator[None]:
    """Serves `page` at /metrics of `gateway.metrics_port`, which all gateways of a machine share: any of them answers
    for all. Does nothing without a port. Raises InvalidRequest if it cannot be listened on."""
    if config.metrics_port is None:
        yield
        return

    async def metrics(_: Request) -> Response:
        return Response(await page.text(), media_type=METRICS_TYPE)

    listener = _listening_socket(config.metrics_host, config.metrics_port)
    app = HostRequired(Starlette(routes=[Route("/metrics", metrics)]), allowed_hosts(None, config.metrics_host))
    server = uvicorn.Server(
        uvicorn.Config(app, http=LimitedHttpProtocol, lifespan="off", access_log=False, log_config=None)
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or running.done()):  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(_STARTED_PERIOD_S)
        yield
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await running


def _listening_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidRequest("gateway.metrics_port", port, f"cannot listen on {host}: {error.strerror}") from None
    return listener
