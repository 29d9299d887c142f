"""Values of fields that let random calls get far: the served model, tools, and conversations with calls of them."""

from __future__ import annotations

from typing import Any

from paceline_testing.tool_calls import TOOLS
from paceline_testing.toy_gateway import FOX

_CALL = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
_CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "how is it?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5 C"},
    {"role": "assistant", "content": "cold", "reasoning_content": "5 is not much"},
    {"role": "user", "content": "and tomorrow?"},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "how is it?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I must ask"}]},
    {"type": "function_call", "call_id": "call_1", **_CALL},
    {"type": "function_call_output", "call_id": "call_1", "output": "5 C"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "cold"}]},
    {"role": "user", "content": "and tomorrow?"},
]
_BLOCKS = [
    {"role": "user", "content": "how is it?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must ask", "signature": ""},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Bern"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "5 C"}]},
    {"role": "assistant", "content": "It is"},
]
_FUNCTIONS = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in TOOLS]
_CHAT_TOOLS = [{"type": "function", "function": {**one, "strict": True}} for one in _FUNCTIONS]
_LOOSE_TOOLS = [{"type": "function", "function": one} for one in _FUNCTIONS]
_RESPONSES_TOOLS = [{"type": "function", "strict": False, **one} for one in _FUNCTIONS]
_MESSAGES_TOOLS = [{"name": tool.name, "input_schema": tool.parameters} for tool in TOOLS]

_FEW = (1, 2, 20, 60)
_DRAFTERS = (["auto"], ["none"], ["suffix"])


def likely_fields(model: str) -> dict[str, tuple[Any, ...]]:
    """Values by the name of a field, or by the schema's title and that name, which comes first."""
    chats, blocks = (_CHAT, _CHAT[:2]), (_BLOCKS, _BLOCKS[:3], _BLOCKS[:1])
    chat_tools = (_CHAT_TOOLS, _LOOSE_TOOLS)
    return {
        "model": (model,),
        "CompletionBody.prompt": ("hi", FOX, [1, 2, 3], ["a", "b"], [[1], [2, 3]]),
        "ChatBody.messages": chats,
        "TokenizeChatBody.messages": chats,
        "ResponsesBody.input": ("hi", _ITEMS, _ITEMS[:1]),
        "MessagesBody.messages": blocks,
        "CountTokensBody.messages": blocks,
        "ChatBody.tools": chat_tools,
        "TokenizeChatBody.tools": chat_tools,
        "ResponsesBody.tools": (_RESPONSES_TOOLS,),
        "MessagesBody.tools": (_MESSAGES_TOOLS,),
        "CountTokensBody.tools": (_MESSAGES_TOOLS,),
        "max_tokens": _FEW,
        "max_completion_tokens": _FEW,
        "max_output_tokens": _FEW,
        "n": (1, 1, 1, 2),
        "drafters": _DRAFTERS,
        "sources": _DRAFTERS,
        "reasoning_effort": ("low", "none"),
        "stop_token_ids": ([1], []),
        "tokens": ([1, 2], []),
        "arguments": ("{}", "{", "", '{"city": "Bern"}'),
        "tool_call_id": ("call_1",),
        "call_id": ("call_1",),
    }
