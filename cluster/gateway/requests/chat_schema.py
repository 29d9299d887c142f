"""The fields of chat completions: messages, tools, and how the chat template renders them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from actors.errors import InvalidRequest
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.schema import (
    GenerationFields,
    PromptLogprobs,
    ReasoningEffort,
    TextContent,
    make_call,
    text_of,
    with_prompt_logprobs,
)
from cluster.gateway.requests.tool_choice import MAX_TOOLS, AllowedFunctions, FunctionName, ToolFieldNames, tool_use_of
from cluster.gateway.requests.unions import TEXT, by_type, type_tag
from cluster.generation import NumLogprobs, NumNewTokens
from cluster.text.chat_format import ChatFormat, ToolUse
from cluster.text.chat_template import TemplateOptions, check_variables
from cluster.text.text_codec import ChatMessage, Conversation
from cluster.text.tools.tool import NamedFunction, Tool, ToolChoice
from cluster.validation import StrictFields, Whole

_TOOL_FIELDS = ToolFieldNames("function.name", "tool_choice.function.name", "tool_choice.allowed_tools.tools")


class CalledFunction(StrictFields):
    name: FunctionName
    arguments: str  # JSON text of an object


class ToolCall(StrictFields):
    """A call that an earlier answer made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Whole] | None = None  # as in a stream's deltas


class Message(StrictFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier answer; templates decide what becomes of it
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class FunctionDefinition(StrictFields):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; null: no arguments are described
    strict: bool | None = None  # arguments follow the schema even where the model is free to call


class ToolDefinition(StrictFields):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionOfChoice(StrictFields):
    name: FunctionName


class NamedToolChoice(StrictFields):
    type: Literal["function"]
    function: FunctionOfChoice


class AllowedTools(StrictFields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictFields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[NamedToolChoice, Tag(type_tag("function"))]
    | Annotated[AllowedToolsChoice, Tag(type_tag("allowed_tools"))],
    by_type("function", "allowed_tools", or_text=True),
]


class TemplateFields(StrictFields):
    """How messages become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None  # null: auto if there are tools
    parallel_tool_calls: bool | None = None  # null: true
    add_generation_prompt: bool | None = None  # null: unless continue_final_message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # null: as the chat template has it
    add_special_tokens: bool | None = None  # the template writes them: it must not be true


class ChatBody(TemplateFields, GenerationFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: NumNewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    prompt_logprobs: PromptLogprobs = None  # of the rendered prompt's tokens


def chat_call(body: ChatBody, chat_format: ChatFormat, timeout_s: float | None) -> GenerationCall:
    """Raises InvalidRequest."""
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    conversation = conversation_of(body)
    call = make_call(
        body,
        max_tokens,
        prompts=(conversation,),
        prompt_field="messages",
        logprobs=_num_logprobs(body),
        timeout_s=timeout_s,
    )
    call = replace(call, template=template_options(body, chat_format), tool_use=tool_use(body))
    call = with_prompt_logprobs(call, body.prompt_logprobs, body.stream)
    return call if newer is None else replace(call, max_tokens_field="max_completion_tokens")


def conversation_of(body: TemplateFields) -> Conversation:
    return tuple(_chat_message(message) for message in body.messages)


def _chat_message(message: Message) -> ChatMessage:
    return ChatMessage(
        "system" if message.role == "developer" else message.role,
        text_of(message.content),
        tool_calls=tuple(call.model_dump(exclude={"index"}) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def tool_use(body: TemplateFields) -> ToolUse:
    """Raises what `tool_use_of` raises."""
    tools = [
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters or {},
            strict=bool(tool.function.strict),
        )
        for tool in body.tools or ()
    ]
    return tool_use_of(tools, _wanted(body.tool_choice), body.parallel_tool_calls is not False, _TOOL_FIELDS)


def _wanted(choice: ToolChoiceField | None) -> ToolChoice | AllowedFunctions:
    if isinstance(choice, AllowedToolsChoice):
        names = frozenset(named.function.name for named in choice.allowed_tools.tools)
        return AllowedFunctions(names, choice.allowed_tools.mode)
    if isinstance(choice, NamedToolChoice):
        return NamedFunction(choice.function.name)
    return choice or "auto"


def template_options(body: TemplateFields, chat_format: ChatFormat) -> TemplateOptions:
    """Raises InvalidRequest for options that exclude each other, or that are not the template's."""
    variables = body.chat_template_kwargs or {}
    check_variables(variables, "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables = chat_format.effort_variables(body.reasoning_effort, "reasoning_effort") | variables
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens", True, "the chat template writes the special tokens; leave it out")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        limit = "with continue_final_message it must be false; leave it out"
        raise InvalidRequest("add_generation_prompt", True, limit)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return TemplateOptions(opens, continues, variables)


def _num_logprobs(body: ChatBody) -> int | None:
    """As `GenerationOptions.logprobs`. Raises InvalidRequest for top_logprobs alone."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "it needs logprobs: true")
    return None
