"""The administrators' HTTP API: JSON in and out, documents as lines of JSON.

    GET    /v1/cache/namespaces                            list
    GET    /v1/cache/namespaces/{namespace}                stats
    GET    /v1/cache/namespaces/{namespace}/documents      export
    POST   /v1/cache/namespaces/{namespace}/documents      import: JSON lines, or one text as text/plain
    DELETE /v1/cache/namespaces/{namespace}                purge; ?since_s=&until_s=
    POST   /v1/cache/namespaces/{namespace}/compact
    POST   /v1/cache/namespaces/{namespace}/verify
    DELETE /v1/cache/tenants/{tenant}                      purge of all that is a tenant's own
    GET    /v1/cache/regions                               clusters that share with this one

With `?tenant=`, the namespace is the name of a part of that tenant's, or "-" for its own. `?fingerprint=` chooses among
models. All but /livez need `Authorization: Bearer <credential>`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import InvalidRequest, PacelineError
from cache_service.errors import CacheError
from cache_service.formats.documents import Piece
from cache_service.formats.export_format import encode_header, encode_piece
from cluster.cache.admin.credential import Credential
from cluster.cache.admin.documents import DocumentReader
from cluster.cache.admin.errors import RETRY_AFTER_S, AdminStatus, status_of
from cluster.cache.admin.service import CacheAdminService, Export, NamespaceQuery
from cluster.cache.admin.work import Work, lines, pulled

logger = logging.getLogger(__name__)

_NDJSON = "application/x-ndjson"
_UNREAD = "x-paceline-unread"
_MAX_TEXT_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 64 * 2**20
_OPEN_PATHS = ("/livez",)


@dataclass(frozen=True, slots=True)
class _Desk:
    """The service, with the client as actor of the audit log, and the threads that call it."""

    service: CacheAdminService
    work: Work
    imports: Work


async def _desk(request: Request) -> _Desk:
    desk: _Desk = request.app.state.desk
    return replace(desk, service=desk.service.acting_for(f"http {_client(request.scope)}"))


async def _query(namespace: str = "", tenant: str = "", fingerprint: str = "") -> NamespaceQuery:
    return NamespaceQuery("" if namespace == "-" else namespace, tenant, fingerprint)


_Desked = Annotated[_Desk, Depends(_desk)]
_Named = Annotated[NamespaceQuery, Depends(_query)]
_Time = Annotated[int | None, Query()]

_routes = APIRouter(prefix="/v1/cache")
_PLACE = "/namespaces/{namespace}"


@_routes.get("/namespaces")
async def _list(desk: _Desked, fingerprint: str = "") -> Response:
    return _json({"namespaces": await desk.work.run(lambda: desk.service.namespaces(fingerprint))})


@_routes.get("/regions")
async def _regions(desk: _Desked) -> Response:
    return _json({"regions": await desk.work.run(desk.service.regions)})


@_routes.get(_PLACE)
async def _stats(desk: _Desked, query: _Named) -> Response:
    return _json(await desk.work.run(lambda: desk.service.stats(query)))


@_routes.get(f"{_PLACE}/documents")
async def _export(desk: _Desked, query: _Named) -> Response:
    """In the format that imports read. The header x-paceline-unread counts objects that could not be read."""
    found = await desk.work.run(lambda: desk.service.export(query))
    return StreamingResponse(_export_lines(found), headers={_UNREAD: str(found.unread)}, media_type=_NDJSON)


@_routes.post(f"{_PLACE}/documents")
async def _import(request: Request, desk: _Desked, query: _Named) -> Response:
    loop = asyncio.get_running_loop()
    is_text = request.headers.get("content-type", "").partition(";")[0].strip() == "text/plain"
    chunks = request.stream()

    def documents(reader: DocumentReader) -> Iterator[Piece]:
        received = pulled(chunks, loop)
        return reader.text(_text(received)) if is_text else reader.rows(lines(received, _MAX_LINE_BYTES), "body")

    return _json(await desk.imports.run(lambda: desk.service.import_documents(query, documents)))


@_routes.delete(_PLACE)
async def _purge(desk: _Desked, query: _Named, since_s: _Time = None, until_s: _Time = None) -> Response:
    return _json({"purged": await desk.work.run(lambda: desk.service.purge(query, since_s, until_s))})


@_routes.delete("/tenants/{tenant}")
async def _purge_tenant(
    desk: _Desked, tenant: str, fingerprint: str = "", since_s: _Time = None, until_s: _Time = None
) -> Response:
    query = NamespaceQuery("", tenant, fingerprint)
    return _json({"purged": await desk.work.run(lambda: desk.service.purge(query, since_s, until_s))})


@_routes.post(f"{_PLACE}/compact")
async def _compact(desk: _Desked, query: _Named) -> Response:
    return _json(await desk.work.run(lambda: desk.service.compact(query)))


@_routes.post(f"{_PLACE}/verify")
async def _verify(desk: _Desked, query: _Named) -> Response:
    return _json(await desk.work.run(lambda: desk.service.verify(query)))


def create_admin_app(service: CacheAdminService, credential: Credential, work: Work, imports: Work) -> FastAPI:
    """work, imports: threads that the service is called in."""
    app = FastAPI(title="Paceline cache administration", docs_url=None, redoc_url=None)
    app.state.desk = _Desk(service, work, imports)
    app.include_router(_routes)
    _add_error_handlers(app)
    app.add_middleware(_Guard, credential=credential)

    @app.get("/livez")
    async def livez() -> Response:
        return _json({"status": "live"})

    return app


class _Guard:
    """Refuses requests without the credential before their body is read."""

    def __init__(self, app: ASGIApp, credential: Credential) -> None:
        self._app = app
        self._credential = credential

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        found = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(found) == 1 and self._credential.admits(found[0].decode("latin-1")):
            await self._until_the_end(scope, receive, send)
            return
        logger.warning("%s %r from %s: no administrator", scope["method"], scope["path"], _client(scope))
        error = {"message": "an administrator's credential is needed", "code": "unauthenticated"}
        await _json({"error": error}, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    async def _until_the_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 if the stopping server cancels the request before its answer began."""
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            logger.warning("%s %r from %s: given up, the server stops", scope["method"], scope["path"], _client(scope))
            if not has_begun:
                error = {"message": "the server stops; what has been done stays", "code": "stopping"}
                await _json({"error": error}, 503, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_error(_: Request, error: Exception) -> Response:
        return _error(status_of(error))

    for kind in (PacelineError, CacheError, Exception):
        app.add_exception_handler(kind, on_error)

    @app.exception_handler(RequestValidationError)
    async def on_bad_field(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        field = str(problem["loc"][-1])
        return _error(status_of(InvalidRequest(field, problem.get("input"), problem["msg"])))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client is gone

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return _json(
            {"error": {"message": str(error.detail), "code": code}}, error.status_code, dict(error.headers or {})
        )


def _text(chunks: Iterator[bytes]) -> str:
    """Raises InvalidRequest."""
    parts, size = [], 0
    for chunk in chunks:
        size += len(chunk)
        if size > _MAX_TEXT_BYTES:
            raise InvalidRequest("body", f"more than {_MAX_TEXT_BYTES} bytes", "send a longer text in parts")
        parts.append(chunk)
    try:
        return b"".join(parts).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"{size} bytes", f"it must be text in UTF-8: {error.reason}") from None


async def _export_lines(export: Export) -> AsyncIterator[bytes]:
    yield encode_header(export.header)
    for piece in export.pieces:
        yield encode_piece(piece)


def _client(scope: Scope) -> str:
    host, port = scope.get("client") or ("?", 0)
    return f"{host}:{port}"


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content, enc_hook=asdict), status, headers, "application/json")


def _error(status: AdminStatus) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status.is_worth_another_try else {}
    return _json({"error": {"message": status.message, "code": status.code}}, status.http, headers)
