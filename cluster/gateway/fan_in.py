"""Several async streams as one, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")

_MAX_QUEUED = 64  # a full queue blocks the streams: they are as slow as their reader


async def fan_in(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items of all streams; the first error ends it. Closing it closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for one in only:
                yield one
        return
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(_MAX_QUEUED)

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:  # a task cancelled before its first step never came to close its stream
            await stream.aclose()
