"""Frames on a Unix socket between Serve's proxy and a gateway: a length in four bytes, and the payload."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_LENGTH_BYTES = 4
_MAX_HELD_BYTES = 1 << 16  # limit of unconsumed bytes; above it reading pauses


class FrameStream(asyncio.Protocol):
    """One end of a connection, for one reader and one writer."""

    def __init__(self, on_open: Callable[[FrameStream], None] | None = None) -> None:
        self._on_open = on_open
        self._on_lost: Callable[[], object] | None = None
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._frames: deque[bytes] = deque()
        self._held_bytes = 0
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def call_when_lost(self, call: Callable[[], object]) -> None:
        self._on_lost = call

    async def frame(self) -> bytes:
        """The next one. Raises ConnectionResetError when the connection is lost, or what `fail` was given."""
        await self._wait_for_frames()
        frame = self._frames.popleft()
        self._let_go(_LENGTH_BYTES + len(frame))
        return frame

    async def frames(self) -> list[bytes]:
        """All that have come, at least one. Raises what `frame` does."""
        await self._wait_for_frames()
        frames = list(self._frames)
        self._frames.clear()
        self._let_go(self._held_bytes)
        return frames

    async def lost(self) -> None:
        """Returns when the connection is lost; what comes until then is dropped."""
        try:
            while True:
                await self.frames()
        except ConnectionResetError:
            return

    async def send(self, frame: bytes) -> None:
        """Returns when there is room for more. Raises what `frame` does."""
        if self._error is not None:
            raise self._error
        assert self._transport is not None
        self._transport.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)
        if not self._room.is_set():
            await self._room.wait()
            if self._error is not None:
                raise self._error

    def fail(self, error: BaseException) -> None:
        """Ends the connection; reader and writer of this end raise the error at once."""
        self._end(error)
        self._frames.clear()
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Sends what is left and ends the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        rest, at = self._rest, 0
        rest += data
        while len(rest) >= (begin := at + _LENGTH_BYTES):
            end = begin + int.from_bytes(rest[at:begin])
            if end > len(rest):
                break
            self._frames.append(bytes(rest[begin:end]))
            self._held_bytes += end - at
            at = end
        del rest[:at]
        self._news.set()
        if self._held_bytes > _MAX_HELD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionResetError("the other end is gone"))
        if self._on_lost is not None:
            self._on_lost()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def _let_go(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        if self._held_bytes <= _MAX_HELD_BYTES and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._news.set()
        self._room.set()

    async def _wait_for_frames(self) -> None:
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
