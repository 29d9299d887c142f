"""Checks the options of drafters against the keyword-only parameters of their constructors, types and ranges.

Constructors do not check ranges again.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Annotated, get_type_hints

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from actors.errors import InvalidRequest

FIELD = "drafter_options"

_GIVEN_BY_ENGINE = frozenset({"automata", "index"})


def between(least: float, most: float) -> AfterValidator:
    """The range of an option, for its annotation. Refuses NaN; None is in every range."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise PydanticCustomError("range", f"it must be from {least} to {most}")
        return value

    return AfterValidator(check)


# Lowest confidence of a node. NaN would silently disable the limit, a value above 1 the drafter.
Floor = Annotated[float, between(0, 1)]


def option_names(drafter: type) -> list[str]:
    """Names of a drafter's options."""
    parameters = signature(drafter).parameters.values()
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name not in _GIVEN_BY_ENGINE]


def checked_options(field: str, drafter: type, given: Mapping[str, object]) -> dict[str, object]:
    """The options of one drafter, converted to their types: text from a command line may become numbers.

    Raises InvalidRequest with the option's name below `field`, its value and the possible ones.
    """
    hints = get_type_hints(drafter.__init__, include_extras=True)  # type: ignore[misc]
    known = option_names(drafter)
    checked: dict[str, object] = {}
    for option, value in given.items():
        if option not in known:
            raise InvalidRequest(f"{field}.{option}", value, f"there is no such option; there are {', '.join(known)}")
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            raise InvalidRequest(f"{field}.{option}", value, _message(error)) from None
    return checked


def _message(error: ValidationError) -> str:
    message = error.errors()[0]["msg"]
    return message[0].lower() + message[1:]
