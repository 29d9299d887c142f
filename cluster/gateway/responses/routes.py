"""The HTTP route /v1/responses. It is stateless: nothing is stored."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.gateway.http.answers import timeout_s
from cluster.gateway.http.event_answer import answer_with_events
from cluster.gateway.http.openapi import request_body
from cluster.gateway.http.request_body import read_body
from cluster.gateway.requests.body_limits import read_fields
from cluster.gateway.requests.schema import parse_fields
from cluster.gateway.responses.answer import ResponseWriter
from cluster.gateway.responses.schema import ResponsesBody, own_fields, responses_call
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig

_DONE = b"data: [DONE]\n\n"  # as the Open Responses specification has it


def add_responses_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    @app.post("/v1/responses", tags=["openai"], openapi_extra=request_body(ResponsesBody))
    async def create_response(request: Request) -> Response:
        with service.counting_refusals():
            fields = read_fields(await read_body(request, config.max_body_bytes), service.model.max_model_len)
            body = parse_fields(ResponsesBody, own_fields(fields), config.unknown_fields)
            call = responses_call(body, service.codec.chat_format, timeout_s(request))
        call_id = f"resp_{uuid.uuid4().hex}"
        prepared = await service.prepare(call, call_id, request.state.tenant, request.state.origin)
        writer = ResponseWriter(prepared, service, body)
        return await answer_with_events(request, service, prepared, writer, streams=bool(body.stream), last_line=_DONE)
