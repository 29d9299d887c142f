"""What pydantic finds wrong, in sentences of ours that name field, value and limit. For requests and configurations."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from actors.errors import MISSING, InvalidRequest, Size, spelled

Fields = TypeVar("Fields", bound=BaseModel)

MAX_SHOWN_CHARS = 64  # shown of a wrong value

# Fields that hold text of a conversation. Errors show its length at most.
_PRIVATE_FIELDS = frozenset((
    "prompt", "messages", "content", "prediction", "text", "input", "instructions", "system", "cache_salt",
))  # fmt: skip
_KINDS = frozenset(("role", "type"))  # fields within those that hold no text
_MUST_BE = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "path": "a path",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
    "multiple_of": "it must be a multiple of {multiple_of}",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_too_long": "it must have at most {max_length} characters",
    "string_too_short": "it must have at least {min_length} characters",
    "too_long": "it must have at most {max_length} items",
    "too_short": "it must have at least {min_length} items",
    "string_unicode": "it must be valid Unicode",
}


_NAME = re.compile(r"[\w-]+")
_PYTHON_NAME = re.compile(r"\b(?:None|True|False)\b")


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_whole_numbers(one) for one in value]
    return value


# On whole numbers of requests, and on lists of them: JSON has one kind of number, and some clients write 2 as 2.0.
Whole = BeforeValidator(_whole_numbers)


class StrictFields(BaseModel):
    """A request or a part of one: unknown fields are errors, and nothing is converted but what `Whole` is on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError) -> InvalidRequest:
    """The first problem of a request."""
    problem = error.errors(include_url=False)[0]
    field = field_path(problem["loc"])
    if problem["type"] == "missing":
        return InvalidRequest(field, MISSING, "it is required", "missing_required_parameter")
    value = size_of(problem["input"]) if _is_private(problem) else shown(problem["input"])
    if problem["type"] == "extra_forbidden":
        return InvalidRequest(field, value, "there is no such parameter", "unknown_parameter")
    return InvalidRequest(field, value, limit_of(problem))


def describe(error: ValidationError) -> str:
    """All that is wrong with a configuration, in one line."""
    parts = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            parts.append(f"{field}: unknown key")
        elif problem["type"] == "missing":
            parts.append(f"{field}: it is required")
        elif problem["type"] == "value_error":
            parts.append(f"{field}: {limit_of(problem)}" if problem["loc"] else limit_of(problem))
        else:
            value = re.sub(r"//\S*@", "//...@", spelled(problem["input"]))  # a URL may have a password in it
            parts.append(f"{field} is {value}; {limit_of(problem)}")
    return "; ".join(parts)


def limit_of(problem: ErrorDetails) -> str:
    """What the value must be, in words, from one of the `errors()` of a pydantic ValidationError."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "too_long" and context.get("max_length") == 0:
        return "it must be empty"
    if kind in _BOUNDS:
        limit = _BOUNDS[kind].format(**{name: _in_words(value) for name, value in context.items()})
        return re.sub(r"\b1 (item|character)s\b", r"1 \1", limit)
    for known, words in _MUST_BE.items():
        if kind == known or kind.startswith(f"{known}_"):
            return f"it must be {words}"
    message = problem["msg"].removeprefix("Value error, ")
    return message.replace("Input should", "it must", 1) if message.startswith("Input") else message


def _in_words(bound: object) -> object:
    if isinstance(bound, str):  # the values of a literal
        return _PYTHON_NAME.sub(lambda found: spelled(literal_eval(found[0])), bound)
    return f"{bound:g}" if isinstance(bound, float) else bound


def field_path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _NAME.fullmatch(part):  # others are the names that pydantic and `unions` give to branches of a union
            path += f".{part}" if path else part
    return path[:MAX_SHOWN_CHARS] or "body"


def shown(value: object) -> object:
    """Enough of a value to recognise it. Not for text of prompts and messages: see `size_of`."""
    if value is None or (isinstance(value, (bool, int, float)) and len(repr(value)) <= MAX_SHOWN_CHARS):
        return value
    if isinstance(value, (Mapping, list, tuple)):  # what they hold may be long, or text of a conversation
        return size_of(value)
    text = value if isinstance(value, str) else Size(repr(value))  # only texts are told in quotes
    return text if len(text) <= MAX_SHOWN_CHARS else type(text)(text[:MAX_SHOWN_CHARS] + "...")


def size_of(value: object) -> object:
    """How much a value holds, where the value itself must not be shown."""
    if isinstance(value, str):
        return Size(f"a string of {counted(len(value), 'character')}")
    if isinstance(value, Mapping):
        return Size(f"an object with {counted(len(value), 'field')}")
    if isinstance(value, Sequence):
        return Size(f"a list of {counted(len(value), 'item')}")
    return shown(value)


def counted(count: int, noun: str) -> Size:
    """As in "1 token" and "2 tokens"."""
    return Size(f"{count} {noun}" if count == 1 else f"{count} {noun}s")


def is_text(value: object, *, may_be_empty: bool = False) -> TypeGuard[str]:
    """Whether a tokenizer takes it. Lone surrogates, which JSON and the command line can hold, are not text."""
    if not isinstance(value, str) or not (value or may_be_empty):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_private(problem: ErrorDetails) -> bool:
    """Whether the value may contain text of a conversation. Unknown fields may."""
    if problem["type"] == "extra_forbidden":
        return not isinstance(problem["input"], (bool, int, float))
    return problem["loc"][-1] not in _KINDS and any(part in _PRIVATE_FIELDS for part in problem["loc"])


def checked(kind: type[Fields], fields: Mapping[str, object]) -> Fields:
    """A record of that kind. Raises InvalidRequest for the first field that is wrong."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise first_problem(error) from None
