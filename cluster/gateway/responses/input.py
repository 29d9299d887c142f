"""The input items of /v1/responses, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from actors.errors import InvalidRequest
from cluster.gateway.requests.unions import LIST, TEXT, by_type, text_or_list, type_tag
from cluster.text.text_codec import ChatMessage, Conversation
from cluster.validation import StrictFields, shown

CallId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictFields):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(StrictFields):
    """Text of an earlier answer, with what came along."""

    type: Literal["output_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None


class Refusal(StrictFields):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(StrictFields):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictFields):
    type: Literal["summary_text"]
    text: str


MessagePart = Annotated[
    Annotated[InputText, Tag(type_tag("input_text"))]
    | Annotated[OutputText, Tag(type_tag("output_text"))]
    | Annotated[Refusal, Tag(type_tag("refusal"))],
    by_type("input_text", "output_text", "refusal"),
]
OutputPart = Annotated[Annotated[InputText, Tag(type_tag("input_text"))], by_type("input_text")]


class MessageItem(StrictFields):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[MessagePart], Tag(LIST)], text_or_list("text parts")]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(StrictFields):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str  # JSON text of an object
    id: str | None = None
    status: Status | None = None
    caller: Any = None
    namespace: None = None
    runs_async: Annotated[Literal[False] | None, Field(alias="async")] = None
    async_: Literal[False] | None = None  # as Python's client names it
    parsed_arguments: Any = None


class FunctionCallOutputItem(StrictFields):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[Annotated[str, Tag(TEXT)] | Annotated[list[InputText], Tag(LIST)], text_or_list("text parts")]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: Any = None
    namespace: None = None


class ReasoningItem(StrictFields):
    """A thought of an earlier answer; templates decide what becomes of it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # of another server: it cannot be read
    status: Status | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")
InputItem = Annotated[
    Annotated[MessageItem, Tag(type_tag("message"))]
    | Annotated[FunctionCallItem, Tag(type_tag("function_call"))]
    | Annotated[FunctionCallOutputItem, Tag(type_tag("function_call_output"))]
    | Annotated[ReasoningItem, Tag(type_tag("reasoning"))],
    by_type(*_KINDS, default="message"),
]
InputField = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag(LIST)],
    text_or_list("items"),
]


@dataclass(slots=True)
class _Answer:
    """Reasoning, text and calls of one message of the assistant, so far."""

    thoughts: list[str] = field(default_factory=list)
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> ChatMessage:
        thoughts = "".join(self.thoughts) if self.thoughts else None
        return ChatMessage("assistant", self.text, tuple(self.calls), reasoning_content=thoughts)


@dataclass(slots=True)
class _Turns:
    """Messages so far. Reasoning, text and calls of one answer are one message of the assistant."""

    done: list[ChatMessage] = field(default_factory=list)
    answer: _Answer | None = None  # that more items may belong to
    call_ids: set[str] = field(default_factory=set)

    def add(self, message: ChatMessage) -> None:
        self.close()
        self.done.append(message)

    def close(self) -> None:
        if self.answer is not None:
            self.done.append(self.answer.message)
        self.answer = None

    def think(self, text: str) -> None:
        self._before_text().thoughts.append(text)

    def say(self, text: str) -> None:
        self._before_text().text = text

    def call(self, call: dict[str, Any]) -> None:
        self._open().calls.append(call)
        self.call_ids.add(call["id"])

    def _before_text(self) -> _Answer:
        """The answer that is open if it has neither text nor calls, or a new one."""
        if self.answer is not None and (self.answer.text or self.answer.calls):
            self.close()
        return self._open()

    def _open(self) -> _Answer:
        if self.answer is None:
            self.answer = _Answer()
        return self.answer


def conversation_of(input: str | Sequence[InputItem], instructions: str | None) -> Conversation:
    """Arguments of calls are not parsed here. Raises InvalidRequest for the output of an unknown call."""
    turns = _Turns()
    if instructions:
        turns.add(ChatMessage("system", instructions))
    if isinstance(input, str):
        turns.add(ChatMessage("user", input))
        return tuple(turns.done)
    for index, item in enumerate(input):
        _take(turns, item, f"input[{index}]")
    turns.close()
    return tuple(turns.done)


def _take(turns: _Turns, item: InputItem, place: str) -> None:
    if isinstance(item, MessageItem):
        if item.role == "assistant":
            turns.say(_text_of(item.content))
        else:
            turns.add(ChatMessage("user" if item.role == "user" else "system", _text_of(item.content)))
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turns.call({"id": item.call_id, "type": "function", "function": function, "field": f"{place}.arguments"})
    elif isinstance(item, FunctionCallOutputItem):
        if item.call_id not in turns.call_ids:
            limit = "it must be the call_id of an earlier function_call in input; nothing is stored between requests"
            raise InvalidRequest(f"{place}.call_id", shown(item.call_id), limit)
        turns.add(ChatMessage("tool", _text_of(item.output), tool_call_id=item.call_id))
    else:
        turns.think(_text_of(item.content or item.summary or []))


def _text_of(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
