"""The fields of /v1/responses: OpenAI's, without those that need a server that stores conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from actors.errors import InvalidRequest
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.constraints import Constraint, json_object_constraint, json_schema_constraint
from cluster.gateway.requests.schema import GenerationFields, ReasoningEffort, make_call
from cluster.gateway.requests.tool_choice import MAX_TOOLS, AllowedFunctions, FunctionName, ToolFieldNames, tool_use_of
from cluster.gateway.requests.unions import TEXT, by_type, type_tag
from cluster.gateway.responses.input import InputField, conversation_of
from cluster.generation import NumLogprobs, NumNewTokens
from cluster.text.chat_format import ChatFormat, ToolUse
from cluster.text.chat_template import TemplateOptions, check_variables
from cluster.text.tools.tool import NamedFunction, Tool, ToolChoice
from cluster.validation import StrictFields, Whole, shown, size_of

WITH_LOGPROBS = "message.output_text.logprobs"
_NOTHING_IS_STORED = "nothing is stored here; send all items of the conversation in input"
_REFUSED = {
    "conversation": _NOTHING_IS_STORED,
    "max_completion_tokens": "here it is max_output_tokens",
    "max_tokens": "here it is max_output_tokens",
    "messages": "here they are input",
    "previous_response_id": _NOTHING_IS_STORED,
    "prompt": "no prompts are stored here; send instructions and input",
    "response_format": "here it is text.format",
}
_TOOL_FIELDS = ToolFieldNames("name", "tool_choice.name", "tool_choice.tools")


class FunctionTool(StrictFields):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # null: true
    defer_loading: Literal[False] | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None


class ChosenFunction(StrictFields):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(StrictFields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[ChosenFunction, Tag(type_tag("function"))]
    | Annotated[AllowedTools, Tag(type_tag("allowed_tools"))],
    by_type("function", "allowed_tools", or_text=True),
]


class PlainFormat(StrictFields):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictFields):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema in any case


class TextFields(StrictFields):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag(type_tag("text"))]
            | Annotated[PlainFormat, Tag(type_tag("json_object"))]
            | Annotated[SchemaFormat, Tag(type_tag("json_schema"))],
            by_type("text", "json_object", "json_schema"),
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ReasoningFields(StrictFields):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None  # thoughts come whole
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesBody(GenerationFields):
    """POST /v1/responses."""

    input: InputField
    instructions: str | None = None
    max_output_tokens: NumNewTokens | None = None
    max_tokens: None = None
    response_format: None = None
    n: Annotated[int, Field(ge=1, le=1), Whole] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None  # null: auto
    parallel_tool_calls: bool | None = None  # null: true
    max_tool_calls: Annotated[int, Field(ge=1), Whole] | None = None  # of tools that the server runs: it runs none
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[Literal[
        "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
        "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
        "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    ]] | None = None  # only the first changes anything  # fmt: skip
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None  # the answer repeats it
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None  # the answer repeats these two
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, without unsupported ones that are null. Raises InvalidRequest for fields that need a store,
    and for names of other endpoints."""
    for name, reason in _REFUSED.items():
        if fields.get(name) is not None:
            value = fields[name]
            told = size_of(value) if name in ("messages", "prompt") else shown(value)
            raise InvalidRequest(name, told, reason, "unsupported_parameter")
    for name in ("background", "store"):
        if fields.get(name) is True:
            limit = f"nothing is stored here; send {name}: false, or leave it out"
            raise InvalidRequest(name, True, limit, "unsupported_value")
    return {name: value for name, value in fields.items() if name not in _REFUSED}


def responses_call(body: ResponsesBody, chat_format: ChatFormat, timeout_s: float | None) -> GenerationCall:
    """Raises InvalidRequest."""
    call = make_call(
        body,
        body.max_output_tokens,
        prompts=(conversation_of(body.input, body.instructions),),
        prompt_field="input",
        logprobs=_num_logprobs(body),
        timeout_s=timeout_s,
        form=_form_of(body.text),
    )
    template = TemplateOptions(variables=_variables(body, chat_format))
    return replace(call, template=template, tool_use=_tool_use(body), max_tokens_field="max_output_tokens")


def _num_logprobs(body: ResponsesBody) -> int | None:
    if WITH_LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, f'it needs include: ["{WITH_LOGPROBS}"]')
    return None


def _form_of(text: TextFields | None) -> Constraint | None:
    format = None if text is None else text.format
    if isinstance(format, SchemaFormat):
        return json_schema_constraint(format.json_schema, "text.format.schema")
    return json_object_constraint("text.format") if format is not None and format.type == "json_object" else None


def _variables(body: ResponsesBody, chat_format: ChatFormat) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    check_variables(variables, "chat_template_kwargs")
    effort = None if body.reasoning is None else body.reasoning.effort
    return variables if effort is None else {**chat_format.effort_variables(effort, "reasoning.effort"), **variables}


def _tool_use(body: ResponsesBody) -> ToolUse:
    tools = [
        Tool(tool.name, tool.description or "", tool.parameters or {}, strict=tool.strict is not False)
        for tool in body.tools or ()
    ]
    return tool_use_of(tools, _wanted(body.tool_choice), body.parallel_tool_calls is not False, _TOOL_FIELDS)


def _wanted(choice: ToolChoiceField | None) -> ToolChoice | AllowedFunctions:
    if isinstance(choice, AllowedTools):
        return AllowedFunctions(frozenset(tool.name for tool in choice.tools), choice.mode)
    return NamedFunction(choice.name) if isinstance(choice, ChosenFunction) else choice or "auto"
