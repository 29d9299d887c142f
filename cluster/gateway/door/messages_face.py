"""What is Anthropic's on the paths of /v1/messages besides bodies and answers: the key's header, and errors."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers

from cluster.gateway.errors import ErrorStatus

MESSAGES_PATH = "/v1/messages"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def authorization_of(path: str, headers: Headers) -> list[str]:
    """All values of the header `authorization`; for messages, without one, those of `x-api-key` in its place."""
    given = headers.getlist("authorization")
    if given or not is_messages_path(path):
        return given
    return [f"Bearer {key}" for key in headers.getlist("x-api-key")]


def messages_error(status: ErrorStatus) -> dict[str, Any]:
    """Anthropic's error object, whose message names the field."""
    kind = _ERROR_TYPES.get(status.http, "api_error" if status.http >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": status.message}}
