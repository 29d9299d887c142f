"""An error as an HTTP answer, for the gateway and for Serve's proxy."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from cluster.gateway.errors import ErrorStatus


def error_answer(status: ErrorStatus) -> Response:
    """OpenAI's error object."""
    return Response(msgspec.json.encode(status.body()), status.http, status.headers(), "application/json")
