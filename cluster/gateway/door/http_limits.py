"""Limits of HTTP connections that uvicorn does not have: their number, the size and number of headers, and time for
headers, for the body and for reading the answer.

A violation, or input that is not HTTP, is answered with an error object, and the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.gateway.door.refusals import count_refusal
from cluster.gateway.errors import ErrorStatus

MAX_CONNECTIONS = 500  # of a listener; each may hold MAX_HEADER_BYTES
MAX_HEADER_BYTES = 64 * 1024  # request line and headers
MAX_HEADERS = 100
HEADERS_WITHIN_S = 10.0
BODY_PERIOD_S = 10.0
MIN_BODY_BYTES = 1024  # in each such period, or the rest
# An unread answer would stay in memory forever. The system's buffers of a connection, some megabytes, are refilled in
# large portions, so a much shorter period would also disconnect slow readers.
READ_PERIOD_S = 300.0
MIN_READ_BYTES = 16 * 1024  # of an answer in each such period, or the rest, once those buffers are full
_LINGER_S = 1.0  # after a refusal; what comes is dropped
# Bytes of a body that are read after its answer: a client that still sends might not see the answer otherwise.
_MAX_DROPPED_BYTES = 16 * 1024 * 1024
_RETRY_AFTER_S = 1.0
_FRAMING = 8  # bytes of chunked framing that a byte of body may have: chunks of one byte have 6


class _Refused(Exception):
    """Ends the parsing of a message; `_refusal` says why."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """Serve's proxies and the listener of metrics use it: see `front_door`."""

    max_connections = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()  # for a request, or for the rest of one
        self._fed = 0  # bytes of the message that is being read
        self._header_bytes = 0
        self._body_bytes = 0
        self._body_seen = 0  # the part of it seen at the last check
        self._in_headers = True
        self._has_begun = False  # the message; a line break before it is no part of it
        self._refusal: ErrorStatus | None = None
        self._is_refused = False
        certificate = transport.get_extra_info("peercert")
        self._has_client_certificate = bool(certificate)
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None  # while the client is behind with its answer
        self._unread_bytes = 0  # at the last look
        self._start_timer(HEADERS_WITHIN_S, self._headers_are_late)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_headers and self._timer is None and self._is_answered:  # a further request begins
            self._start_timer(HEADERS_WITHIN_S, self._headers_are_late)
        self._fed += len(data)
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        # What the parser holds of a header or of chunked framing that does not end.
        if self._in_headers and self._fed > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large(f"headers of more than {MAX_HEADER_BYTES} bytes"))
        elif not self._in_headers and self._fed - self._body_bytes > 2 * MAX_HEADER_BYTES + _FRAMING * self._body_bytes:
            self._refuse(_status(400, "invalid_http", "the framing of the body is longer than the body"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(READ_PERIOD_S, self._look_at_reading)

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._body_bytes = self._body_seen = 0
        self._in_headers = self._has_begun = True
        if self._has_client_certificate:
            self.scope["state"]["has_client_certificate"] = True

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = _headers_too_large(f"more than {MAX_HEADERS} headers")
            raise _Refused

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (self._get_upgrade() == b"websocket" or _has_body(self.headers)):
            # Other upgrades are ignored, as HTTP allows. The parser loses their bodies.
            message = "the connection cannot be upgraded; send the request without the header Upgrade"
            self._refusal = _status(400, "upgrade_not_supported", message)
            raise _Refused
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()
        self._start_timer(BODY_PERIOD_S, self._look_at_body)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)
        if self._is_answered and self._body_bytes > _MAX_DROPPED_BYTES:
            self.transport.close()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_headers = True
        self._has_begun = False
        self._fed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since = self.loop.time()
        if self._in_headers and self._fed and self._is_answered and self._timer is None:  # the next request has begun
            self._start_timer(HEADERS_WITHIN_S, self._headers_are_late)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or _status(400, "invalid_http", "what came is not HTTP"))

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = _headers_too_large(f"headers of more than {MAX_HEADER_BYTES} bytes")
            raise _Refused

    @property
    def _is_answered(self) -> bool:
        """Whether all requests so far are."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for its client, first those that wait for headers; this
        one, if all others are being answered."""
        open_ones = [
            one
            for one in self.connections
            if isinstance(one, LimitedHttpProtocol) and one is not self and not one.transport.is_closing()
        ]
        if len(open_ones) < self.max_connections:
            return
        waiting = [one for one in open_ones if one._is_waiting]
        first = min(waiting, key=lambda one: (not one._in_headers, one._waits_since), default=self)
        if first is self or first._has_begun:
            first._refuse(_too_many_connections(self.max_connections), lingers=False)
        else:
            first.transport.close()

    @property
    def _is_waiting(self) -> bool:
        """Whether there is no whole request that is not answered."""
        return self._is_answered or not self._in_headers

    def _headers_are_late(self) -> None:
        self._timer = None
        if self._has_begun:
            message = f"the headers did not come within {HEADERS_WITHIN_S:g} s"
            self._refuse(_status(408, "request_timeout", message))
        else:
            self.transport.close()

    def _look_at_body(self) -> None:
        came = self._body_bytes - self._body_seen
        self._body_seen = self._body_bytes
        if came >= MIN_BODY_BYTES or self.flow.read_paused:  # paused: the client cannot send
            self._start_timer(BODY_PERIOD_S, self._look_at_body)
            return
        self._timer = None
        message = f"less than {MIN_BODY_BYTES} bytes of the body came within {BODY_PERIOD_S:g} s"
        self._refuse(_status(408, "request_timeout", message))

    def _refuse(self, status: ErrorStatus, lingers: bool = True) -> None:
        """Answer for the application, unless it has begun to, and end the connection. lingers: so that a client that
        still sends sees the answer."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        count_refusal(status.code)
        is_answering = not self._is_answered
        if is_answering:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False  # else that would be written after the end
            self.cycle.message_event.set()
        if not (is_answering and self.cycle.response_started):
            body = msgspec.json.encode(status.body())
            headers = status.headers() | {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[status.http] + lines.encode() + b"\r\n" + body)
        if lingers and self.transport.can_write_eof():
            # A close while more is coming would reset the connection, and the client would lose the answer.
            self.transport.write_eof()
            self.flow.resume_reading()
            self._start_timer(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _start_timer(self, seconds: float, call: Callable[[], Any]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._unread_bytes - unread < MIN_READ_BYTES:
            self._reading_timer = None
            self.transport.abort()
            return
        self._unread_bytes = unread
        self._reading_timer = self.loop.call_later(READ_PERIOD_S, self._look_at_reading)

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def _headers_too_large(what: str) -> ErrorStatus:
    limit = f"at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes are read"
    return _status(431, "headers_too_large", f"the request has {what}; {limit}")


def _too_many_connections(most: int) -> ErrorStatus:
    return ErrorStatus(
        http=503,
        grpc=grpc.StatusCode.UNAVAILABLE,
        type="service_unavailable_error",
        code="too_many_connections",
        message=f"there are {most} connections, and more are not taken (gateway.max_connections)",
        retry_after_s=_RETRY_AFTER_S,
    )


def _status(http: int, code: str, message: str) -> ErrorStatus:
    return ErrorStatus(
        http=http, grpc=grpc.StatusCode.INVALID_ARGUMENT, type="invalid_request_error", code=code, message=message
    )
