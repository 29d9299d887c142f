"""The HTTP routes /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from actors.errors import PacelineError
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.streams import padded_json
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.errors import status_of
from cluster.gateway.http.answers import EventStream, collect, first_piece, json_answer, timeout_s, unless_disconnected
from cluster.gateway.http.openapi import request_body
from cluster.gateway.http.request_body import read_body
from cluster.gateway.openai.answer import AnswerWriter, CompletionWriter
from cluster.gateway.openai.chat_answer import ChatWriter
from cluster.gateway.requests.body_limits import read_fields
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.chat_schema import ChatBody, chat_call
from cluster.gateway.requests.schema import CompletionBody, GenerationFields, UsageChunks, completion_call, parse_fields
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig

OPENAI_BODIES = (CompletionBody, ChatBody)


def add_openai_routes(app: FastAPI, service: GenerationService, config: GatewayConfig) -> None:
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
            call = completion_call(body, timeout_s(request), service.codec.fill_in_marks)
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
            return error_answer(status_of(error))
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
