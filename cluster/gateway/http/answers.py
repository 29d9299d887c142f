"""Common part of all routes that generate: waits for an answer as long as the client does, and sends it whole or as
events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.errors import InvalidRequest
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.service import GenerationService

Result = TypeVar("Result")

TIMEOUT_HEADER = "x-request-timeout-seconds"


class EventStream(StreamingResponse):
    """Server-sent events that close their source however they end, which cancels the sequence at the router."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


def json_answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def collect(service: GenerationService, prepared: PreparedCall) -> list[Piece]:
    async with aclosing(service.stream(prepared)) as pieces:
        return [piece async for piece in pieces]


async def first_piece(pieces: AsyncGenerator[Piece, None]) -> Piece:
    try:
        return await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work; cancel it and raise ClientDisconnect when the client disconnects."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def timeout_s(request: Request) -> float | None:
    """The client's limit less a margin, since Serve's proxy starts its clock earlier and answers in plain text."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidRequest(TIMEOUT_HEADER, text[:32], "it must be a number of seconds above 0")
    return seconds - min(0.1, seconds / 10)
