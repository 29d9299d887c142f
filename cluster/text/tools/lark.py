"""Writes grammars for llguidance, in Lark's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import InvalidRequest, Size
from cluster.constraints.json_schemas import json_rule
from cluster.constraints.structured_outputs import MAX_GRAMMAR_CHARS
from cluster.text.tools.format import SpecialTokenId
from cluster.text.tools.tool import NamedFunction, Tool, ToolChoice

ANY_TEXT = "/(?s:.*)/"
_ANSWER_TEXT = "ANSWER_TEXT"


@dataclass(frozen=True, slots=True)
class Plain:
    """Text that is no mark, even if a special token has the same text: a client's."""

    text: str


class Lark:
    """A grammar in the making. Raises InvalidRequest when it becomes longer than MAX_GRAMMAR_CHARS."""

    def __init__(self, special_token_id: SpecialTokenId, field: str = "tools") -> None:
        """field: what errors name."""
        self._field = field
        self._special_token_id = special_token_id
        self._rules: dict[str, str] = {}
        self._shared: dict[str, str] = {}  # names of rules by their bodies
        self._num_chars = 0

    def rule(self, name: str, body: str) -> None:
        self._num_chars += len(name) + len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            told = Size(f"a grammar of more than {MAX_GRAMMAR_CHARS} characters")
            raise InvalidRequest(self._field, told, "send fewer or shorter schemas")
        self._rules[name] = body

    def shared_rule(self, name: str, body: str) -> str:
        """The name of a rule with this body: another one's, if there is one. Each schema is compiled once."""
        shared = self._shared.setdefault(body, name)
        if shared == name:
            self.rule(name, body)
        return shared

    def mark(self, text: str) -> str:
        """A special token if the vocabulary has one, otherwise its characters."""
        token_id = self._special_token_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def marks(self, *texts: str | Plain) -> str:
        """Marks, as special tokens if the vocabulary has them, and what stands between them. Neighbours that are
        ordinary text become one string, so that they have no boundary at which tokens must end."""
        parts: list[str] = []
        plain = ""
        for text in texts:
            token_id = None if isinstance(text, Plain) else self._special_token_id(text)
            if token_id is None:
                plain += text.text if isinstance(text, Plain) else text
                continue
            parts += [quoted(plain)] if plain else []
            parts.append(f"<[{token_id}]>")
            plain = ""
        return " ".join([*parts, *([quoted(plain)] if plain else [])])

    def is_special(self, text: str) -> bool:
        return self._special_token_id(text) is not None

    def text_up_to(self, name: str, mark: str, text: str = ANY_TEXT) -> str:
        """A rule of this name: text that ends with the first of this mark."""
        if self.is_special(mark):
            self.rule(name, f"{self.text_without(f'{name.upper()}_TEXT', mark, text)} {self.mark(mark)}")
        else:
            self.rule(f"{name}[lazy]", f"{text} {quoted(mark)}")
        return name

    def text_without(self, name: str, mark: str, text: str = ANY_TEXT) -> str:
        """A terminal of this name: text in which the mark does not occur. The text of a special token could also be
        written with ordinary tokens, which parsers cannot tell from it."""
        self.rule(name, f"{text} & {absence_of(mark)}")
        return name

    def written(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{name}: {body}" for name, body in self._rules.items()) + "\n"


def absence_of(mark: str) -> str:
    """Expression of text in which the mark does not occur."""
    escaped = (
        re.escape(mark).replace("/", r"\/").replace("\n", "n").replace("\r", "r")
    )  # re escapes these by a backslash
    return f"~/(?s:.*){escaped}(?s:.*)/"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def line(text: str) -> str:
    return quoted(text + "\n")


def either(bodies: Sequence[str]) -> str:
    return bodies[0] if len(bodies) == 1 else "(" + " | ".join(bodies) + ")"


def arguments_rule(lark: Lark, tool: Tool, index: int) -> str:
    """Name of the rule of a tool's arguments. index: of the tool."""
    return lark.shared_rule(f"arguments_{index}", json_rule({"type": "object", **tool.parameters}, tool.strict))


def answer_text(lark: Lark) -> str:
    """A terminal of any text. See `with_answer_text`."""
    lark.rule(_ANSWER_TEXT, ANY_TEXT)
    return _ANSWER_TEXT


def with_answer_text(grammar: str, text: str) -> str:
    """The grammar with this expression for text of the answer outside calls."""
    return grammar.replace(f"\n{_ANSWER_TEXT}: {ANY_TEXT}\n", f"\n{_ANSWER_TEXT}: {text}\n")


def tools_of(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Tools that a grammar for this choice may call. Raises ValueError if it needs one and there is none."""
    if isinstance(choice, NamedFunction):
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise ValueError(f"tool_choice names {choice.name!r}, which is not among the tools")
    elif choice == "required" and not tools:
        raise ValueError("tool_choice is 'required' and there are no tools")
    return [] if choice == "none" else list(tools)


def json_call(lark: Lark, tools: Sequence[Tool], before: str, after: str, arguments_key: str = "arguments") -> str:
    """Expression of a call like {"name": "f", "arguments": {...}} of one of the tools; "" without tools. before: text.
    after: expression from the last brace on."""
    bodies = []
    for index, tool in enumerate(tools):
        head = f'{tool.name}", "{arguments_key}": '
        bodies.append(f"{quoted(head)} {arguments_rule(lark, tool, index)}")
    head = before + '{"name": "'
    return f"{quoted(head)} {either(bodies)} {after}" if bodies else ""


def repeated(lark: Lark, call: str, separator: str, choice: ToolChoice, parallel: bool) -> str:
    """Expression of all allowed calls. call, separator: expressions of one call, and of the text between two."""
    lark.rule("call", call)
    return "call" if isinstance(choice, NamedFunction) or not parallel else f"call ({separator} call)*"


def answer_with_calls(lark: Lark, trigger: str, calls: str, choice: ToolChoice) -> str:
    """The grammar of answers whose first call begins with this mark. calls: expression of what follows the mark, "" if
    nothing can be called."""
    if not calls:
        lark.rule("start", lark.text_without("FREE_TEXT", trigger, answer_text(lark)))
    elif choice == "auto":
        text = answer_text(lark)
        lark.text_up_to("text_and_mark", trigger, text)
        # Without a special token the other rule ends where the mark is complete, and this one with it.
        lark.rule("free_text", lark.text_without("FREE_TEXT", trigger, text) if lark.is_special(trigger) else text)
        lark.rule("start", f"free_text | text_and_mark {calls}")
    else:
        lark.rule("start", f"{lark.mark(trigger)} {calls}")
    return lark.written()
