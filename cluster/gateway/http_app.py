"""The HTTP API: OpenAI's endpoints and operational ones, over a `GenerationService`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

import msgspec
from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import PacelineError
from actors.logs import REQUEST_ID_HEADER, request_id, request_id_of
from cluster.config import GatewayConfig
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.streams import padded_json
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.door.hosts import HostRequired, allowed_hosts
from cluster.gateway.door.messages_face import authorization_of
from cluster.gateway.door.origins import JsonRequired, cors
from cluster.gateway.errors import ErrorStatus, MetricsElsewhere, status_of
from cluster.gateway.http.answers import EventStream, collect, first_piece, json_answer, timeout_s, unless_disconnected
from cluster.gateway.http.openapi import document_of, request_body
from cluster.gateway.http.request_body import read_body
from cluster.gateway.http.unknown_routes import allowed_methods, no_route
from cluster.gateway.messages.routes import MESSAGES_BODIES, add_messages_routes
from cluster.gateway.observability.metrics_page import METRICS_TYPE
from cluster.gateway.openai.answer import AnswerWriter, CompletionWriter
from cluster.gateway.openai.chat_answer import ChatWriter
from cluster.gateway.openai.token_routes import TOKEN_BODIES, add_token_routes
from cluster.gateway.page.routes import PAGE_PATHS, add_page_routes
from cluster.gateway.requests.body_limits import read_fields
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.gateway.requests.chat_schema import ChatBody, chat_call
from cluster.gateway.requests.schema import CompletionBody, GenerationFields, UsageChunks, completion_call, parse_fields
from cluster.gateway.responses.routes import add_responses_routes
from cluster.gateway.responses.schema import ResponsesBody
from cluster.gateway.service import GenerationService

OPEN_PATHS = frozenset(("/livez", "/readyz", "/health", "/version", "/metrics"))  # for probes and scrapers


def paceline_version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0.0.0"


def create_app(service: GenerationService, config: GatewayConfig, answers_request_id: bool = True) -> FastAPI:
    """All routes over one service. The app keeps no state. answers_request_id: False if the proxy adds the header, as
    Serve's does."""
    app = FastAPI(title="Paceline", version=paceline_version(), docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    _add_operational_routes(app, service, config)
    _add_openai_routes(app, service, config)
    add_responses_routes(app, service, config)
    add_messages_routes(app, service, config)
    add_token_routes(app, service, config)
    open_paths = OPEN_PATHS
    if config.page:
        add_page_routes(app)
        open_paths |= PAGE_PATHS
    app.add_middleware(JsonRequired)
    app.add_middleware(KeyRequired, service=service, open_paths=open_paths)
    app.add_middleware(HostRequired, allowed=allowed_hosts(config.allowed_hosts, config.host))
    for one in cors(config):
        app.add_middleware(one.cls, *one.args, **one.kwargs)
    app.add_middleware(HeadAsGet)
    app.add_middleware(WithRequestId, answers=answers_request_id)
    app.openapi = lambda: document_of(app, (CompletionBody, ChatBody, ResponsesBody, *MESSAGES_BODIES, *TOKEN_BODIES))  # type: ignore[method-assign]
    return app


class HeadAsGet:
    """Answers HEAD as GET without the body, on every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class WithRequestId:
    """Gives each call an id, the client's or a new one, for its log lines and its answer."""

    def __init__(self, app: ASGIApp, answers: bool) -> None:
        """answers: whether to set the header of the answer."""
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        found = request_id_of(headers.get(REQUEST_ID_HEADER))
        origin = CallOrigin(found, headers.get("traceparent"), headers.get("tracestate"))
        scope.setdefault("state", {})["origin"] = origin
        request_id.set(found)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = found
            await send(message)

        await self._app(scope, receive, send_with_id if self._answers else send)


class KeyRequired:
    """Requires a key on every path but the open ones, existing or not, before a body is read."""

    def __init__(self, app: ASGIApp, service: GenerationService, open_paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                tenant = self._service.enter(authorization_of(scope["path"], Headers(scope=scope)))
            except PacelineError as error:
                await _error_answer(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _error_answer(error: BaseException) -> Response:
    return error_answer(status_of(error))


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PacelineError)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return _error_answer(error)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client is gone

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code, headers = str(error.detail), "http_error", dict(error.headers or {})
        if error.status_code == 404:
            code = "not_found"
            if message == HTTPStatus.NOT_FOUND.phrase:  # the router's own words about a path without a route
                message = no_route(app.routes, request.scope)
        elif error.status_code == 405:
            methods = allowed_methods(app.routes, request.scope)
            message, code = (
                f"{request.method} is not allowed for {request.url.path[:64]}; allowed: {', '.join(methods)}",
                "method_not_allowed",
            )
            headers["Allow"] = ", ".join(methods)
        answer = error_answer(ErrorStatus.of_http(error.status_code, code, message))
        answer.headers.update(headers)
        return answer


def _add_operational_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    async def readiness() -> Response:
        try:
            status = await service.recent_status()
        except PacelineError as error:
            return json_answer({"status": "unavailable", "detail": str(error)}, 503)
        return json_answer(
            {"status": "ready" if status.ready else "unavailable", "detail": status.detail},
            200 if status.ready else 503,
        )

    @app.get("/livez", tags=["operation"])
    async def livez() -> Response:
        """503 if the last known status of the router says that its rounds have stopped, which needs a restart."""
        status = service.last_status
        if status is not None and not status.live:
            return json_answer({"status": "stopped", "detail": status.detail}, 503)
        return json_answer({"status": "live"})

    @app.get("/readyz", tags=["operation"])
    async def readyz() -> Response:
        """200 if requests are served, else 503."""
        return await readiness()

    @app.get("/health", tags=["operation"])
    async def health() -> Response:
        """The same as /readyz."""
        return await readiness()

    @app.get("/version", tags=["operation"])
    async def version_of_paceline() -> Response:
        return json_answer({"version": app.version})

    @app.get("/metrics", tags=["operation"])
    async def metrics() -> Response:
        """The metrics of all gateways and routers, in Prometheus text format; 404 where they are not public."""
        if config.metrics_port is not None:
            raise MetricsElsewhere("/metrics is on the port of its own that gateway.metrics_port names")
        if service.has_tenants:
            raise MetricsElsewhere("with tenants /metrics is not on this port; gateway.metrics_port gives it its own")
        return Response(await service.metrics_page.text(), media_type=METRICS_TYPE)


def _add_openai_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    @app.get("/v1/models", tags=["openai"])
    async def list_models() -> Response:
        return json_answer({"object": "list", "data": [service.card.json_object()]})

    @app.get("/v1/models/{model_id:path}", tags=["openai"])
    async def retrieve_model(model_id: str) -> Response:
        service.check_model(model_id)
        return json_answer(service.card.json_object())

    @app.post("/v1/completions", tags=["openai"], openapi_extra=request_body(CompletionBody))
    async def create_completion(request: Request) -> Response:
        with service.counting_refusals():
            fields = read_fields(await read_body(request, config.max_body_bytes), service.model.max_model_len)
            body = parse_fields(CompletionBody, fields, config.unknown_fields)
            call = completion_call(body, timeout_s(request))
        return await answer(request, "cmpl", body, call)

    @app.post("/v1/chat/completions", tags=["openai"], openapi_extra=request_body(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        with service.counting_refusals():
            fields = read_fields(await read_body(request, config.max_body_bytes), service.model.max_model_len)
            body = parse_fields(ChatBody, fields, config.unknown_fields)
            call = chat_call(body, service.codec.chat_format, timeout_s(request))
        return await answer(request, "chatcmpl", body, call)

    async def answer(request: Request, prefix: str, body: GenerationFields, call: GenerationCall) -> Response:
        call_id = f"{prefix}-{uuid.uuid4().hex}"
        prepared = await service.prepare(call, call_id, request.state.tenant, request.state.origin)
        kind = ChatWriter if call.is_chat else CompletionWriter
        writer: AnswerWriter = kind(prepared, service, f"paceline-{app.version}")
        try:
            if not body.stream:
                return json_answer(writer.whole(await unless_disconnected(request, collect(service, prepared))))
            pieces = service.stream(prepared, prepared.stream_shape)
            # Await the first piece before the status line, so that a full queue is a 429 and not a broken stream.
            first = await unless_disconnected(request, first_piece(pieces))
        except (PacelineError, ClientDisconnect):
            raise
        except Exception as error:  # the service has logged it
            return _error_answer(error)
        return EventStream(_events(first, pieces, writer, usage=body.usage_chunks, pads=prepared.stream_shape.pads))


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], writer: AnswerWriter, usage: UsageChunks, pads: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        try:
            yield _encode_chunks(writer, first, usage, pads)
            async for piece in pieces:
                yield _encode_chunks(writer, piece, usage, pads)
        except Exception as error:
            # The status line is sent; OpenAI's clients read errors of a stream in this form.
            yield b"data: " + msgspec.json.encode(status_of(error).body()) + b"\n\n"
            return
        yield b"data: [DONE]\n\n"


def _encode_chunks(writer: AnswerWriter, piece: Piece, usage: UsageChunks, pads: bool) -> bytes:
    chunks = [msgspec.json.encode(chunk) for chunk in writer.chunks(piece, usage)]
    return b"".join(b"data: " + (padded_json(chunk) if pads else chunk) + b"\n\n" for chunk in chunks)
