"""Options of drafters as people write them, checked against what each drafter's `create_drafter` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from actors.errors import InvalidRequest

FIELD = "drafter_options"

# Set by other means, or arrays.
_NOT_FOR_PEOPLE = frozenset({"corpora", "tokenizer_fingerprint", "acceptance"})


def option_names(create: Callable[..., object]) -> list[str]:
    """Options of a drafter by the function or class that makes it."""
    parameters = signature(create).parameters.values()
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name not in _NOT_FOR_PEOPLE]


def checked_options(field: str, create: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """The options of one drafter as its own types: text, as from a command line, becomes numbers where they are
    wanted. Raises InvalidRequest naming the option below `field`, its value and what is possible."""
    hints = get_type_hints(create.__init__ if isinstance(create, type) else create)  # type: ignore[misc]
    known = option_names(create)
    checked = {}
    for option, value in given.items():
        if option not in known:
            raise InvalidRequest(f"{field}.{option}", value, f"there is no such option; there are {', '.join(known)}")
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value)
            # NaN or more than 1 would silently turn the drafter's judgement, or the drafter, off.
            if option == "floor" and not 0.0 <= float(checked[option]) <= 1.0:
                raise InvalidRequest(f"{field}.{option}", value, "it must be from 0 to 1")
        except ValidationError as error:
            raise InvalidRequest(f"{field}.{option}", value, _message(error)) from None
    return checked


def _message(error: ValidationError) -> str:
    message = error.errors()[0]["msg"]
    return message[0].lower() + message[1:]
