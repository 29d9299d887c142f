"""The HTTP routes /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.gateway.http.openapi import request_body
from cluster.gateway.http.request_body import read_body
from cluster.gateway.requests.body_limits import read_fields
from cluster.gateway.requests.schema import parse_fields
from cluster.gateway.service import GenerationService
from cluster.gateway.tokenizing import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
    detokenize,
    parse_tokenize,
    tokenize,
)
from cluster.gateway_config import GatewayConfig

TOKEN_BODIES = (TokenizePromptBody, TokenizeChatBody, DetokenizeBody)


def add_token_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    async def fields_of(request: Request) -> dict[str, Any]:
        return read_fields(await read_body(request, config.max_body_bytes), service.model.max_model_len)

    @app.post("/tokenize", tags=["tokens"], openapi_extra=request_body(TokenizePromptBody, TokenizeChatBody))
    async def post_tokenize(request: Request) -> Response:
        with service.counting_refusals():
            body = parse_tokenize(await fields_of(request), config.unknown_fields)
            found = await tokenize(service, body, request.state.tenant)
        return _json(found.json_object())

    @app.post("/detokenize", tags=["tokens"], openapi_extra=request_body(DetokenizeBody))
    async def post_detokenize(request: Request) -> Response:
        with service.counting_refusals():
            body = parse_fields(DetokenizeBody, await fields_of(request), config.unknown_fields)
            text = await detokenize(service, body)
        return _json({"prompt": text})

    @app.get("/tokenizer_info", tags=["tokens"])
    async def get_tokenizer_info() -> Response:
        """Routes for clients that count the model's tokens."""
        return _json(service.codec.tokenizer_info())


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
