"""The messages and blocks of /v1/messages, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from actors.errors import InvalidRequest
from cluster.gateway.requests.unions import LIST, TEXT, by_type, text_or_list, type_tag
from cluster.text.text_codec import ChatMessage, Conversation
from cluster.validation import StrictFields, shown

CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Block(StrictFields):
    cache_control: Any = None  # prefixes are cached without being told


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(Block):
    """A thought of an earlier answer; templates decide what becomes of it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """A thought of another server, which cannot be read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: CallId
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


Texts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[
        list[Annotated[Annotated[TextBlock, Tag(type_tag("text"))], by_type("text")]], Field(fail_fast=True), Tag(LIST)
    ],
    text_or_list("text blocks"),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts | None = None
    is_error: bool | None = None  # models are told by the content alone
    toolset_name: None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ContentBlock = Annotated[
    Annotated[TextBlock, Tag(type_tag("text"))]
    | Annotated[ThinkingBlock, Tag(type_tag("thinking"))]
    | Annotated[RedactedThinkingBlock, Tag(type_tag("redacted_thinking"))]
    | Annotated[ToolUseBlock, Tag(type_tag("tool_use"))]
    | Annotated[ToolResultBlock, Tag(type_tag("tool_result"))],
    by_type(*_BLOCKS),
]


class InputMessage(StrictFields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[ContentBlock], Field(fail_fast=True), Tag(LIST)],
        text_or_list("blocks"),
    ]


def conversation_of(messages: Iterable[InputMessage], system: str | list[TextBlock] | None) -> Conversation:
    """Raises InvalidRequest for blocks that are not their role's, and for the result of an unknown call."""
    found = [ChatMessage("system", texts_of(system))] if system else []
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if isinstance(message.content, str):
            found.append(ChatMessage(message.role, message.content))
        elif message.role == "assistant":
            found.append(_answer(message.content, call_ids, place))
        else:
            found += _turns(message.role, message.content, call_ids, place)
    return tuple(found)


def texts_of(content: str | list[TextBlock] | None) -> str:
    return "".join(block.text for block in content) if isinstance(content, list) else content or ""


def _answer(blocks: list[ContentBlock], call_ids: set[str], place: str) -> ChatMessage:
    text, thoughts, calls = "", "", []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            text += block.text
        elif isinstance(block, ThinkingBlock):
            thoughts += block.thinking
        elif isinstance(block, ToolUseBlock):
            calls.append({
                "id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input},
            })  # fmt: skip
            call_ids.add(block.id)
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(block, place, number, "results are in messages of role user")
    return ChatMessage("assistant", text, tuple(calls), reasoning_content=thoughts or None)


def _turns(role: str, blocks: list[ContentBlock], call_ids: set[str], place: str) -> list[ChatMessage]:
    """Results are messages of their own; what is between them is one of this role."""
    turns: list[ChatMessage] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock) and role == "user":
            if block.tool_use_id not in call_ids:
                limit = "it must be the id of a tool_use block in an earlier message of the assistant"
                raise InvalidRequest(f"{place}.content[{number}].tool_use_id", shown(block.tool_use_id), limit)
            if texts:
                turns.append(ChatMessage(role, "".join(texts)))
                texts = []
            turns.append(ChatMessage("tool", texts_of(block.content), tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(block, place, number, f"messages of role {role} have none")
    if texts or not turns:
        turns.append(ChatMessage(role, "".join(texts)))
    return turns


def _misplaced(block: ContentBlock, place: str, number: int, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{place}.content[{number}].type", block.type, limit)
