"""The HTTP API: the routes of all rooms, and middleware, over a `GenerationService`."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from actors.errors import PacelineError
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.door.hosts import HostRequired, allowed_hosts
from cluster.gateway.door.origins import JsonRequired, OriginRequired, cors
from cluster.gateway.errors import ErrorStatus, status_of
from cluster.gateway.http.middleware import HeadAsGet, KeyRequired, WithRequestId
from cluster.gateway.http.openapi import document_of
from cluster.gateway.http.operational_routes import OPEN_PATHS, add_operational_routes
from cluster.gateway.http.unknown_routes import allowed_methods, no_route
from cluster.gateway.messages.routes import MESSAGES_BODIES, add_messages_routes
from cluster.gateway.openai.routes import OPENAI_BODIES, add_openai_routes
from cluster.gateway.openai.token_routes import TOKEN_BODIES, add_token_routes
from cluster.gateway.page.routes import PAGE_PATHS, add_page_routes
from cluster.gateway.responses.routes import add_responses_routes
from cluster.gateway.responses.schema import ResponsesBody
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig


def paceline_version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0.0.0"


def create_app(service: GenerationService, config: GatewayConfig, answers_request_id: bool = True) -> FastAPI:
    """All routes over one service. The app keeps no state. answers_request_id: False if the proxy adds the header, as
    Serve's does."""
    # A redirect from a path with a slash behind it would send clients of a TLS proxy to http.
    app = FastAPI(title="Paceline", version=paceline_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_error_handlers(app)
    add_operational_routes(app, service, config)
    add_openai_routes(app, service, config)
    add_responses_routes(app, service, config)
    add_messages_routes(app, service, config)
    add_token_routes(app, service, config)
    open_paths = OPEN_PATHS
    if config.page:
        add_page_routes(app)
        open_paths |= PAGE_PATHS
    app.add_middleware(JsonRequired)
    app.add_middleware(KeyRequired, service=service, open_paths=open_paths)
    if hosts := allowed_hosts(config.allowed_hosts, config.host):
        app.add_middleware(OriginRequired, allowed=config.cors_origins)
        app.add_middleware(HostRequired, allowed=hosts)
    for one in cors(config):
        app.add_middleware(one.cls, *one.args, **one.kwargs)
    app.add_middleware(HeadAsGet)
    app.add_middleware(WithRequestId, answers=answers_request_id)
    app.openapi = lambda: document_of(app, (*OPENAI_BODIES, ResponsesBody, *MESSAGES_BODIES, *TOKEN_BODIES))  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PacelineError)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_answer(status_of(error))

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
