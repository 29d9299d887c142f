"""Unknown parameters: which known one was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from actors.errors import InvalidRequest
from cluster.gateway.requests.foreign_fields import FOREIGN_FIELDS
from cluster.validation import MAX_SHOWN_CHARS, field_path, shown, size_of

_LEAST_LIKENESS = 0.75


def unknown_field(kind: type[BaseModel], problem: ErrorDetails) -> InvalidRequest:
    """The error for a field that `kind` or a part of it does not have; it names the nearest field that there is."""
    *parents, name = problem["loc"]
    value = problem["input"]
    told = shown(value) if isinstance(value, (bool, int, float)) else size_of(value)  # text may be a conversation's
    name = str(name)
    limit = "there is no such parameter"
    if (meant := _nearest(name, _names(kind, parents))) is not None:
        limit = f"{limit}; did you mean {field_path([*parents, meant])}?"
    place = f"{field_path(parents)}." if parents else ""
    given = name if name and name.isprintable() else repr(name)
    return InvalidRequest(place + given[:MAX_SHOWN_CHARS], told, limit, "unknown_parameter")


def _names(kind: type[BaseModel], parents: Sequence[int | str]) -> set[str]:
    """Names of the fields at this place in a body, and at the top those of other servers."""
    kinds = [kind]
    for part in parents:
        inner = [model for one in kinds if part in one.model_fields for model in _models(one, str(part))]
        kinds = inner or kinds  # other parts are indices, and pydantic's names of a union's branches
    names = {field.alias or name for one in kinds for name, field in one.model_fields.items()}
    return names if parents else names | FOREIGN_FIELDS.keys()


def _models(kind: type[BaseModel], field: str) -> Iterator[type[BaseModel]]:
    open_types: list[Any] = [kind.model_fields[field].annotation]
    while open_types:
        one = open_types.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
        open_types += get_args(one)


def _nearest(name: str, names: set[str]) -> str | None:
    found = difflib.get_close_matches(name[:64].lower(), sorted(names), n=1, cutoff=_LEAST_LIKENESS)
    return found[0] if found else None
