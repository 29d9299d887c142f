"""How a model's chat template writes tools, calls and thoughts, and the grammars and parsers of its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.errors import InvalidRequest
from cluster.constraints.json_schemas import check_schema
from cluster.text.special_tokens import special_token_ids
from cluster.text.tools.answer_parser import AnswerParser
from cluster.text.tools.detect import format_of, takes_tools
from cluster.text.tools.format import ToolFormat
from cluster.text.tools.hermes import Hermes
from cluster.text.tools.hermes_prompt import plain_messages
from cluster.text.tools.history import template_messages
from cluster.text.tools.reasoning import (
    ReasoningSplitter,
    effort_variables,
    ends_inside_thought,
    reasoning_marks,
    thinking_variables,
    with_thought,
)
from cluster.text.tools.tool import Tool, ToolChoice

_ONLY_SAID = "%llguidance {}\nstart: @said\n"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call. parallel: whether it may make more than one call."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that the model is told of."""
        return () if self.choice == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.choice not in ("none", "auto")


NO_TOOLS = ToolUse()


class ChatFormat:
    """Made once for a tokenizer."""

    def __init__(self, tokenizer: Any, tool_parser: str = "auto") -> None:
        """tokenizer: from `transformers`. tool_parser: name of a format; auto: as the template shows. Raises ValueError
        for a name that is not known."""
        template = tokenizer.chat_template or ""
        if not isinstance(template, str):
            template = "\n".join(template.values())
        found = format_of(template, tool_parser)
        self._takes_tools = takes_tools(template)
        self._format: ToolFormat = Hermes() if found is None or not self._takes_tools else found
        self._template = template
        self._marks = reasoning_marks(template)
        self.special_ids = special_token_ids(tokenizer)  # of special tokens, by text

    def template_input(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse, field: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for `apply_chat_template`. messages: OpenAI's, with contents that are text or None. Tools
        that the template has no place for go into the system message.

        Raises InvalidRequest for calls and results that do not fit together.
        """
        tools = use.callable_tools
        turns = template_messages(messages, self._format.history_needs, field)
        if not self._takes_tools:
            return list(plain_messages(turns, tools)), None
        return turns, [tool.openai_form for tool in tools] or None

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """Variables with which the chat template asks for thinking."""
        return thinking_variables(self._template)

    def effort_variables(self, effort: str, field: str, told: str | None = None) -> dict[str, Any]:
        """Variables of the chat template for this amount of thinking. told: the client's name for it. Raises
        InvalidRequest for `field` if the template has none."""
        variables = effort_variables(self._template, effort)
        if variables is None:
            limit = "the model's chat template has no variable for it; leave it out, or use chat_template_kwargs"
            raise InvalidRequest(field, told or effort, limit, "unsupported_value")
        return variables

    def starts_inside_thought(self, rendered: str) -> bool:
        """Whether this prompt has begun a thought for the model."""
        return self._marks is not None and ends_inside_thought(rendered, self._marks)

    def parser(self, use: ToolUse, starts_inside: bool) -> AnswerParser | None:
        """For text in which special tokens are spelled out. None: all of an answer is its content."""
        has_calls = bool(use.callable_tools) or self._format.marks_every_answer
        calls = self._format.parser(use.callable_tools) if has_calls else None
        if calls is None and self._marks is None:
            return None
        splitter = None
        if self._marks is not None:
            splitter = ReasoningSplitter(self._marks.begin, self._marks.end, starts_inside)
        return AnswerParser(splitter, calls)

    def calls_grammar(self, use: ToolUse, has_content_grammar: bool) -> str:
        """Grammar of the calls, or with choice auto of text and calls; "": the answer is free. Arguments follow their
        schemas if calls are forced, or if a tool is strict. Raises InvalidRequest for a strict tool whose schema cannot
        be followed."""
        tools = use.callable_tools
        if not tools or not (use.is_forced or has_content_grammar or any(tool.strict for tool in tools)):
            return ""
        for tool in tools:
            if tool.strict:
                check_schema(tool.parameters, f"tools ({tool.name})")
        choice = use.choice
        if choice == "auto" and has_content_grammar:  # then the content is described elsewhere
            choice = "required"
        return self._format.grammar(tools, choice, use.parallel, self.special_ids.get)

    def whole_grammar(self, use: ToolUse, calls: str, content: str, starts_inside: bool) -> str:
        """The grammar of an answer: a thought, if the model has them, then calls or content. calls: of `calls_grammar`.
        content: in llguidance's format. Both "": none."""
        if not calls and not content:
            return ""
        if use.is_forced:
            content = ""
        main = calls or _ONLY_SAID
        if calls and content:
            main = _renamed(calls, "start", "called") + "start: called | @said\n"
        if self._marks is not None:
            main = with_thought(main, self._marks, starts_inside, self.special_ids.get)
        elif not calls:
            return content
        if not content:
            return main
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": main}, _named_said(content)]})


def _renamed(lark: str, old: str, new: str) -> str:
    return re.sub(rf"(?m)^{old}:", f"{new}:", lark, count=1)


def _named_said(grammar: str) -> dict[str, Any]:
    """A grammar, in Lark's notation or in llguidance's JSON, as the one that others call @said."""
    if grammar.lstrip().startswith("{"):
        (only,) = json.loads(grammar)["grammars"]
        return {**only, "name": "said"}
    return {"name": "said", "lark_grammar": grammar}
