"""The fields of /v1/messages and /v1/messages/count_tokens: Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from actors.errors import InvalidRequest
from cluster.gateway.messages.input import InputMessage, Texts, conversation_of
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.constraints import json_schema_constraint
from cluster.gateway.requests.schema import MAX_STOP_CHARS, GenerationFields, make_call
from cluster.gateway.requests.tool_choice import MAX_TOOLS, FunctionName, ToolFieldNames, tool_use_of
from cluster.gateway.requests.unions import by_type, type_tag
from cluster.generation import NumNewTokens
from cluster.text.chat_format import ChatFormat, ToolUse
from cluster.text.chat_template import TemplateOptions, check_variables
from cluster.text.text_codec import Conversation
from cluster.text.tools.tool import NamedFunction, Tool, ToolChoice
from cluster.validation import StrictFields, Whole, shown

_REFUSED = {
    "max_completion_tokens": "here it is max_tokens",
    "response_format": "here it is output_config.format",
    "stop": "here they are stop_sequences",
}
_TOOL_FIELDS = ToolFieldNames("name", "tool_choice.name", "tool_choice")


class ClientTool(StrictFields):
    """A tool that the client runs; the server runs none."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they come
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class FreeChoice(StrictFields):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictFields):
    type: Literal["none"]


class NamedChoice(StrictFields):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


ToolChoiceField = Annotated[
    Annotated[FreeChoice, Tag(type_tag("auto"))]
    | Annotated[FreeChoice, Tag(type_tag("any"))]
    | Annotated[NoChoice, Tag(type_tag("none"))]
    | Annotated[NamedChoice, Tag(type_tag("tool"))],
    by_type("auto", "any", "tool", "none"),
]


class Thinking(StrictFields):
    """budget_tokens: max_tokens bounds thoughts and text together; there is no limit of thoughts alone."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    display: Literal["summarized"] | None = None  # thoughts come whole


class SchemaFormat(StrictFields):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictFields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class KeepsThoughts(StrictFields):
    """An edit of the context that changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(StrictFields):
    edits: list[KeepsThoughts] | None = None


class Metadata(StrictFields):
    user_id: str | None = None


class PromptFields(StrictFields):
    """What becomes the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None  # null: auto
    thinking: Thinking | None = None  # null: as the chat template has it
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensBody(PromptFields):
    """POST /v1/messages/count_tokens."""

    model: str | None = None


class MessagesBody(PromptFields, GenerationFields):
    """POST /v1/messages."""

    max_tokens: NumNewTokens
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] | None = None
    stop: None = None
    response_format: None = None
    n: Annotated[int, Field(ge=1, le=1), Whole] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]  # the tenant's class
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    conversation: Conversation
    template: TemplateOptions
    tool_use: ToolUse


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, without unsupported ones that are null. Raises InvalidRequest for names of other
    endpoints."""
    for name, reason in _REFUSED.items():
        if fields.get(name) is not None:
            raise InvalidRequest(name, shown(fields[name]), reason, "unsupported_parameter")
    return {name: value for name, value in fields.items() if name not in _REFUSED}


def messages_call(body: MessagesBody, chat_format: ChatFormat, timeout_s: float | None) -> GenerationCall:
    """Raises InvalidRequest."""
    prompt = messages_prompt(body, chat_format)
    form = None
    if body.output_config is not None and body.output_config.format is not None:
        form = json_schema_constraint(body.output_config.format.json_schema, "output_config.format.schema")
    call = make_call(
        body,
        body.max_tokens,
        prompts=(prompt.conversation,),
        prompt_field="messages",
        logprobs=None,
        timeout_s=timeout_s,
        form=form,
    )
    return replace(
        call,
        template=prompt.template,
        tool_use=prompt.tool_use,
        stop=tuple(body.stop_sequences or ()),
        stop_field="stop_sequences",
    )


def messages_prompt(body: PromptFields, chat_format: ChatFormat) -> MessagesPrompt:
    """An answer continues a last message of the assistant. Raises InvalidRequest."""
    conversation = conversation_of(body.messages, body.system)
    last = conversation[-1]
    continues = last.role == "assistant" and not last.tool_calls
    template = TemplateOptions(not continues, continues, _variables(body, chat_format))
    return MessagesPrompt(conversation, template, _tool_use(body))


def _variables(body: PromptFields, chat_format: ChatFormat) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    check_variables(given, "chat_template_kwargs")
    variables: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        variables |= chat_format.effort_variables(body.output_config.effort, "output_config.effort")
    if body.thinking is not None:
        if body.thinking.type == "disabled":
            variables |= chat_format.effort_variables("none", "thinking.type", told="disabled")
        else:
            variables |= chat_format.thinking_variables
    return variables | given


def _tool_use(body: PromptFields) -> ToolUse:
    tools = [
        Tool(tool.name, tool.description or "", tool.input_schema, strict=bool(tool.strict))
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    parallel = isinstance(choice, NoChoice) or choice is None or not choice.disable_parallel_tool_use
    return tool_use_of(tools, _wanted(choice), parallel, _TOOL_FIELDS)


def _wanted(choice: ToolChoiceField | None) -> ToolChoice:
    if isinstance(choice, NamedChoice):
        return NamedFunction(choice.name)
    if choice is None or choice.type == "auto":
        return "auto"
    return "required" if choice.type == "any" else "none"
