"""The fields of HTTP bodies: OpenAI's, those of vLLM that are usual, and `speculation`. gRPC uses them too.

Unknown fields and values out of range raise `InvalidRequest`. Fields of other servers are in `foreign_fields`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, Tag, ValidationError
from pydantic_core import from_json

from actors.errors import InvalidRequest, Size
from actors.messages import CacheUse
from cache_service.formats.namespaces import NAME_PATTERN
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.constraints import Constraint, ConstraintFields, constraint_of
from cluster.gateway.requests.foreign_fields import without_foreign
from cluster.gateway.requests.service_tier import ServiceTier, class_of_tier
from cluster.gateway.requests.unions import LIST, TEXT, TYPE_IS, TYPE_OF, text_or_list
from cluster.gateway.requests.unknown_fields import unknown_field
from cluster.generation import (
    HTTP_TEMPERATURE,
    GenerationOptions,
    LogitBias,
    MaxDraftTokens,
    NumLogprobs,
    NumNewTokens,
    SamplingFields,
)
from cluster.text.fill_in import FillInMarks
from cluster.text.text_codec import Prompt
from cluster.validation import StrictFields, Whole, counted, field_path, first_problem, shown, size_of

BodyKind = TypeVar("BodyKind", bound=BaseModel)

UsageChunks = Literal["none", "last", "every"]  # chunks of a stream that have usage
MAX_STOP_CHARS = 256
_MAX_PROBLEMS = 1000
_HALF_PAIR = re.compile("unexpected end of hex escape|lone leading surrogate in hex escape")  # the parser's words
MAX_SALT_CHARS = 256


class StreamOptions(StrictFields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk, where include_usage is true
    include_obfuscation: bool | None = None  # null: as the cluster does it


Sources = Annotated[
    list[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}([.][a-z0-9-]{1,32})?$")]], Field(max_length=16)
]


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


TextContent = Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(LIST)], text_or_list("text parts")]


class Prediction(StrictFields):
    """Text that the caller expects in the answer, such as known text that is edited. It changes speed only."""

    type: Literal["content"]
    content: TextContent


ReasoningEffort = Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]  # chat templates decide which there are


class GenerationFields(SamplingFields, ConstraintFields):
    """Fields that both endpoints have. Null means the default."""

    model: str | None = None
    max_tokens: NumNewTokens | None = None
    n: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_CHARS)]
        | list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]]
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
    min_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # null: true
    return_token_ids: bool | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = None
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @property
    def usage_chunks(self) -> UsageChunks:
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "none"
        return "every" if options.continuous_usage_stats else "last"


# As vLLM's clients send it, of whom some write false for none.
PromptLogprobs = Annotated[NumLogprobs | None, BeforeValidator(lambda value: None if value is False else value)]

Item = TypeVar("Item")
_Checked = Annotated[list[Item], Field(fail_fast=True)]  # the first wrong item ends the check


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[str | _Checked[str] | _Checked[int] | _Checked[list[int]], Whole]
    add_special_tokens: bool | None = None  # null: true
    max_tokens: Annotated[int, Field(ge=0), Whole] | None = None  # 0: with echo
    logprobs: NumLogprobs | None = None
    prompt_logprobs: PromptLogprobs = None  # of the prompt's tokens, and so many of the likeliest in their places
    echo: bool | None = None  # the text and its log-probabilities begin with the prompt
    best_of: Annotated[int, Field(ge=1, le=128), Whole] | None = None  # answers, of which the n likeliest are given
    suffix: str | None = None  # what follows the answer, for models that fill in the middle


def parse_json_object(data: bytes, field: str = "body") -> dict[str, Any]:
    """field: what errors name. Raises InvalidRequest for anything but one JSON object in UTF-8 (NaN and Infinity are
    not JSON)."""
    try:
        parsed = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        reason = _HALF_PAIR.sub("half of a surrogate pair, which is no character,", str(error))
        limit = f"it is not valid JSON: {reason}"
        raise InvalidRequest(field, counted(len(data), "byte"), limit, "invalid_json") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(field, size_of(parsed), "it must be a JSON object", "invalid_json")
    return parsed


def parse_fields(
    kind: type[BodyKind], fields: Mapping[str, Any], unknown: Literal["refuse", "ignore"] = "refuse"
) -> BodyKind:
    """unknown: how unknown fields are treated. Raises InvalidRequest."""
    fields = without_foreign(fields, kind.model_fields)
    try:
        return kind.model_validate(fields, extra="ignore" if unknown == "ignore" else None)
    except ValidationError as error:
        raise _invalid(kind, error) from None


def completion_call(body: CompletionBody, timeout_s: float | None, marks: FillInMarks | None) -> GenerationCall:
    """marks: the model's, None if it has none. Raises InvalidRequest."""
    echo, max_tokens = bool(body.echo), body.max_tokens
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens", 0, "it must be at least 1; 0 needs echo: true")
    call = make_call(
        body,
        None if max_tokens is None else max(1, max_tokens),
        prompts=_prompts(body, marks),
        prompt_field="prompt",
        logprobs=body.logprobs,
        timeout_s=timeout_s,
    )
    call = _ranked(body, replace(call, echo=echo, hides_answer=max_tokens == 0))
    if echo and body.logprobs is not None:
        call = replace(call, options=call.options.model_copy(update={"prompt_logprobs": body.logprobs}))
    call = with_prompt_logprobs(call, body.prompt_logprobs, body.stream)
    return call if body.add_special_tokens is None else replace(call, add_special_tokens=body.add_special_tokens)


def _prompts(body: CompletionBody, marks: FillInMarks | None) -> tuple[Prompt, ...]:
    """With the texts that follow them, if there is a suffix. Raises InvalidRequest."""
    if not body.suffix:
        return prompts_of(body.prompt)
    given = counted(len(body.suffix), "character")
    if marks is None:
        limit = "the model has no special tokens for filling in the middle; write what follows into the prompt"
        raise InvalidRequest("suffix", given, limit, "unsupported_value")
    if body.echo:
        raise InvalidRequest("suffix", given, "with echo it is not taken; leave one of them out", "unsupported_value")
    prompts = (body.prompt,) if isinstance(body.prompt, str) else tuple(body.prompt)
    texts = tuple(marks.prompt(prompt, body.suffix) for prompt in prompts if isinstance(prompt, str))
    if not texts or len(texts) < len(prompts):
        raise InvalidRequest("suffix", given, "it needs a prompt that is text", "unsupported_value")
    return texts


def _ranked(body: CompletionBody, call: GenerationCall) -> GenerationCall:
    """The call for `best_of` answers. 1, which some clients always send, asks for none but the n. Raises
    InvalidRequest."""
    if body.best_of in (None, 1, call.n):
        return call
    assert body.best_of is not None
    if body.best_of < call.n:
        raise InvalidRequest("best_of", body.best_of, f"it must be at least n, which is {call.n}")
    if body.stream:
        limit = "a stream cannot be ranked before it ends; leave out stream, or best_of"
        raise InvalidRequest("best_of", body.best_of, limit, "unsupported_value")
    return replace(call, n=body.best_of, num_given=call.n)


def with_prompt_logprobs(call: GenerationCall, count: int | None, stream: bool | None) -> GenerationCall:
    """count: of the likeliest tokens; None: as it is. Raises InvalidRequest for a stream, which has no place for
    them."""
    if count is None:
        return call
    if stream:
        raise InvalidRequest("prompt_logprobs", count, "a stream has none; leave out stream", "unsupported_value")
    most = max(count, call.options.num_prompt_logprobs)
    return replace(call, prompt_logprobs=count, options=call.options.model_copy(update={"prompt_logprobs": most}))


def make_call(
    body: GenerationFields,
    max_tokens: int | None,
    *,
    prompts: tuple[Prompt, ...],
    prompt_field: str,
    logprobs: int | None,
    timeout_s: float | None,
    form: Constraint | None = None,
) -> GenerationCall:
    """logprobs: as in `GenerationOptions`. form: a constraint from a field of the endpoint's own. Raises
    InvalidRequest."""
    speculation = body.speculation or SpeculationFields()
    stream_options = body.stream_options or StreamOptions()
    constraint, constraint_field = constraint_of(body, form)
    _check_min_tokens(body, max_tokens, constraint)
    return GenerationCall(
        prompts=prompts,
        prompt_field=prompt_field,
        model=body.model,
        n=body.n or 1,
        options=_options(body, max_tokens, constraint, logprobs),
        constraint_field=constraint_field,
        stop=_stops(body.stop),
        shows_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=_salt(body.cache_salt),
        wants_padding=stream_options.include_obfuscation,
        wants_stats=speculation.stats,
        wants_token_sources=speculation.token_sources,
        wants_token_ids=bool(body.return_token_ids),
        prediction=text_of(body.prediction.content) if body.prediction else "",
        timeout_s=timeout_s,
        service_class=class_of_tier(body.service_tier),
    )


def _options(
    body: GenerationFields, max_tokens: int | None, constraint: StructuredOutputs | None, logprobs: int | None
) -> GenerationOptions:
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
        logprobs=logprobs,
        drafters=drafters if speculation.enabled else (),
        max_draft_tokens=speculation.max_draft_tokens,
        namespace=speculation.namespace or "",
        cache=speculation.cache,
    )


def _check_min_tokens(body: GenerationFields, max_tokens: int | None, constraint: StructuredOutputs | None) -> None:
    """Raises InvalidRequest for a least number of tokens, unless nothing ends the answer before max_tokens."""
    least = body.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise InvalidRequest("min_tokens", least, f"it must be at most max_tokens, which is {max_tokens}")
    if least and (not body.ignore_eos or body.stop or body.stop_token_ids or constraint is not None or not max_tokens):
        limit = (
            "a least number of tokens is supported only with ignore_eos and max_tokens, "
            "and without stop, stop_token_ids and structured outputs; leave it out or send 0"
        )
        raise InvalidRequest("min_tokens", least, limit, "unsupported_parameter")


def _drafters(speculation: SpeculationFields) -> tuple[str, ...] | None:
    given, other = speculation.drafters, speculation.sources
    if given is None or other is None:
        given = other if given is None else given
    elif given != other:
        limit = "speculation.drafters is another name of it and says otherwise; give one of them"
        raise InvalidRequest("speculation.sources", shown(other), limit)
    return None if given is None else tuple(given)


def _salt(salt: str | None) -> str:
    """Its value is secret: errors do not show it."""
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", counted(len(salt), "character"), f"it must have at most {MAX_SALT_CHARS}")
    return salt or ""


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if not stop:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def text_of(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    """Raises InvalidRequest for none, and for an empty one."""
    if isinstance(prompt, str):
        prompts: tuple[Prompt, ...] = (prompt,)
    elif prompt and isinstance(prompt[0], int):
        prompts = (cast(tuple[int, ...], tuple(prompt)),)
    else:
        prompts = tuple(part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int))
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt", Size("empty"), "every prompt needs at least one token")
    return prompts


def _invalid(kind: type[BaseModel], error: ValidationError) -> InvalidRequest:
    """The first problem, in words of ours where pydantic would tell of the branches of a union."""
    if error.error_count() > _MAX_PROBLEMS:  # listing them would hold up other calls
        return InvalidRequest("body", Size(f"{error.error_count()} wrong values"), "send fewer, and they are named")
    problem = error.errors(include_url=False)[0]
    top = str(problem["loc"][0]) if problem["loc"] else "body"
    if problem["type"] == "extra_forbidden":
        return unknown_field(kind, problem)
    if problem["type"] == "missing":
        return first_problem(error)
    if problem["type"] == TYPE_OF and isinstance(given := problem["input"], Mapping) and given.get("type") is not None:
        limit = f"it must be {problem['msg'].rpartition(TYPE_IS)[2]}"
        return InvalidRequest(field_path([*problem["loc"], "type"]), shown(given["type"]), limit)
    if top == "prompt" and kind is CompletionBody:
        limit = "it must be a string, a list of strings, a list of token ids or a list of lists of token ids"
        return InvalidRequest("prompt", size_of(problem["input"]), limit)
    if top == "stop":
        limit = f"it must be a string or a list of strings, of 1 to {MAX_STOP_CHARS} characters each"
        return InvalidRequest("stop", shown(problem["input"]), limit)
    return first_problem(error)
