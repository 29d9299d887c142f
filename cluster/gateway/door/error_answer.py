"""An error as an HTTP answer, for the gateway and for Serve's proxy."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.gateway.door.messages_face import is_messages_path, messages_error
from cluster.gateway.errors import ErrorStatus


def error_answer(status: ErrorStatus) -> Response:
    return _ErrorAnswer(status)


def error_event(status: ErrorStatus, path: str) -> bytes:
    """Ends a stream of this path that has begun, from any writer."""
    if is_messages_path(path):
        return b"event: error\ndata: " + msgspec.json.encode(messages_error(status)) + b"\n\n"
    return b"data: " + msgspec.json.encode(status.body()) + b"\n\n"  # in this form OpenAI's clients read errors


class _ErrorAnswer(Response):
    """OpenAI's error object, or Anthropic's on the paths of its API."""

    def __init__(self, status: ErrorStatus) -> None:
        super().__init__(msgspec.json.encode(status.body()), status.http, status.headers(), "application/json")
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_messages_path(scope["path"]):
            self.body = msgspec.json.encode(messages_error(self._status))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)
