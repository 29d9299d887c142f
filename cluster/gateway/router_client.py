"""The gateway's client of routers, over a Serve deployment handle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import msgspec
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from actors.errors import Overloaded, PacelineError, RouterLost, Unavailable
from actors.links.keys import LinkAddress, LinkKeys
from actors.messages import GenerationRequest, TokenChunk
from cluster.gateway.errors import unwrap
from cluster.gateway.observability.metrics import merged, missing_text
from cluster.node_metrics import MOST_ON_PAGE
from cluster.routing.chunk_streams import ChunkReceiver
from cluster.routing.heard_statuses import HeardStatuses
from cluster.routing.router_status import RouterStatus

logger = logging.getLogger(__name__)

_BACKPRESSURE_RETRY_S = 1.0
_ALL_ASKED_S = 60.0  # between questions to all of many routers
_FORGOTTEN_S = 3 * _ALL_ASKED_S  # a router without a status for this time is dropped


class RouterClient:
    """All routers as if they were one. Calls a Serve deployment with `generate` (an async generator), `status` and
    `own_metrics`. Serve chooses one replica for `generate`; the others go to all.

    Routers of the last `status` send chunks over direct links instead of through Serve: see
    `cluster.routing.chunk_streams`.
    """

    def __init__(
        self,
        handle: Any,
        status_timeout_s: float = 5.0,
        client_keys: Callable[[], Awaitable[LinkKeys]] | None = None,
        num_routers: int = 1,
        heard: HeardStatuses | None = None,
    ) -> None:
        """client_keys: of the cluster; None: all chunks come through Serve. num_routers: at most; of many, most are not
        asked for their status. heard: statuses that routers tell unasked; None: they are asked."""
        self._pushed = heard
        self._num_routers = num_routers
        self._num_serving = num_routers  # as of the last status of all; those that did not answer count
        self._all_asked_at = -math.inf
        self._client_keys = client_keys
        self._receiver: ChunkReceiver | None = None
        self._opening: asyncio.Task[None] | None = None
        # Routers by id, and when they last said how they are, the last of them last.
        self._heard: dict[str, tuple[LinkAddress, float]] = {}
        # Serve's gRPC transport carries twice as many chunks a second as a stream of Ray objects.
        # What it carries is of modules that both ends have, and needs no cloudpickle.
        plain = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._generate = handle.options(stream=True, method_name="generate", _by_reference=False, **plain)
        self._handle = handle
        self._status_timeout_s = status_timeout_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks in order, the last one with a finish reason. Closing the iterator cancels the sequence.

        Raises InvalidRequest, Overloaded, Unavailable or DeadlineExceeded. After an Overloaded with a `router_id`, ask
        again with that refusal.
        """
        receiver = self._receiver
        request = msgspec.structs.replace(
            request,
            asks_another=self._num_serving > 1 and request.refusal is None,
            gateway=b"" if receiver is None else receiver.name,
        )
        response = self._generate.remote(request)
        finished = False
        try:
            chunks = _all_of(response) if receiver is None else receiver.chunks(request.request_id, response)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    finished = chunk.finish_reason is not None
                    yield chunk
        except (Exception, asyncio.CancelledError) as error:
            raise _translated(error) from None
        finally:
            if not finished:
                with contextlib.suppress(Exception):  # a refused call raises its refusal again
                    response.cancel()

    async def status(self) -> RouterStatus:
        """As routers have told it unasked. While one of them is not heard, they are asked: of many, one at a time, and
        all once a minute. Raises Unavailable when no router answers."""
        pushed = self._pushed
        if pushed is not None and (heard := pushed.current(time.monotonic())) is not None:
            self._num_serving = sum(status.ready for status in heard)
            self._listen_to(pushed.addresses)
            return status_of_all(heard)
        if self._num_routers > MOST_ON_PAGE and time.monotonic() - self._all_asked_at < _ALL_ASKED_S:
            try:
                async with asyncio.timeout(self._status_timeout_s):
                    status: RouterStatus = await self._handle.options(method_name="status").remote()
                if status.ready:  # Serve asks one that is
                    self._listen_to(_addresses([status]))
                    return status
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(cause := _translated(error), asyncio.CancelledError):  # not the router's: the caller's
                    raise cause from None
        # A standby router answers at once, while an active one may be busy with a round.
        statuses, missing = await self._ask_all("status", lambda status: status.ready)
        self._num_serving = sum(status.ready for status in statuses) + missing
        self._all_asked_at = time.monotonic()
        self._listen_to(_addresses(statuses))
        return status_of_all(statuses)

    def _listen_to(self, addresses: Mapping[str, LinkAddress]) -> None:
        """addresses: by router id. Those of before are not forgotten at once: a router that is busy is left out of the
        statuses now and then, and one that drains is not listed by Serve, but still has answers to finish."""
        now = time.monotonic()
        others = {
            router_id: heard
            for router_id, heard in self._heard.items()
            if router_id not in addresses and now - heard[1] < _FORGOTTEN_S
        }
        self._heard = others | {router_id: (address, now) for router_id, address in addresses.items()}
        if self._client_keys is None:
            return
        if self._receiver is not None:
            self._receiver.follow(address for address, _ in self._heard.values())
        elif self._opening is None or self._opening.done():  # probes do not wait for the directory
            self._opening = asyncio.create_task(self._open_receiver(self._client_keys))

    async def _open_receiver(self, client_keys: Callable[[], Awaitable[LinkKeys]]) -> None:
        try:
            self._receiver = ChunkReceiver(await client_keys())
        except Exception as error:
            logger.warning("chunks come through Serve: %r", error)

    async def metrics_text(self) -> str:
        """The routers' metrics in Prometheus text format; of many, how many there may be. Raises Unavailable when no
        router answers."""
        if self._num_routers > MOST_ON_PAGE:
            return missing_text("routers", self._num_routers)
        pages, missing = await self._ask_all("own_metrics", lambda page: bool(page[1]))
        return merged("router", dict(pages)) + missing_text("routers", missing)

    async def _ask_all(self, method: str, suffices: Callable[[Any], bool]) -> tuple[list[Any], int]:
        try:
            answers, missing = await ask_all(self._handle, method, self._status_timeout_s, suffices)
        except TimeoutError:
            answers, missing = [], 0
        except (Exception, asyncio.CancelledError) as error:
            raise _translated(error, gone="no router is running: it is starting, or it has ended") from None
        if not answers:
            raise RouterLost(f"no router answered within {self._status_timeout_s:g} s")
        return answers, missing


def _addresses(statuses: Iterable[RouterStatus]) -> dict[str, LinkAddress]:
    return dict(status.told_by for status in statuses if status.told_by is not None)


async def _all_of(response: AsyncIterable[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    async for chunk in response:
        yield chunk


def status_of_all(statuses: Sequence[RouterStatus]) -> RouterStatus:
    """Status of one or more routers together: ready if one is ready, live if one is live."""
    if len(statuses) == 1:
        return statuses[0]
    ready = [status for status in statuses if status.ready]
    limits = [status.max_model_len for status in ready or statuses if status.max_model_len is not None]
    return RouterStatus(
        ready=bool(ready),
        live=any(status.live for status in statuses),
        detail=f"{len(ready)} of {len(statuses)} routers ready: "
        + "; ".join(sorted({status.detail for status in statuses})),
        max_model_len=min(limits, default=None),
    )


def _translated(error: BaseException, gone: str = "the router is gone") -> BaseException:
    """Ray's and Serve's errors as Paceline's."""
    cause = unwrap(error)
    if isinstance(cause, PacelineError):
        return cause
    if isinstance(cause, BackPressureError):
        return Overloaded("the router's queue is full", _BACKPRESSURE_RETRY_S)
    if isinstance(cause, (RayActorError, DeploymentUnavailableError, grpc.aio.AioRpcError)):
        return RouterLost(gone)
    if isinstance(cause, asyncio.CancelledError):
        task = asyncio.current_task()
        # Serve also reports a stopped router as a cancellation; a cancellation of ours shows in the task.
        if task is not None and task.cancelling() == 0:
            return RouterLost("the router stopped")
    return cause


_STRAGGLERS_S = 0.5  # time limit for the others once one answer suffices


async def ask_all(
    handle: Any, method: str, timeout_s: float, suffices: Callable[[Any], bool] = lambda answer: True
) -> tuple[list[Any], int]:
    """Answers of all replicas that come in time, in any order, and how many did not answer. Once an answer `suffices`,
    the wait is cut short.

    Raises Serve's error if there is no replica, and a replica's error if there are errors and no answer.
    """
    # `results_async` would wait for all replicas or lose all answers.
    async with asyncio.timeout(timeout_s):
        asked = await handle.broadcast(method)._fetch_replica_results_async()
    tasks = {asyncio.ensure_future(one.get_async()) for one in asked}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    waiting, done = tasks, set[asyncio.Future[Any]]()
    try:
        while waiting and (left_s := deadline - loop.time()) > 0:
            finished, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            done |= finished
            if any(_error_of(task) is None and suffices(task.result()) for task in finished):
                deadline = min(deadline, loop.time() + _STRAGGLERS_S)
    finally:
        for task in waiting:
            task.cancel()
    errors = [error for task in done if (error := _error_of(task)) is not None]
    answers = [task.result() for task in done if _error_of(task) is None]
    if errors and not answers:
        raise errors[0]
    return answers, len(tasks) - len(answers)


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Serve reports a stopped replica as a cancellation, too."""
    return Unavailable("the replica stopped") if task.cancelled() else task.exception()
