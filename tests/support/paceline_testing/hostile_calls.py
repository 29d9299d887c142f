"""HTTP calls for fuzzing, as bytes on a connection, and the rules that their answers must keep."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h11

from cluster.gateway.door.messages_face import is_messages_path
from paceline_testing.hostile_bodies import HostileBodies

BODIES = {
    "/v1/completions": ("CompletionBody",),
    "/v1/chat/completions": ("ChatBody",),
    "/v1/responses": ("ResponsesBody",),
    "/v1/messages": ("MessagesBody",),
    "/v1/messages/count_tokens": ("CountTokensBody",),
    "/tokenize": ("TokenizePromptBody", "TokenizeChatBody"),
    "/detokenize": ("DetokenizeBody",),
}
_LAST_EVENTS = {
    "/v1/completions": (b"data: [DONE]\n\n",),
    "/v1/chat/completions": (b"data: [DONE]\n\n",),
    "/v1/responses": (b"data: [DONE]\n\n",),
    "/v1/messages": (b'data: {"type":"message_stop"}\n\n', b"}\n\n"),
}
_PATHS = (
    "/", "/docs", "/openapi.json", "/livez", "/readyz", "/health", "/version", "/metrics", "/v1/models",
    "/v1/models/toy", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/" + "a" * 5_000, "/v1/models/..%2f..",
    "/v1/models/{x}", "/tokenizer_info", "//", "/../v1/models", "/v1//models", "/V1/MODELS", "/v1/models/",
    "/v1/completions/", "/v1/chat/completion", "/v1/messages/x", "/-/routes", "/-/healthz", "/-/%ff", "/%e2%98%83",
    "/v1/embeddings", "/redoc", "/favicon.ico", "*", "http://localhost/livez", "http://localhost", "//evil/x",
    "localhost:80", "/livez?" + "a=b&" * 2_000, "/livez?%zz=%", "/livez#x", "/v1/models?model=\x80", "/%",
    "/%0d%0aX: y", "x", "",
)  # fmt: skip
_METHODS = (
    "GET",
    "GET",
    "HEAD",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "POST",
    "PRI",
    "get",
    "G T",
    "",
    "PROPFIND",
)
_LINES = (
    "x-request-timeout-seconds: nan", "x-request-timeout-seconds: 1e400", "x-request-timeout-seconds: -1",
    "x-request-timeout-seconds: ٣", "x-request-timeout-seconds: 0.5", "x-request-timeout-seconds: 5",
    "x-request-timeout-seconds:", "x-request-timeout-seconds: 5\r\nx-request-timeout-seconds: x",
    "x-request-id: \xff\xfe", "x-request-id: a\r\nx-request-id: b", "x-request-id: " + "i" * 3_000,
    "traceparent: 00-zz", "traceparent: 00-" + "0" * 32 + "-" + "1" * 16 + "-01", "tracestate: \xff=\x80",
    "authorization: \xff", "authorization: Bearer", "authorization: Basic eA==", "x-api-key: \x80",
    "authorization: Bearer " + "k" * 9_000, "accept: nothing/known", "accept-encoding: zstd", "expect: 100-continue",
    "expect: x", "upgrade: h2c\r\nconnection: upgrade", "upgrade: websocket\r\nconnection: upgrade", "origin: null",
    "origin: http://evil", "access-control-request-method: POST\r\norigin: http://evil", "x-forwarded-for: \x80",
    "cookie: " + "c" * 8_000, "range: bytes=0-1", "if-none-match: *", "te: trailers", "connection: close",
    "connection: \xff", "host: evil", "transfer-encoding: gzip", "transfer-encoding: chunked", "content-length: 5",
    "content-length: -1", "content-length: 99999999999999999999", "no colon", " folded: x", "name with space: x",
    "x-nul: \x00", "\x80: x", ": empty", "x-paceline: " + "v" * 70_000, "serve_multiplexed_model_id: \xe9",
    "content-encoding: identity, identity", "x-many: 1\r\n" * 120 + "x-last: 1",
)  # fmt: skip
_KEY_HEADERS = ("authorization: Bearer ",) * 20 + (
    "authorization: bearer ", "authorization: ", "authorization: Bearer  ", "x-api-key: ", "authorization: Bearer \xff",
    "authorization: Bearer x\r\nauthorization: Bearer ",
)  # fmt: skip
_CONTENT_TYPES = (
    "text/plain", "", "application/json; charset=utf-16", "application/json;", "APPLICATION/JSON",
    "application/x+json", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
    "application/json\r\ncontent-type: text/plain", "\xff", "application/problem+json",
    "application/json, text/plain",
)  # fmt: skip
# Names of classes, of libraries' own words and of places in the source, which are nothing to a client.
_INTERNAL = re.compile(
    r"Traceback|\.py\b|<class|object at 0x|pydantic|ValidationError|Input should|msgspec|starlette|asyncio\."
    r"|\b(is|be) (None|True|False)\b"
)
_ANSWER_WITHIN_S = 30.0
_LONGEST_MESSAGE = 1_500  # characters
_LATE = 504  # where a call has asked for little time


@dataclass(frozen=True)
class HostileCall:
    """parts: bytes to send one after the other. breaks_off: the client leaves in place of reading the answer."""

    method: str
    path: str
    parts: tuple[bytes, ...]
    breaks_off: bool = False

    @property
    def has_known_path(self) -> bool:
        return self.path in BODIES


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


class BrokenRule(Exception):
    """A server has not kept a rule; the text says which."""


class HostileCalls:
    def __init__(self, rng: random.Random, bodies: HostileBodies, key: str | None = None) -> None:
        """key: that most calls bring; None: none is asked for."""
        self._rng = rng
        self._bodies = bodies
        self._key = key

    def next(self) -> HostileCall:
        rng = self._rng
        kind = rng.random()
        if kind < 0.02:
            return HostileCall("GET", "", self._split(self._no_http()))
        method, path = "POST", rng.choice(list(BODIES))
        if kind < 0.12:
            method, path = rng.choice(_METHODS), rng.choice((*_PATHS, *BODIES))
        data, lines = self._bodies.body(BODIES.get(path, ("ChatBody",))), []
        if rng.random() < 0.15:
            data, encoding = self._bodies.encoded(data)
            lines.append(f"content-encoding: {encoding}")
        lines.append(f"content-type: {rng.choice(_CONTENT_TYPES) if rng.random() < 0.04 else 'application/json'}")
        if self._key is not None and rng.random() < 0.95:
            lines.append(f"{rng.choice(_KEY_HEADERS)}{self._key}")
        if rng.random() < 0.08:
            lines += rng.choices(_LINES, k=rng.choice((1, 1, 2)))
        if rng.random() < 0.1:
            lines.append("transfer-encoding: chunked")
            data = self._chunked(data)
        else:
            lines.append(f"content-length: {len(data)}")
        version = "HTTP/1.1" if rng.random() < 0.98 else rng.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9", "http/1.1", ""))
        head = "\r\n".join((f"{method} {path} {version}", "host: localhost", *lines, "", ""))
        parts = self._split(head.encode("latin-1", "replace") + data)
        return HostileCall(method, path, parts, rng.random() < 0.02)

    def _no_http(self) -> bytes:
        rng = self._rng
        return rng.choice((
            rng.randbytes(300), b"\r\n" * 50 + b"\x00", b"\x16\x03\x01\x02\x00" + rng.randbytes(200), b"GET\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 100_000, b"SSH-2.0-x\r\n",
            b"{}\r\n\r\n",
        ))  # fmt: skip

    def _chunked(self, data: bytes) -> bytes:
        rng = self._rng
        size = rng.choice((1, 7, 100, 100_000)) if len(data) < 5_000 else 10_000
        end = rng.choice(
            (b"0\r\n\r\n",) * 8 + (b"0\r\nx: y\r\n\r\n", b"g\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffffff\r\n")
        )
        extension = rng.choice((b"",) * 5 + (b";a=b",))
        chunks = [data[start : start + size] for start in range(0, len(data), size)]
        return b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks) + end

    def _split(self, data: bytes) -> tuple[bytes, ...]:
        rng = self._rng
        if rng.random() < 0.9:
            return (data,)
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice((1, 3, 10))))
        return tuple(data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True))


async def asked(host: str, port: int, call: HostileCall) -> HttpAnswer | None:
    """The answer to a call on a connection of its own. None: the server has ended the connection without one, or the
    call breaks off. Raises BrokenRule."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        sending = asyncio.create_task(_send(writer, call.parts))
        try:
            if call.breaks_off:
                await sending
                return None
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                return await _read_answer(reader, writer, call.method)
        except TimeoutError:
            raise BrokenRule(f"no answer within {_ANSWER_WITHIN_S:g} s") from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, parts: Sequence[bytes]) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()
        if len(parts) > 1:
            await asyncio.sleep(0.001)


async def _read_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str) -> HttpAnswer | None:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    # What was sent may be no HTTP, so the parser hears of a plain request: of HEAD, which has no body, if it was one.
    parser.send(h11.Request(method="HEAD" if method == "HEAD" else "GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    head, body = None, b""
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError as error:
            if head is None and not parser.trailing_data[0]:
                return None
            raise BrokenRule(f"the answer is no HTTP or not whole: {error}") from None
        if event is h11.NEED_DATA:
            try:
                data = await reader.read(1 << 16)
            except ConnectionError:
                data = b""
            if not data and not writer.can_write_eof():
                return None
            parser.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            break
    if head is None:
        return None
    return HttpAnswer(head.status_code, {name.decode(): value.decode("latin-1") for name, value in head.headers}, body)


def check_answer(call: HostileCall, answer: HttpAnswer) -> None:
    """Raises BrokenRule."""
    if answer.status >= 500 and answer.status != _LATE:
        raise BrokenRule(f"status {answer.status}: {answer.body[:300]!r}")
    kind = answer.headers.get("content-type", "")
    if call.method == "HEAD":
        if answer.body:
            raise BrokenRule("an answer to HEAD has a body")
    elif answer.status >= 400:
        # The connection answers for itself where it has not come to know the path.
        check_error(answer.body, kind, may_be_plain=answer.headers.get("connection") == "close", path=call.path)
    elif kind.startswith("text/event-stream"):
        if not answer.body.endswith(_LAST_EVENTS.get(call.path, ())):
            raise BrokenRule(f"a stream ends with {answer.body[-300:]!r}")
        check_events(answer.body)
    elif kind.startswith("application/json"):
        _parsed(answer.body)
    elif call.has_known_path and call.method == "POST":
        raise BrokenRule(f"an answer of type {kind!r}")


def check_error(body: bytes, kind: str, *, may_be_plain: bool, path: str) -> None:
    """may_be_plain: OpenAI's object may stand in place of Anthropic's. Raises BrokenRule."""
    if kind != "application/json":
        raise BrokenRule(f"an error of type {kind!r}: {body[:300]!r}")
    found = _parsed(body)
    error = found.get("error")
    is_own = set(found) == {"error"} and isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
    if is_messages_path(path.partition("?")[0]):
        is_messages = found.get("type") == "error" and isinstance(error, dict) and set(error) == {"type", "message"}
        is_own = is_messages or (may_be_plain and is_own)
    if not is_own:
        raise BrokenRule(f"no error object of this API: {body[:300]!r}")
    check_message(error["message"])


def check_message(message: object) -> None:
    """A client's message of an error. Raises BrokenRule."""
    if not isinstance(message, str) or not 0 < len(message) <= _LONGEST_MESSAGE:
        raise BrokenRule(f"an error says {message!r}")
    if _INTERNAL.search(message):
        raise BrokenRule(f"an error has internals: {message[:400]!r}")


def check_events(body: bytes) -> None:
    """Raises BrokenRule for a stream of events whose data is not JSON, or that ends with an error but lateness."""
    for block in body.decode().split("\n\n")[:-1]:
        data = block.rpartition("data: ")[2] if "\n" not in block else block.partition("\ndata: ")[2]
        if data == "[DONE]":
            continue
        found = _parsed(data.encode())
        error = found.get("error") or found.get("response", {}).get("error")
        if error:
            raise BrokenRule(f"a stream has failed: {data[:300]}")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise BrokenRule(f"no JSON ({error}): {data[:300]!r}") from None
    if not isinstance(found, dict):
        raise BrokenRule(f"no JSON object: {data[:300]!r}")
    return found
