"""What a request asks of the form of its answer, by any of the usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from actors.errors import MISSING, InvalidRequest, Size
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.validation import StrictFields, checked

_TAG_FIELDS = ("structures", "triggers", "format")


class JsonSchemaFormat(StrictFields):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # null: any value
    strict: bool | None = None  # the answer follows the schema in any case


class ResponseFormat(StrictFields):
    """OpenAI's, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None  # of a structural tag, as are the next two
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None  # of its newer shape


class ConstraintFields(StrictFields):
    """At most one of these constrains an answer; null is none."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's, as are the following older names
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None  # of guided_json


Constraint = tuple[StructuredOutputs, str]  # and the field of the request that errors name


def constraint_of(body: ConstraintFields, form: Constraint | None = None) -> Constraint | tuple[None, str]:
    """form: one from a field of the endpoint's own. Raises InvalidRequest for more than one."""
    given: list[Constraint] = [] if form is None else [form]
    if body.response_format is not None and body.response_format.type != "text":
        given.append(_of_format(body.response_format))
    if body.structured_outputs is not None:
        given.append((body.structured_outputs, f"structured_outputs.{body.structured_outputs.kind}"))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            style = {"whitespace_pattern": body.guided_whitespace_pattern} if name == "json" else {}
            given.append((_guided(name, value, style), f"guided_{name}"))
    if len(given) > 1:
        fields = " and ".join(field.partition(".")[0] for _, field in given)
        raise InvalidRequest(given[1][1], Size("a second constraint"), f"an answer follows one; there are {fields}")
    return given[0] if given else (None, "")


def _guided(name: str, value: object, style: dict[str, Any]) -> StructuredOutputs:
    try:
        return checked(StructuredOutputs, {name: value, **style})
    except InvalidRequest as error:
        raise InvalidRequest(f"guided_{error.field}", error.value, error.limit) from None


def _of_format(format: ResponseFormat) -> Constraint:
    tag = {name: value for name in _TAG_FIELDS if (value := getattr(format, name)) is not None}
    if format.type == "structural_tag":
        return _structural_tag(tag), "response_format"
    for name in tag:
        raise InvalidRequest(f"response_format.{name}", Size("given"), "it is taken only with type structural_tag")
    if format.type == "json_object":
        return json_object_constraint("response_format")
    if format.json_schema is None:
        raise InvalidRequest("response_format.json_schema", MISSING, "type json_schema needs it")
    return json_schema_constraint(format.json_schema.json_schema, "response_format.json_schema.schema")


def json_object_constraint(field: str) -> Constraint:
    return checked(StructuredOutputs, {"json_object": True}), field


def json_schema_constraint(schema: Mapping[str, Any] | None, field: str) -> Constraint:
    """schema: None: any value."""
    return checked(StructuredOutputs, {"json": schema or {}}), field


def _structural_tag(given: Mapping[str, Any]) -> StructuredOutputs:
    try:
        return checked(StructuredOutputs, {"structural_tag": given})
    except InvalidRequest as error:
        field = error.field.replace("structural_tag", "response_format", 1)
        raise InvalidRequest(field, error.value, error.limit, error.code) from None
