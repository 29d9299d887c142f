"""Streams of answers: several as one, in portions that do not mirror the rounds that made them, and padded.

A round emits its accepted draft tokens and one more. Tokens per unshaped chunk, or only bytes, therefore reveal to an
observer which drafts were accepted (Zhang et al., "When Speculation Spills Secrets", 2024). Chunks of a fixed number of
tokens hide the sizes of rounds; a fixed cadence hides when rounds ended. Both together make a stream of constant rate,
as long as the answer is generated faster than that. The field `obfuscation`, as in OpenAI's API, pads messages to a few
sizes. None of this changes the text.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from cluster.gateway.answers.piece import Piece, joined
from cluster.gateway.paceline.v1.inference_pb2 import GenerateChunk
from cluster.gateway_config import GatewayConfig

_INTERVAL_S = 0.1  # default where there are tenants


@dataclass(frozen=True, slots=True)
class StreamShape:
    """interval_s: between chunks of an answer, 0: as they come. num_tokens: of a chunk but the last, 0: as many as
    there are. pads: whether chunks are padded to a few sizes."""

    interval_s: float = 0.0
    num_tokens: int = 0
    pads: bool = False


AS_IT_COMES = StreamShape()


def stream_shape(config: GatewayConfig, has_tenants: bool, wants_padding: bool | None) -> StreamShape:
    """wants_padding: as in the request."""
    interval_s = _INTERVAL_S if has_tenants else 0.0
    if config.stream_interval_ms is not None:
        interval_s = config.stream_interval_ms / 1000
    pads = has_tenants if config.stream_obfuscation is None else config.stream_obfuscation
    return StreamShape(interval_s, config.stream_tokens, pads if wants_padding is None else wants_padding)


async def shaped(pieces: AsyncGenerator[Piece, None], shape: StreamShape) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer in other portions, the first as soon as it is there. With `shape.num_tokens` no piece
    that comes in may have more than one token. An error comes behind the text that came before it."""
    held = _Held(shape.num_tokens)
    async with aclosing(pieces):
        if shape.interval_s:
            portions = _at_cadence(pieces, held, shape.interval_s)
        else:
            portions = _as_they_fill(pieces, held)
        async with aclosing(portions):
            async for piece in portions:
                if piece.text or piece.token_ids or piece.scores or piece.finish_reason is not None:
                    yield piece


async def _as_they_fill(pieces: AsyncGenerator[Piece, None], held: _Held) -> AsyncGenerator[Piece, None]:
    try:
        async for piece in pieces:
            held.add(piece)
            while (portion := held.take()) is not None:
                yield portion
    except Exception:
        if (rest := held.take_all()) is not None:
            yield rest
        raise


async def _at_cadence(
    pieces: AsyncGenerator[Piece, None], held: _Held, interval_s: float
) -> AsyncGenerator[Piece, None]:
    """At multiples of the interval after the first piece, while there is something to be sent."""
    clock = asyncio.get_running_loop().time
    news = asyncio.Event()
    errors: list[Exception] = []

    async def read() -> None:
        try:
            async for piece in pieces:
                held.add(piece)
                news.set()
        except Exception as error:
            errors.append(error)
            news.set()

    reader = asyncio.create_task(read())
    try:
        started = 0.0
        tick = -1  # the last one at which something was sent
        while not held.is_over:
            if not held.is_ready and not errors:
                news.clear()
                await news.wait()
                continue
            if tick < 0:
                started = clock()
                tick = 0
            else:
                tick = max(tick + 1, math.ceil((clock() - started) / interval_s))
                await asyncio.sleep(started + tick * interval_s - clock())
            portion = held.take_all() if errors else held.take()
            if portion is not None:
                yield portion
            if errors:
                raise errors[0]
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class _Held:
    """Text of an answer that has come and was not sent."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: of a portion; 0: as many as there are."""
        self._num_tokens = num_tokens
        self._pieces: deque[Piece] = deque()
        self._has_end = False
        self.is_over = False  # the last portion was taken

    @property
    def is_ready(self) -> bool:
        return bool(self._pieces) and (self._has_end or len(self._pieces) >= max(1, self._num_tokens))

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._has_end |= piece.finish_reason is not None

    def take(self) -> Piece | None:
        return self._take(self._num_tokens or len(self._pieces)) if self.is_ready else None

    def take_all(self) -> Piece | None:
        return self._take(len(self._pieces)) if self._pieces else None

    def _take(self, count: int) -> Piece:
        parts = [self._pieces.popleft() for _ in range(min(count, len(self._pieces)))]
        self.is_over = parts[-1].finish_reason is not None
        return joined(parts)


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


# Whatever a chunk says, its size is one of these, or a multiple of the last.
SIZES = tuple(512 << doublings for doublings in range(8))


def padded_size(size: int) -> int:
    """The least of the sizes that has room for so many bytes."""
    for allowed in SIZES:
        if size <= allowed:
            return allowed
    return -(-size // SIZES[-1]) * SIZES[-1]


def obfuscation(length: int) -> str:
    """Random ASCII characters, which no compression on the way takes out again, and no encoding makes longer."""
    return secrets.token_urlsafe(length)[:length]


def pad(chunk: GenerateChunk) -> None:
    """Set a message's `obfuscation` so that it has one of the sizes."""
    size = chunk.ByteSize()
    at_least = size + 3
    while True:
        target = padded_size(at_least)
        for header in (2, 3, 4):  # bytes of the field before its characters: its number, and their count
            length = target - size - header
            if length > 0 and header == 1 + _varint_size(length):
                chunk.obfuscation = obfuscation(length)
                return
        at_least = target + 1


def _varint_size(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def padded_json(encoded: bytes) -> bytes:
    """A JSON object with one member more, `obfuscation`, which fills it up to one of the sizes."""
    begin, end = encoded[:-1] + b',"obfuscation":"', b'"}'
    size = len(begin) + len(end)
    return begin + obfuscation(padded_size(size) - size).encode() + end
