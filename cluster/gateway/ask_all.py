"""One question to all replicas of a Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from actors.errors import Unavailable

_STRAGGLERS_S = 0.5  # that the others have once one answer suffices


async def ask_all(
    handle: Any, method: str, timeout_s: float, suffices: Callable[[Any], bool] = lambda answer: True
) -> list[Any]:
    """The answers that came in time, in no order: one replica that hangs or is gone keeps no other from answering. Once
    an answer `suffices`, the others have little time left.

    Raises what Serve raises where no replica is there, and the error of one of them where none has answered but with
    errors.
    """
    # `results_async` would wait for all or drop all.
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
    return answers


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """Serve tells the end of a replica as a cancellation, too."""
    return Unavailable("the replica stopped") if task.cancelled() else task.exception()
