"""Fields that are one of several kinds, told apart before they are checked: errors are of the kind that was meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Discriminator

# Tags have a space: `field_path` leaves out what is no identifier, so errors show the field's own path.
TEXT, LIST = "as text", "as list"
TYPE_OF = "type_of"  # the kind of error of a value that is none of them; its message ends with TYPE_IS and the types
TYPE_IS = "type is "


def text_or_list(noun: str) -> Discriminator:
    """For a union of a string, with Tag(TEXT), and a list, with Tag(LIST)."""

    def kind_of(value: Any) -> str | None:
        return TEXT if isinstance(value, str) else LIST if isinstance(value, list) else None

    return Discriminator(
        kind_of,
        custom_error_type="text_or_list",
        custom_error_message=f"it must be a string or a list of {noun}",
    )


def by_type(*kinds: str, default: str | None = None, or_text: bool = False) -> Discriminator:
    """For a union of objects that their field `type` tells apart, with `type_tag` of each. default: the type of an
    object without one. or_text: there is a string with Tag(TEXT) as well."""

    def kind_of(value: Any) -> str | None:
        if isinstance(value, str):
            return TEXT if or_text else None
        found = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        found = default if found is None else found
        return type_tag(found) if found in kinds else None

    text = "a string, or " if or_text else ""
    return Discriminator(
        kind_of,
        custom_error_type=TYPE_OF,
        custom_error_message=f"it must be {text}an object whose {TYPE_IS}{' or '.join(kinds)}",
    )


def type_tag(name: str) -> str:
    return f"type {name}"
