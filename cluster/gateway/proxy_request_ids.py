"""Request ids before Serve's own HTTP proxy reads them: it takes whatever a client has sent for its logs and as the id
of the answer, fails over what is not UTF-8, and of two ids logs the one and answers with the other."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from actors.logs import REQUEST_ID_HEADER, request_id_of

_NAME = REQUEST_ID_HEADER.encode()
_STEERS_SERVE = b"serve-multiplexed-model-id"  # which replica: nothing here is chosen by it


class FitRequestIds:
    """ASGI middleware: a call has at most one id, and that is fit for a log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers, given = [], []
            for name, value in scope["headers"]:
                if name == _NAME:
                    given.append(value)
                elif name.replace(b"_", b"-") != _STEERS_SERVE:
                    headers.append((name, value))
            if given:
                found = request_id_of(given[0].decode("latin-1") if len(given) == 1 else None)
                headers.append((_NAME, found.encode()))
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)
