"""Restarts an embedded server when it ends."""

from __future__ import annotations

import logging
import time

from cache_service.errors import ServerError
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


class ServerWatch:
    """Restarts a server with the same data, port and password, in a background thread. Close it before the server."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._breaker = CircuitBreaker(max_failures=1)
        self._turns = Turns("cache-server-watch")
        self._turns.add("server", self._look)

    def close(self, timeout_s: float = 30.0) -> bool:
        """End the thread; False if it is still starting a server after `timeout_s`."""
        return self._turns.close(timeout_s)

    def _look(self) -> float:
        if self._server.is_running:
            self._breaker.succeeded()
            return _LOOK_EVERY_S
        log.warning("the cache's server has ended; it is started again")
        try:
            self._server.restart()
        except ServerError as error:
            log.warning("the cache's server cannot be started again for now: %s", error)
        # After a successful restart, too: a server that keeps crashing must not keep the machine busy.
        self._breaker.failed(time.monotonic())
        return max(_LOOK_EVERY_S, self._breaker.wait_s(time.monotonic()))
