"""What constrains an answer, named as vLLM names it, and the grammar that it becomes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from actors.errors import InvalidRequest, Size
from cluster.constraints.json_schemas import COMPACT, ONE_LINE, SPELLING, closed_schema
from cluster.constraints.structural_tag import StructuralTag
from cluster.validation import StrictFields, counted

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 18
MAX_GBNF_CHARS = 1 << 14
MAX_CHOICES = 4096
_MOST_REASON_CHARS = 200
_WHITESPACE_FIELDS = {"whitespace_pattern", "disable_any_whitespace"}
_Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class StructuredOutputs(StrictFields):
    """Exactly one of its fields is set, without those of JSON's white space."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None  # an object, or its text
    json_object: bool | None = None  # any JSON object
    regex: _Text | None = None  # that the whole answer matches
    choice: Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: _Text | None = None  # in Lark's or in GBNF's notation
    structural_tag: StructuralTag | None = None  # structures in free text; an object, or its text
    # Regular expression of white space that may stand between the parts of JSON; null: it is written on one line, with
    # a space after each comma and colon.
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    disable_any_whitespace: bool | None = None  # JSON without white space

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            raise ValueError("it must have exactly one of json, json_object, regex, choice, grammar and structural_tag")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace exclude each other")
        if self.choice is not None and sum(map(len, self.choice)) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"choice must have at most {MAX_GRAMMAR_CHARS} characters in all")
        return self

    @property
    def _given(self) -> list[str]:
        kinds = type(self).model_fields.keys() - _WHITESPACE_FIELDS
        return [name for name in kinds if getattr(self, name) not in (None, False)]

    @property
    def _style(self) -> JsonCompileOptions:
        if self.whitespace_pattern is not None:
            return {**SPELLING, "whitespace_pattern": self.whitespace_pattern}
        return COMPACT if self.disable_any_whitespace else ONE_LINE

    @property
    def kind(self) -> str:
        """The client's name of the field that is set."""
        (name,) = self._given
        return type(self).model_fields[name].alias or name

    def grammar_text(self, field: str) -> str:
        """In llguidance's format; of a structural tag, `structural_tag_grammar` writes it. field: what errors name.

        Raises InvalidRequest.
        """
        assert self.structural_tag is None
        try:
            return self._grammar_text(field)
        except ValueError as error:
            reason = f"it cannot be read: {error}"
            raise InvalidRequest(field, Size("this constraint"), reason[:_MOST_REASON_CHARS]) from None

    def _grammar_text(self, field: str) -> str:
        from llguidance import LLMatcher, grammar_from  # while commands are listed, nothing needs it

        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return grammar_from("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return _lark_text(self.grammar, field)
        schema: dict[str, Any] | str = {"type": "object"} if self.json_schema is None else self.json_schema
        closed = closed_schema(_parsed_schema(schema, field), field)
        return LLMatcher.grammar_from_json_schema(json.dumps(closed), defaults=self._style)


def _parsed_schema(schema: dict[str, Any] | str, field: str) -> dict[str, Any]:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(field, counted(len(text), "character"), f"it must have at most {MAX_GRAMMAR_CHARS}")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, counted(len(text), "character"), f"it is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(field, counted(len(text), "character"), "a JSON schema must be an object")
    return parsed


def _lark_text(grammar: str, field: str) -> str:
    """Lark as it is, GBNF converted, which takes time that is quadratic in the number of rules."""
    from llguidance import LLMatcher, grammar_from

    if grammar.lstrip().startswith("{"):  # llguidance would take it for its own format, past the checks of schemas
        limit = "it must be in the notation of Lark or of GBNF; a JSON schema is sent as one"
        raise InvalidRequest(field, counted(len(grammar), "character"), limit)
    lines = [line.rstrip() for line in grammar.splitlines() if line.strip()]
    if not any("::=" in line for line in lines):
        return LLMatcher.grammar_from_lark(grammar)
    if len(grammar) > MAX_GBNF_CHARS:
        limit = f"in GBNF's notation it must have at most {MAX_GBNF_CHARS}; write it in Lark's"
        raise InvalidRequest(field, counted(len(grammar), "character"), limit)
    return grammar_from("gbnf", "\n".join(lines))
