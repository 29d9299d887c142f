"""Limits of calls that grpc's server does not have: their number, time for the message, and time for reading the
answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from actors.errors import DeadlineExceeded, Overloaded

KEYLESS_CALLS = 100  # of a service that asks for no keys; a stream of one costs its gateway more than its proxy
MESSAGE_WITHIN_S = 60.0
READ_WITHIN_S = 300.0  # each message of an answer; the buffers of connections hold some
_RETRY_AFTER_S = 1.0


class OpenCalls:
    """The number of open calls of a service in a proxy."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises Overloaded."""
        if self._count >= self._most:
            limit = f"there are {self._most} open calls of this service, and more are not taken"
            raise Overloaded(limit, _RETRY_AFTER_S)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


def time_for_message() -> AbstractAsyncContextManager[None]:
    """Raises DeadlineExceeded."""
    return _time_limit(MESSAGE_WITHIN_S, "the message did not come within")


def time_for_reading() -> AbstractAsyncContextManager[None]:
    """Raises DeadlineExceeded."""
    return _time_limit(READ_WITHIN_S, "the client has taken nothing of its answer for")


@asynccontextmanager
async def _time_limit(seconds: float, told: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{told} {seconds:g} s") from None
