"""The gRPC API: `paceline.v1.Inference` and `grpc.health.v1.Health`, over a `GenerationService`.

API keys come in the metadata `authorization`; health needs none. Requests become the same validated bodies as over
HTTP. The context may be Serve's or grpcio's. Errors set code, details and trailing metadata on it, and the message
that the call then returns is not sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from actors.errors import MISSING, InvalidRequest, PacelineError
from actors.logs import REQUEST_ID_HEADER, request_id, request_id_of
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.streams import pad
from cluster.gateway.errors import BodyTooLarge, status_of
from cluster.gateway.grpc.answer import GrpcAnswer
from cluster.gateway.grpc.chat import choice_fields, conversation_fields, logprob_fields, own_field, refuse_chat_fields
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.requests.body_limits import check_lengths, check_num_parts
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.gateway.requests.chat_schema import ChatBody, chat_call
from cluster.gateway.requests.schema import CompletionBody, completion_call, parse_fields
from cluster.gateway.service import GenerationService
from cluster.gateway.tokenizing import DetokenizeBody, detokenize, parse_tokenize, tokenize
from cluster.gateway_config import GatewayConfig
from cluster.tenants.gatekeeper import Tenant
from cluster.text.text_codec import TextCodec
from cluster.validation import counted

logger = logging.getLogger(__name__)

SERVICE_NAME = "paceline.v1.Inference"
_HEALTH_PERIOD_S = 1.0
_MAX_WATCH_S = 60.0
_SCALARS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens", "add_special_tokens",
    "prompt_logprobs", "n", "min_tokens",
)  # fmt: skip
_CACHE_USES = {
    inference_pb2.CACHE_USE_OFF: "off",
    inference_pb2.CACHE_USE_READ: "read",
    inference_pb2.CACHE_USE_READ_WRITE: "read_write",
}


class Context(Protocol):
    """The common part of `ray.serve.grpc_util.RayServegRPCContext` and `grpc.aio.ServicerContext`."""

    def invocation_metadata(self) -> Iterable[tuple[str, str]] | None: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class InferenceServicer:
    """Methods have the names of the generated stubs, and `grpc_context` is what Serve calls it."""

    def __init__(self, service: GenerationService, config: GatewayConfig) -> None:
        self._service = service
        self._config = config

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: Context
    ) -> inference_pb2.GenerateResponse:
        try:
            prepared = await self._prepare(request, grpc_context)
            async with aclosing(self._service.stream(prepared)) as pieces:
                return GrpcAnswer(prepared, self._service).whole([piece async for piece in pieces])
        except Exception as error:
            _tell(error, grpc_context)
            return inference_pb2.GenerateResponse()  # not sent

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, grpc_context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateChunk, None]:
        try:
            prepared = await self._prepare(request, grpc_context)
            shape = prepared.stream_shape
            answer = GrpcAnswer(prepared, self._service)
            async with aclosing(self._service.stream(prepared, shape)) as pieces:
                async for piece in pieces:
                    chunk = answer.chunk(piece)
                    if chunk is None:
                        continue
                    if shape.pads:
                        pad(chunk)
                    yield chunk
        except Exception as error:
            _tell(error, grpc_context)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, grpc_context: Context
    ) -> inference_pb2.ListModelsResponse:
        try:
            await self._enter(grpc_context)
        except PacelineError as error:
            _tell(error, grpc_context)
            return inference_pb2.ListModelsResponse()  # not sent
        known = self._service.card.json_object()
        fields = {field.name: known[field.name] for field in inference_pb2.Model.DESCRIPTOR.fields}
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(**fields)])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, grpc_context: Context
    ) -> inference_pb2.TokenizeResponse:
        try:
            tenant = await self._enter(grpc_context)
            with _own_fields(), self._service.counting_refusals():
                self._check_size(request)
                self._check_lengths(request)
                found = await tokenize(self._service, parse_tokenize(_tokenize_fields(request)), tenant)
        except Exception as error:
            _tell(error, grpc_context)
            return inference_pb2.TokenizeResponse()  # not sent
        return inference_pb2.TokenizeResponse(**found.json_object())

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, grpc_context: Context
    ) -> inference_pb2.DetokenizeResponse:
        try:
            await self._enter(grpc_context)
            with self._service.counting_refusals():
                self._check_size(request)
                fields = {"model": request.model or None, "tokens": list(request.tokens)}
                text = await detokenize(self._service, parse_fields(DetokenizeBody, fields))
        except Exception as error:
            _tell(error, grpc_context)
            return inference_pb2.DetokenizeResponse()  # not sent
        return inference_pb2.DetokenizeResponse(prompt=text)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE_NAME):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(str(InvalidRequest("service", request.service, f"there is {SERVICE_NAME!r}")))
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        return health_pb2.HealthCheckResponse(status=await self._health())

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Context) -> health_pb2.HealthListResponse:
        status = health_pb2.HealthCheckResponse(status=await self._health())
        return health_pb2.HealthListResponse(statuses={"": status, SERVICE_NAME: status})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The status now and at every change. Ends after a minute, since a stopping replica waits for open calls; then
        clients call again."""
        known = request.service in ("", SERVICE_NAME)
        last: int | None = None
        until = time.monotonic() + _MAX_WATCH_S
        while time.monotonic() < until:
            status = await self._health() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _health(self) -> Any:
        try:
            status = await self._service.recent_status()
        except PacelineError:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        serving = health_pb2.HealthCheckResponse.SERVING
        return serving if status.ready else health_pb2.HealthCheckResponse.NOT_SERVING

    async def _enter(self, context: Context) -> Tenant | None:
        """Raises what `Gatekeeper.enter` raises."""
        metadata = context.invocation_metadata() or ()
        return await self._service.enter([str(value) for key, value in metadata if key.lower() == "authorization"])

    async def _prepare(self, request: inference_pb2.GenerateRequest, context: Context) -> PreparedCall:
        origin = _origin_of(context)
        request_id.set(origin.request_id)
        context.set_trailing_metadata([(REQUEST_ID_HEADER, origin.request_id)])
        tenant = await self._enter(context)
        with _own_fields(), self._service.counting_refusals():
            self._check_size(request)
            self._check_lengths(request, request.prompt_token_ids.ids)
            call = _call(request, self._service.codec)
        with _own_fields():
            return await self._service.prepare(call, f"gen-{uuid.uuid4().hex}", tenant, origin)

    def _check_lengths(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, token_ids: Sequence[int] = ()
    ) -> None:
        """Raises InvalidRequest."""
        messages = request.conversation.messages
        check_lengths({"messages": messages, "prompt": token_ids}, self._service.model.max_model_len)
        check_num_parts("messages", sum(len(message.tool_calls) for message in messages))

    def _check_size(self, request: Any) -> None:
        """Raises BodyTooLarge."""
        size, most = request.ByteSize(), self._config.max_body_bytes
        if size > most:
            raise BodyTooLarge("request", counted(size, "byte"), f"at most {most} bytes are read")


@contextmanager
def _own_fields() -> Iterator[None]:
    """Errors name fields as gRPC's messages do."""
    try:
        yield
    except InvalidRequest as error:
        if (field := own_field(error.field)) == error.field:
            raise
        raise InvalidRequest(field, error.value, error.limit, error.code) from None


def _origin_of(context: Context) -> CallOrigin:
    given = {key.lower(): str(value) for key, value in context.invocation_metadata() or ()}
    found = request_id_of(given.get(REQUEST_ID_HEADER, given.get("request_id")))
    return CallOrigin(found, given.get("traceparent"), given.get("tracestate"))


def _call(request: inference_pb2.GenerateRequest, codec: TextCodec) -> GenerationCall:
    """Raises InvalidRequest, with the same messages as over HTTP."""
    timeout_s = request.timeout_s if request.HasField("timeout_s") else None
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise InvalidRequest("timeout_s", timeout_s, "it must be a number of seconds above 0")
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SCALARS if request.HasField(name)}
    fields["model"] = request.model or None
    fields["ignore_eos"] = request.ignore_eos
    fields["stop"] = list(request.stop)
    fields["stop_token_ids"] = list(request.stop_token_ids)
    fields["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    fields["user"] = request.user
    if request.prediction:
        fields["prediction"] = {"type": "content", "content": request.prediction}
    if request.HasField("speculation"):
        fields["speculation"] = _speculation(request.speculation)
    if request.service_tier:
        fields["service_tier"] = request.service_tier
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if request.HasField("include_obfuscation"):
        fields["stream_options"] = {"include_obfuscation": request.include_obfuscation}
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured_outputs(request.structured_outputs)
    fields["include_stop_str_in_output"] = request.include_stop_str_in_output
    fields["return_token_ids"] = request.return_token_ids
    kind = request.WhichOneof("input")
    if kind == "conversation":
        if request.echo:
            raise InvalidRequest("echo", True, "a conversation is not echoed; send its text as prompt")
        if request.suffix:
            limit = "a conversation has none; send its text as prompt"
            raise InvalidRequest("suffix", counted(len(request.suffix), "character"), limit)
        fields |= conversation_fields(request) | choice_fields(request) | logprob_fields(request)
        return chat_call(parse_fields(ChatBody, fields), codec.chat_format, timeout_s)
    if kind is None:
        raise InvalidRequest("prompt", MISSING, "one of prompt, prompt_token_ids and conversation is required")
    refuse_chat_fields(request)
    fields["echo"] = request.echo
    fields["suffix"] = request.suffix
    if request.HasField("logprobs"):
        fields["logprobs"] = request.logprobs
    fields["prompt"] = request.prompt if kind == "prompt" else list(request.prompt_token_ids.ids)
    return completion_call(parse_fields(CompletionBody, fields), timeout_s, codec.fill_in_marks)


def _tokenize_fields(request: inference_pb2.TokenizeRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strs}
    if request.HasField("add_special_tokens"):
        fields["add_special_tokens"] = request.add_special_tokens
    kind = request.WhichOneof("input")
    if kind == "conversation":
        return fields | conversation_fields(request)
    refuse_chat_fields(request)
    return fields | ({} if kind is None else {"prompt": request.prompt})


def _speculation(options: inference_pb2.Speculation) -> dict[str, Any]:
    """The fields that are set."""
    fields: dict[str, Any] = {field.name: value for field, value in options.ListFields()}
    for name in ("drafters", "sources"):
        if name in fields:
            fields[name] = list(fields[name])
    if options.cache:
        if options.cache not in _CACHE_USES:
            limit = f"it must be one of {', '.join(map(str, _CACHE_USES))}"
            raise InvalidRequest("speculation.cache", options.cache, limit)
        fields["cache"] = _CACHE_USES[options.cache]
    return fields


def _structured_outputs(outputs: inference_pb2.StructuredOutputs) -> dict[str, Any]:
    fields: dict[str, Any] = {field.name: value for field, value in outputs.ListFields()}
    if "choice" in fields:
        fields["choice"] = list(outputs.choice.texts)
    return fields


def _tell(error: Exception, context: Context) -> None:
    status = status_of(error)
    if status.grpc is grpc.StatusCode.INTERNAL:  # the client gets no details
        logger.error("a gRPC call failed", exc_info=error)
    context.set_code(status.grpc)
    context.set_details(status.message)
    known = request_id.get()
    context.set_trailing_metadata([*([(REQUEST_ID_HEADER, known)] if known else []), *status.trailing_metadata()])
