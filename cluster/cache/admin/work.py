"""Bounded thread pools for the administration server, and request bodies for their threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from actors.errors import InvalidRequest, Overloaded

Result = TypeVar("Result")

_SILENCE_S = 60.0
_END = object()


class Work:
    """A thread pool without a queue, for one event loop: a task beyond `max_threads` is refused."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._num_busy = 0
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix=f"cache-admin-{name}")

    async def run(self, task: Callable[[], Result]) -> Result:
        """Raises Overloaded, and what the task raises. A cancelled caller does not cancel the task."""
        if self._num_busy >= self._max_threads:
            raise Overloaded(f"{self._max_threads} {self._name} are under way", 1.0)
        self._num_busy += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, task)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Waits for running tasks."""
        self._threads.shutdown(wait=True)

    def _done(self, future: asyncio.Future[Result]) -> None:
        self._num_busy -= 1
        if not future.cancelled():
            future.exception()  # retrieved, lest asyncio logs it when the caller is gone


def pulled(source: AsyncIterator[Result], loop: asyncio.AbstractEventLoop) -> Iterator[Result]:
    """Items of an asynchronous source, for a thread, one at a time. Raises InvalidRequest when nothing comes for a
    minute, and what the source raises."""
    while True:
        try:
            item = asyncio.run_coroutine_threadsafe(_next(source), loop).result(_SILENCE_S)
        except TimeoutError:
            raise InvalidRequest("body", "incomplete", f"nothing has come for {_SILENCE_S:.0f} s") from None
        if item is _END:
            return
        yield item  # type: ignore[misc]


def lines(chunks: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Lines of a chunked body. Raises InvalidRequest for a line longer than `max_bytes`."""
    held: list[bytes] = []  # parts of the current line
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            held.append(end)
            _check_size(size + len(end), max_bytes)
            yield b"".join(held)
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        _check_size(size, max_bytes)
    if size:
        yield b"".join(held)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidRequest("body", f"a line of more than {max_bytes} bytes", "write one document a line")


async def _next(source: AsyncIterator[Result]) -> object:
    return await anext(source, _END)
