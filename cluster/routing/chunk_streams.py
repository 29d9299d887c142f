"""Chunks of answers from routers to gateways: those of a round and a gateway in one message.

A call of Ray Serve for each request begins, ends and cancels an answer, and tells errors. Chunks but the last do not
take that way where the router hears that the gateway listens: through Serve, each costs the router a tenth of a
millisecond. What the messages lose is noticed by the chunks' indices, and the stream goes on as if its router was lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Iterable

from actors.errors import RouterLost
from actors.links.keys import LinkAddress, LinkKeys
from actors.messages import TokenChunk, decode_chunks, encode_chunks
from cluster.routing.publisher import Publisher
from cluster.routing.subscriber import Subscriber

_LATE_S = 2.0  # that chunks may come later than those behind them, which took the other way


class ChunkSender:
    """The router's end: collects what one turn of the event loop emits. A topic is a gateway's name."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._chunks: dict[bytes, list[TokenChunk]] = {}

    def reaches(self, gateway: bytes) -> bool:
        """Whether the gateway listens, as of the last `Publisher.meet`."""
        return bool(gateway) and gateway in self._publisher.subscribers

    def send(self, gateway: bytes, chunk: TokenChunk) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._chunks.setdefault(gateway, []).append(chunk)

    def _flush(self) -> None:
        collected, self._chunks = self._chunks, {}
        for gateway, chunks in collected.items():
            self._publisher.send(gateway, encode_chunks(chunks))


class ChunkReceiver:
    """The gateway's end. Belongs to the event loop it was made in."""

    def __init__(self, keys: LinkKeys) -> None:
        """keys: the cluster's client keys."""
        self.name = b"chunks-" + secrets.token_hex(8).encode()
        self._streams: dict[str, asyncio.Queue[TokenChunk | BaseException]] = {}  # by request id
        self._subscriber = Subscriber(keys, self.name, hear=self._hear)

    def follow(self, addresses: Iterable[LinkAddress]) -> None:
        """See `Subscriber.follow`."""
        self._subscriber.follow(addresses)

    def close(self) -> None:
        self._subscriber.close()

    async def chunks(self, request_id: str, served: AsyncIterable[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of a request in order, whichever way they come. served: those that come through Serve; the last
        chunk always does. Raises what it raises, and RouterLost where a chunk is missing, or where two calls are
        answered: Serve repeats one that it takes for lost, and the chunks of one do not fit between the other's."""
        # Bounded by the answer itself: it has at most max_new_tokens chunks.
        queue = self._streams[request_id] = asyncio.Queue()
        reading = asyncio.create_task(_read(served, queue))
        early: dict[int, TokenChunk] = {}
        index = 0
        attempt: str | None = None
        lost_at: float | None = None  # when the next chunk counts as lost; None: no other one has come before it
        try:
            while True:
                try:
                    async with asyncio.timeout_at(lost_at):
                        item = await queue.get()
                except TimeoutError:
                    raise RouterLost(f"chunk {index} of an answer has been lost") from None
                if isinstance(item, BaseException):
                    raise item
                attempt = item.attempt if attempt is None else attempt
                if item.attempt != attempt:
                    raise RouterLost("a request is answered twice")
                early[item.index] = item
                first = index
                while (chunk := early.pop(index, None)) is not None:
                    index += 1
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                if not early:
                    lost_at = None
                elif lost_at is None or index > first:
                    lost_at = asyncio.get_running_loop().time() + _LATE_S
        finally:
            del self._streams[request_id]
            reading.cancel()

    def _hear(self, data: bytes) -> None:
        for chunk in decode_chunks(data):
            stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put_nowait(chunk)


async def _read(served: AsyncIterable[TokenChunk], queue: asyncio.Queue[TokenChunk | BaseException]) -> None:
    is_whole = False
    try:
        async for chunk in served:
            queue.put_nowait(chunk)
            is_whole = chunk.finish_reason is not None
        if not is_whole:  # chunks before the last one may still be on their way
            queue.put_nowait(RouterLost("the router ended a stream without a finish reason"))
    except (Exception, asyncio.CancelledError) as error:
        queue.put_nowait(error)  # Serve reports a stopped router as a cancellation, too
