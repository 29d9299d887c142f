"""Structures in free text, as vLLM names them: after a trigger the answer goes on as one of the structures does."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cluster.validation import StrictFields

MAX_STRUCTURES = 128
MAX_MARK_CHARS = 1024
MAX_TAG_CHARS = 1 << 18  # of its text, and of all schemas together

_Mark = Annotated[str, Field(min_length=1, max_length=MAX_MARK_CHARS)]


def _parsed(text: str) -> Any:
    if len(text) > MAX_TAG_CHARS:
        raise ValueError(f"it has {len(text)} characters, and at most {MAX_TAG_CHARS} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


class Structure(StrictFields):
    """begin, JSON that follows the schema, and end."""

    begin: _Mark
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    end: Annotated[str, Field(max_length=MAX_MARK_CHARS)]


class StructuralTag(StrictFields):
    """Free text in which each trigger begins a structure; an object, or its JSON text. Every begin starts with one
    trigger. No trigger is part of another, which needs the vocabulary to be checked."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_STRUCTURES)]
    triggers: Annotated[list[_Mark], Field(min_length=1, max_length=MAX_STRUCTURES)]

    @model_validator(mode="before")
    @classmethod
    def _check_shape(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = _parsed(given)
        if isinstance(given, dict) and "format" in given:
            raise ValueError("the newer shape with format is not taken; send structures and triggers")
        return given

    @model_validator(mode="after")
    def _check_size(self) -> StructuralTag:
        if sum(len(json.dumps(structure.json_schema)) for structure in self.structures) > MAX_TAG_CHARS:
            raise ValueError(f"its schemas must have at most {MAX_TAG_CHARS} characters in all")
        return self
