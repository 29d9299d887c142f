"""The HTTP routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.gateway.door.messages_face import MESSAGES_PATH
from cluster.gateway.http.answers import json_answer, timeout_s
from cluster.gateway.http.event_answer import answer_with_events
from cluster.gateway.http.openapi import request_body
from cluster.gateway.http.request_body import read_body
from cluster.gateway.messages.answer import MessageWriter
from cluster.gateway.messages.schema import CountTokensBody, MessagesBody, messages_call, messages_prompt, own_fields
from cluster.gateway.requests.body_limits import read_fields
from cluster.gateway.requests.schema import parse_fields
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig

MESSAGES_BODIES = (MessagesBody, CountTokensBody)


def add_messages_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
    async def fields_of(request: Request) -> dict[str, Any]:
        data = await read_body(request, config.max_body_bytes)
        return own_fields(read_fields(data, service.model.max_model_len))

    @app.post(MESSAGES_PATH, tags=["anthropic"], openapi_extra=request_body(MessagesBody))
    async def create_message(request: Request) -> Response:
        with service.counting_refusals():
            body = parse_fields(MessagesBody, await fields_of(request), config.unknown_fields)
            call = messages_call(body, service.codec.chat_format, timeout_s(request))
        call_id = f"msg_{uuid.uuid4().hex}"
        prepared = await service.prepare(call, call_id, request.state.tenant, request.state.origin)
        writer = MessageWriter(prepared, service)
        return await answer_with_events(request, service, prepared, writer, streams=bool(body.stream))

    @app.post(f"{MESSAGES_PATH}/count_tokens", tags=["anthropic"], openapi_extra=request_body(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        with service.counting_refusals():
            body = parse_fields(CountTokensBody, await fields_of(request), config.unknown_fields)
            service.check_model(body.model)
            prompt = messages_prompt(body, service.codec.chat_format)
            token_ids = await service.tokens_of(
                prompt.conversation,
                "messages",
                tenant=request.state.tenant,
                template=prompt.template,
                tool_use=prompt.tool_use,
            )
        return json_answer({"input_tokens": len(token_ids)})
