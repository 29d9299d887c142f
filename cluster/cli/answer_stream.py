"""Reads answers of a server with OpenAI's HTTP API: chunks of a stream, and errors.

A stream is server-sent events of one line of JSON each. Lines end at line feeds alone: inside JSON, U+2028, U+2029 and
U+0085 may stand as they are, so a reader that splits text at every line break of Unicode loses the answers with them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from typing import Annotated

import msgspec

from actors.errors import Unavailable
from actors.printable import printable

_DATA_FIELD = b"data:"
_END = b"[DONE]"
_MAX_ERROR_CHARS = 300

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class ServerError(msgspec.Struct):
    message: str


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None  # in completions
    delta: Delta | None = None  # in chats
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Speculation(msgspec.Struct):
    rounds: Count = 0
    draft_tokens: Count = 0
    accepted_tokens: dict[str, Count] = {}  # by source


class StreamEvent(msgspec.Struct):
    """One chunk. Fields that are not listed are left alone."""

    choices: list[Choice] = []
    usage: Usage | None = None
    speculation: Speculation | None = None
    error: ServerError | str | None = None


class _ErrorBody(msgspec.Struct):
    error: ServerError | str


_event_decoder = msgspec.json.Decoder(StreamEvent)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


def read_events(chunks: Iterable[bytes]) -> Iterator[StreamEvent]:
    """Events of a response's bytes, however they are cut, up to its `[DONE]`. Raises Unavailable for what is none."""
    lines = _DataLines()
    for chunk in chunks:
        yield from lines.push(chunk)
        if lines.have_ended:
            return
    yield from lines.close()


async def read_events_async(chunks: AsyncIterable[bytes]) -> AsyncGenerator[StreamEvent, None]:
    """The same of bytes that are awaited."""
    lines = _DataLines()
    async for chunk in chunks:
        for event in lines.push(chunk):
            yield event
        if lines.have_ended:
            return
    for event in lines.close():
        yield event


def message_of_refusal(body: bytes) -> str:
    """Text for a terminal from the body of a failed answer: its error message, or the beginning of the body."""
    try:
        return message_of(_error_decoder.decode(body).error)
    except (ValueError, RecursionError):
        return printable(body.decode(errors="replace")[:_MAX_ERROR_CHARS])


def message_of(error: ServerError | str) -> str:
    """For a terminal."""
    return printable((error.message if isinstance(error, ServerError) else error)[:_MAX_ERROR_CHARS])


class _DataLines:
    """Takes bytes and gives the events after `data:` in the lines that have come to their end, one by one."""

    def __init__(self) -> None:
        self.have_ended = False  # by `[DONE]`
        self._rest = b""

    def push(self, chunk: bytes) -> Iterator[StreamEvent]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(_DATA_FIELD):
                data = line.removeprefix(_DATA_FIELD).strip()
                if data == _END:
                    self.have_ended = True
                    return
                yield _decode(data)

    def close(self) -> Iterator[StreamEvent]:
        """The last line, which may lack its end."""
        return self.push(b"\n")


def _decode(data: bytes) -> StreamEvent:
    try:
        return _event_decoder.decode(data)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's own errors, and bytes that are no UTF-8
        raise Unavailable(f"the stream held what is not a chunk: {printable(str(error))}") from None
