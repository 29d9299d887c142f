"""An error as an HTTP answer, for the gateway and for Serve's proxy."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from cluster.gateway.errors import ErrorStatus


def error_answer(status: ErrorStatus, closes: bool = False) -> Response:
    """OpenAI's error object. closes: end the connection, because a body that nobody wants may follow."""
    headers = {**status.headers(), "Connection": "close"} if closes else status.headers()
    return Response(msgspec.json.encode(status.body()), status.http, headers, "application/json")
