"""What a request may ask for, whichever way it comes in: HTTP, gRPC, `LocalEngine` or the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.errors import InvalidRequest

MAX_SHOWN_CHARS = 64  # of a wrong value, in an error

NumNewTokens = Annotated[int, Field(ge=1)]


class StrictFields(BaseModel):
    """Nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingFields(StrictFields):
    """How tokens are drawn. None means the default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # elsewhere -1 is how to say "off"
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None


class LocalFields(SamplingFields):
    """What `LocalEngine.generate` takes besides prompts."""

    max_new_tokens: NumNewTokens | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, le=256)] | None = None


def check_local_fields(fields: Mapping[str, object]) -> None:
    """Raises InvalidRequest."""
    try:
        LocalFields.model_validate(dict(fields))
    except ValidationError as error:
        raise first_problem(error) from None


def is_text(value: object, *, may_be_empty: bool = False) -> TypeGuard[str]:
    """Half a surrogate pair is none: JSON can spell it, and Python keeps bytes that it cannot decode as such, but no
    tokenizer takes it."""
    if not isinstance(value, str) or not (value or may_be_empty):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, token, f"token ids are from 0 to {vocab_size - 1}")


def num_new_tokens(
    asked: int | None,
    default: int,
    num_prompt: int,
    max_model_len: int,
    prompt_field: str,
    asked_field: str,
    max_side_len: int | None = None,
) -> int:
    """What a request may generate: as asked, or the default as far as there is room.

    max_side_len: tokens that prompt or answer alone may have, None: as many as both together. Raises InvalidRequest
    when prompt and answer do not fit into the model.
    """
    if num_prompt == 0:
        raise InvalidRequest(prompt_field, "empty", "a prompt needs at least one token")
    if num_prompt >= max_model_len:
        raise InvalidRequest(
            prompt_field,
            f"{num_prompt} tokens",
            f"the model takes at most {max_model_len} tokens, prompt and answer together",
            "context_length_exceeded",
        )
    if max_side_len is not None and num_prompt > max_side_len:
        limit = f"the model's encoder takes at most {max_side_len} tokens"
        raise InvalidRequest(prompt_field, f"{num_prompt} tokens", limit, "context_length_exceeded")
    if max_side_len is not None and asked is not None and asked > max_side_len:
        limit = f"the model's decoder writes at most {max_side_len} tokens"
        raise InvalidRequest(asked_field, asked, limit, "context_length_exceeded")
    if asked is None:
        return min(default, max_model_len - num_prompt, max_side_len or default)
    if num_prompt + asked > max_model_len:
        raise InvalidRequest(
            asked_field,
            asked,
            f"with {num_prompt} prompt tokens that is more than the model's {max_model_len}",
            "context_length_exceeded",
        )
    return asked


def first_problem(error: ValidationError) -> InvalidRequest:
    """The first problem in the words of our errors."""
    problem = error.errors(include_url=False)[0]
    field = field_path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return InvalidRequest(field, shown(problem["input"]), "there is no such parameter", "unknown_parameter")
    if problem["type"] == "missing":
        return InvalidRequest(field, None, "it is required", "missing_required_parameter")
    return InvalidRequest(field, shown(problem["input"]), problem["msg"].replace("Input should", "it should"))


def field_path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():  # others are the names that pydantic gives to the branches of a union
            path += f".{part}" if path else part
    return path[:MAX_SHOWN_CHARS] or "body"


def shown(value: object) -> object:
    """Enough of a value to recognise it. Never a message's text: those fields show their type only."""
    if isinstance(value, (bool, int, float)) and len(repr(value)) <= MAX_SHOWN_CHARS:
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "..."
    return type(value).__name__
