"""Answers that are items or blocks, each built by typed events: whole, or as a stream of the events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from actors.errors import PacelineError
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.streams import padded_json
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.errors import ErrorStatus, status_of
from cluster.gateway.http.answers import EventStream, collect, first_piece, json_answer, unless_disconnected
from cluster.gateway.service import GenerationService

WrittenEvent = dict[str, Any]  # its `type` names it


class EventWriter(Protocol):
    """Writes one answer: events of `begin`, of `take` for each piece, then of `end` or `fail`."""

    @property
    def reasoning_text(self) -> str: ...

    @property
    def answer(self) -> dict[str, Any]:
        """The whole answer, after `end`."""
        ...

    def begin(self) -> list[WrittenEvent]: ...

    def take(self, piece: Piece) -> list[WrittenEvent]: ...

    def end(self, num_reasoning_tokens: int) -> list[WrittenEvent]: ...

    def fail(self, error: ErrorStatus) -> list[WrittenEvent]: ...


async def answer_with_events(
    request: Request,
    service: GenerationService,
    prepared: PreparedCall,
    writer: EventWriter,
    *,
    streams: bool,
    last_line: bytes = b"",
) -> Response:
    """last_line: of a stream that did not fail. Raises PacelineError or ClientDisconnect before the answer begins."""
    try:
        if not streams:
            for piece in await unless_disconnected(request, collect(service, prepared)):
                writer.take(piece)
            writer.end(await _num_tokens(service, writer.reasoning_text))
            return json_answer(writer.answer)
        pieces = service.stream(prepared, prepared.stream_shape)
        # Await the first piece before the status line, so that a full queue is a 429 and not a broken stream.
        first = await unless_disconnected(request, first_piece(pieces))
    except (PacelineError, ClientDisconnect):
        raise
    except Exception as error:  # the service has logged it
        return error_answer(status_of(error))
    pads = prepared.stream_shape.pads
    return EventStream(_stream(service, first, pieces, writer, pads=pads, last_line=last_line))


async def _stream(
    service: GenerationService,
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
    writer: EventWriter,
    *,
    pads: bool,
    last_line: bytes,
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        try:
            yield _encode(writer.begin() + writer.take(first), pads)
            async for piece in pieces:
                yield _encode(writer.take(piece), pads)
            num_reasoning = await _num_tokens(service, writer.reasoning_text)
        except Exception as error:
            yield _encode(writer.fail(status_of(error)), pads)
            return
        yield _encode(writer.end(num_reasoning), pads) + last_line


async def _num_tokens(service: GenerationService, text: str) -> int:
    """Tokens of a thought, as the tokenizer writes it: it has no marks, and how it came does not matter."""
    return len(await service.codec.encode_text(text)) if text else 0


def _encode(events: list[WrittenEvent], pads: bool) -> bytes:
    return b"".join(map(_pads if pads else _plain, events))


def _plain(event: WrittenEvent) -> bytes:
    return _lines(event, msgspec.json.encode(event))


def _pads(event: WrittenEvent) -> bytes:
    return _lines(event, padded_json(msgspec.json.encode(event)))


def _lines(event: WrittenEvent, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), data)
