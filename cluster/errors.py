"""Errors of the cluster side, beside those of `actors.errors`.

PacelineError
└── ConfigError           a configuration file or a command-line setting is wrong: names path, value and remedy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.errors import PacelineError


class ConfigError(PacelineError):
    """A configuration cannot be used; the message is one line for the person who wrote it."""


_LIMITS = {
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be at most {le}",
    "multiple_of": "it must be a multiple of {multiple_of}",
    "finite_number": "it must be a finite number",
    "enum": "it must be {expected}",
    "literal_error": "it must be {expected}",
    "string_too_short": "it must have at least {min_length} characters",
    "string_too_long": "it must have at most {max_length} characters",
    "too_short": "it must have at least {min_length} items",
    "too_long": "it must have at most {max_length} items",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a section with keys",
}


def limit_of(problem: Mapping[str, Any]) -> str:
    """What the value must be, in words, from one of the `errors()` of a pydantic ValidationError."""
    kind = str(problem["type"])
    if kind in _LIMITS:
        return _LIMITS[kind].format(**problem["ctx"])
    for suffix in ("_type", "_parsing", "_from_float", "_attributes_type"):
        if kind.endswith(suffix) and (name := kind.removesuffix(suffix)) in _KINDS:
            return f"it must be {_KINDS[name]}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message.replace("Input should", "it must", 1).rstrip(".")
