"""What constrains an answer, named as vLLM names it, and the grammar that it becomes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from actors.errors import InvalidRequest
from cluster.validation import StrictFields

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 4096
# Enough for the indentation of nested values; without a limit, a model may write white space for ever.
_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}

_Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class StructuredOutputs(StrictFields):
    """Exactly one of its fields is set."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: Annotated[dict[str, Any] | _Text | None, Field(alias="json")] = None  # an object, or its text
    json_object: bool | None = None  # any JSON object
    regex: _Text | None = None  # that the whole answer matches
    choice: Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: _Text | None = None  # in Lark's or in GBNF's notation

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            raise ValueError("it must have exactly one of json, json_object, regex, choice and grammar")
        return self

    @property
    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given[0].replace("json_schema", "json")

    def grammar_text(self, field: str) -> str:
        """In llguidance's format. field: what errors name. Raises InvalidRequest."""
        from llguidance import LLMatcher, grammar_from  # while commands are listed, nothing needs it

        if self.json_object:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_WHITESPACE)
        if self.json_schema is not None:
            return LLMatcher.grammar_from_json_schema(_schema_text(self.json_schema, field), defaults=_WHITESPACE)
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return grammar_from("choice", json.dumps(self.choice))
        assert self.grammar is not None
        try:
            return grammar_from("grammar", self.grammar)
        except ValueError as error:
            raise InvalidRequest(field, f"{len(self.grammar)} characters", str(error)) from None


def _schema_text(schema: dict[str, Any] | str, field: str) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(field, f"{len(text)} characters", f"it must have at most {MAX_GRAMMAR_CHARS}")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"{len(text)} characters", f"it is not valid JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(field, f"{len(text)} characters", "a JSON schema is an object, or true or false")
    return text
