"""What HTTP bodies may hold: OpenAI's fields, a few that are usual elsewhere, and `speculation`. gRPC uses it too.

Unknown fields and values out of range raise `InvalidRequest`. Fields of OpenAI's that are not served here are named as
such, unless they hold what would be the default anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from actors.errors import InvalidRequest
from actors.messages import CacheUse
from cache_service.formats.namespaces import NAME_PATTERN
from cluster.gateway.call import GenerationCall
from cluster.gateway.constraints import ConstraintFields, constraint_of
from cluster.generation import (
    HTTP_TEMPERATURE,
    GenerationOptions,
    LogitBias,
    MaxDraftTokens,
    NumNewTokens,
    SamplingFields,
)
from cluster.structured_outputs import StructuredOutputs
from cluster.text.text_codec import ChatMessage, Prompt
from cluster.validation import StrictFields, field_path, first_problem, shown, size_of

BodyKind = TypeVar("BodyKind", bound=BaseModel)

MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256

# Harmless values besides null. An ellipsis: every value, it changes nothing here.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "metadata": (...,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (...,),
    "prompt_cache_key": (...,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (...,),
    "reasoning_effort": ("none",),
    "safety_identifier": (...,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(StrictFields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # null: as the cluster does it


Sources = Annotated[list[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]], Field(max_length=16)]


class SpeculationFields(StrictFields):
    """How this call may be speculated on. None of it changes the text."""

    stats: bool = False  # add `speculation` to the answer
    token_sources: bool = False  # add `token_sources` to each choice: [text, who proposed it] for each token
    enabled: bool = True
    drafters: Sources | None = None
    sources: Sources | None = None  # another name of drafters
    max_draft_tokens: MaxDraftTokens | None = None
    cache: CacheUse = "read_write"  # whether it drafts from the shared cache and its answer goes there
    namespace: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")] | None = None  # a part of it that has a name


class TextPart(StrictFields):
    type: Literal["text"]
    text: str


class Prediction(StrictFields):
    """What the caller thinks will come out, as when known text is edited. It changes speed only."""

    type: Literal["content"]
    content: str | list[TextPart]


class GenerationFields(SamplingFields, ConstraintFields):
    """Fields that both endpoints have. Null means the default."""

    model: str | None = None
    max_tokens: NumNewTokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_CHARS)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=4)]
        | None
    ) = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], LogitBias],
            Field(max_length=1024),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]


class Message(StrictFields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: NumNewTokens | None = None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Raises InvalidRequest for anything but one JSON object in UTF-8 (NaN and Infinity are not JSON)."""
    try:
        parsed = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"{len(data)} bytes", f"it is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("body", size_of(parsed), "it must be a JSON object", "invalid_json")
    return parsed


def parse_fields(kind: type[BodyKind], fields: Mapping[str, Any]) -> BodyKind:
    """Raises InvalidRequest."""
    try:
        return kind.model_validate(_refuse_unsupported(fields))
    except ValidationError as error:
        raise _invalid(error) from None


def completion_call(body: CompletionBody, timeout_s: float | None) -> GenerationCall:
    return _call(body, body.max_tokens, prompts=_prompts(body.prompt), prompt_field="prompt", timeout_s=timeout_s)


def chat_call(body: ChatBody, timeout_s: float | None) -> GenerationCall:
    conversation = tuple(
        ChatMessage("system" if message.role == "developer" else message.role, _text(message.content))
        for message in body.messages
    )
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    call = _call(body, max_tokens, prompts=(conversation,), prompt_field="messages", timeout_s=timeout_s)
    return call if newer is None else replace(call, max_tokens_field="max_completion_tokens")


def _call(
    body: GenerationFields,
    max_tokens: int | None,
    *,
    prompts: tuple[Prompt, ...],
    prompt_field: str,
    timeout_s: float | None,
) -> GenerationCall:
    speculation = body.speculation or SpeculationFields()
    stream_options = body.stream_options or StreamOptions()
    constraint, constraint_field = constraint_of(body)
    return GenerationCall(
        prompts=prompts,
        prompt_field=prompt_field,
        model=body.model,
        n=body.n or 1,
        options=_options(body, max_tokens, constraint),
        constraint_field=constraint_field,
        stop=_stops(body.stop),
        cache_salt=_salt(body.cache_salt),
        wants_padding=stream_options.include_obfuscation,
        wants_stats=speculation.stats,
        wants_token_sources=speculation.token_sources,
        prediction=_text(body.prediction.content) if body.prediction else "",
        timeout_s=timeout_s,
    )


def _options(body: GenerationFields, max_tokens: int | None, constraint: StructuredOutputs | None) -> GenerationOptions:
    speculation = body.speculation or SpeculationFields()
    sampling = {name: getattr(body, name) for name in SamplingFields.model_fields}
    if body.temperature is None:
        sampling["temperature"] = HTTP_TEMPERATURE
    drafters = _drafters(speculation)
    return GenerationOptions(
        **sampling,
        structured_outputs=constraint,
        max_new_tokens=max_tokens,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        ignore_eos=bool(body.ignore_eos),
        drafters=drafters if speculation.enabled else (),
        max_draft_tokens=speculation.max_draft_tokens,
        namespace=speculation.namespace or "",
        cache=speculation.cache,
    )


def _drafters(speculation: SpeculationFields) -> tuple[str, ...] | None:
    given, other = speculation.drafters, speculation.sources
    if given is None or other is None:
        given = other if given is None else given
    elif given != other:
        limit = "speculation.drafters is another name of it and says otherwise; give one of them"
        raise InvalidRequest("speculation.sources", shown(other), limit)
    return None if given is None else tuple(given)


def _salt(salt: str | None) -> str:
    """Its value is nobody else's business: errors do not show it."""
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"{len(salt)} characters", f"it must have at most {MAX_SALT_CHARS}")
    return salt or ""


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if not stop:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        prompts: tuple[Prompt, ...] = (prompt,)
    elif prompt and isinstance(prompt[0], int):
        prompts = (tuple(token for token in prompt if isinstance(token, int)),)
    else:
        prompts = tuple(part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int))
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt", "empty", "every prompt needs at least one token")
    return prompts


def _refuse_unsupported(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those that are OpenAI's, not ours, and harmless."""
    kept = {}
    for name, value in fields.items():
        harmless = _UNSUPPORTED.get(name)
        if harmless is None:
            kept[name] = value
        elif value is not None and ... not in harmless and not any(_same(value, one) for one in harmless):
            told = size_of(value) if name == "suffix" else shown(value)  # it is text of a prompt
            raise InvalidRequest(name, told, "this parameter is not supported here", "unsupported_parameter")
    return kept


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first problem, in words of ours where pydantic would tell of the branches of a union."""
    problem = error.errors(include_url=False)[0]
    top = str(problem["loc"][0]) if problem["loc"] else "body"
    if problem["type"] in ("extra_forbidden", "missing"):
        return first_problem(error)
    if top == "prompt":
        limit = "it must be a string, a list of strings, a list of token ids or a list of lists of token ids"
        return InvalidRequest("prompt", size_of(problem["input"]), limit)
    if top == "stop":
        limit = f"it must be a string or up to 4 strings, of 1 to {MAX_STOP_CHARS} characters each"
        return InvalidRequest("stop", shown(problem["input"]), limit)
    if top == "prediction" and "content" in problem["loc"]:
        return InvalidRequest(
            "prediction.content", size_of(problem["input"]), "it must be a string or a list of text parts"
        )
    if top == "messages" and "content" in problem["loc"]:
        field = field_path(problem["loc"][:3])
        return InvalidRequest(field, size_of(problem["input"]), "content must be a string or a list of text parts")
    return first_problem(error)
