"""How the gateway reaches a router: a protocol, and the implementation over a Serve deployment handle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import grpc
import msgspec
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import Overloaded, PacelineError
from actors.messages import GenerationRequest, TokenChunk
from cluster.gateway.errors import RouterLost, unwrap

_BACKPRESSURE_RETRY_S = 1.0


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool  # takes requests
    live: bool  # false: only a restart helps
    detail: str = ""  # for people
    max_model_len: int | None = None  # tokens, prompt and answer together; None: not known yet


class RouterClient(Protocol):
    """What the gateway needs of a router."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks in order, the last one with a finish reason. Closing the iterator cancels the sequence.

        Raises InvalidRequest, Overloaded, Unavailable or DeadlineExceeded.
        """
        ...

    async def status(self) -> RouterStatus:
        """Raises Unavailable when no router answers."""
        ...

    async def metrics_text(self) -> str:
        """The router's metrics in Prometheus text format. Raises Unavailable when no router answers."""
        ...


class HandleRouterClient:
    """Calls a Serve deployment that has `generate` (an async generator), `status` and `metrics_text`."""

    def __init__(self, handle: Any, status_timeout_s: float = 5.0) -> None:
        # Serve's gRPC transport: a stream of Ray objects carries half as many chunks a second.
        self._generate = handle.options(stream=True, method_name="generate", _by_reference=False)
        self._status = handle.options(method_name="status")
        self._metrics_text = handle.options(method_name="metrics_text")
        self._status_timeout_s = status_timeout_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        response = self._generate.remote(request)
        finished = False
        try:
            async for chunk in response:
                finished = chunk.finish_reason is not None
                yield chunk
        except (Exception, asyncio.CancelledError) as error:
            raise _translated(error) from None
        finally:
            if not finished:
                with contextlib.suppress(Exception):  # a call that was refused raises its refusal once more
                    response.cancel()

    async def status(self) -> RouterStatus:
        answer: RouterStatus = await self._ask(self._status)
        return answer

    async def metrics_text(self) -> str:
        answer: str = await self._ask(self._metrics_text)
        return answer

    async def _ask(self, method: Any) -> Any:
        response = method.remote()
        try:
            async with asyncio.timeout(self._status_timeout_s):
                return await response
        except TimeoutError:
            response.cancel()
            raise RouterLost(f"no router answered within {self._status_timeout_s:g} s") from None
        except (Exception, asyncio.CancelledError) as error:
            raise _translated(error) from None


def _translated(error: BaseException) -> BaseException:
    """Ray's and Serve's errors in Paceline's words."""
    cause = unwrap(error)
    if isinstance(cause, PacelineError):
        return cause
    if isinstance(cause, BackPressureError):
        return Overloaded("the router's queue is full", _BACKPRESSURE_RETRY_S)
    if isinstance(cause, (RayActorError, DeploymentUnavailableError, grpc.aio.AioRpcError)):
        return RouterLost("the router is gone")
    if isinstance(cause, asyncio.CancelledError):
        task = asyncio.current_task()
        # Serve also reports the router's own end as a cancellation; ours shows in the task.
        if task is not None and task.cancelling() == 0:
            return RouterLost("the router stopped")
    return cause
