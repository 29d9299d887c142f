"""Conversations and tools of gRPC requests, as the fields of HTTP bodies, which check them."""

from __future__ import annotations

from typing import Any

from actors.errors import InvalidRequest, Size
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.requests.schema import parse_json_object
from cluster.validation import counted

_MODES = {
    inference_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    inference_pb2.TOOL_CHOICE_MODE_NONE: "none",
    inference_pb2.TOOL_CHOICE_MODE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: "required",
}


_OWN_FIELDS = {
    "add_generation_prompt": "chat_template.add_generation_prompt",
    "chat_template_kwargs": "chat_template.kwargs",
    "reasoning_effort": "chat_template.reasoning_effort",
    "tool_choice.function.name": "tool_choice.function",
    "top_logprobs": "logprobs",
}


def conversation_fields(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """The messages, and how the template renders them. Raises InvalidRequest for texts that are not JSON objects."""
    fields: dict[str, Any] = {
        "messages": [_message(message) for message in request.conversation.messages],
        "continue_final_message": request.chat_template.continue_final_message,
    }
    if request.tools:
        fields["tools"] = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    if request.chat_template.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = request.chat_template.add_generation_prompt
    if request.chat_template.reasoning_effort:
        fields["reasoning_effort"] = request.chat_template.reasoning_effort
    if request.chat_template.kwargs:
        encoded = request.chat_template.kwargs.encode()
        fields["chat_template_kwargs"] = parse_json_object(encoded, "chat_template.kwargs")
    return fields


def choice_fields(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    if request.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    kind = request.tool_choice.WhichOneof("choice")
    if kind == "function":
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.function}}
    elif kind == "mode":
        mode = request.tool_choice.mode
        if mode not in _MODES:
            raise InvalidRequest("tool_choice.mode", mode, f"it must be one of {', '.join(map(str, _MODES))}")
        fields["tool_choice"] = _MODES[mode]
    return fields


def logprob_fields(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    if not request.HasField("logprobs"):
        return {}
    return {"logprobs": True, "top_logprobs": request.logprobs}


def refuse_chat_fields(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> None:
    """Raises InvalidRequest for what only a conversation can have."""
    if request.tools:
        limit = "they need a conversation in place of the prompt"
        raise InvalidRequest("tools", counted(len(request.tools), "tool"), limit)
    given = {field.name for field, _ in request.ListFields()}
    for name in ("chat_template", "tool_choice", "parallel_tool_calls"):
        if name in given:
            raise InvalidRequest(name, Size("given"), "it needs a conversation in place of the prompt")


def own_field(field: str) -> str:
    """The path of a field in the gRPC messages, from its path in the HTTP body."""
    return _OWN_FIELDS.get(field) or field.replace("].function.", "].")


def _message(message: inference_pb2.Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = list(map(_call, message.tool_calls))
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    return fields


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: inference_pb2.Tool, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters:
        function["parameters"] = parse_json_object(tool.parameters.encode(), f"tools[{index}].parameters")
    return {"type": "function", "function": function}
