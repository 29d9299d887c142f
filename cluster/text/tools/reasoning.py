"""Separates what a model thinks before its answer from the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cluster.text.tools.events import Event
from cluster.text.tools.format import SpecialTokenId
from cluster.text.tools.lark import ANY_TEXT, Lark, with_answer_text
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_parser import SteppedParser

_MAX_NEWLINES = 16  # at a mark
_SWITCH = "enable_thinking"  # a variable of templates


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    begin: str = "<think>"
    end: str = "</think>"


_KNOWN = (ReasoningMarks(), ReasoningMarks("[THINK]", "[/THINK]"), ReasoningMarks("<seed:think>", "</seed:think>"))


def reasoning_marks(chat_template: str) -> ReasoningMarks | None:
    """None: the template shows no marks known here. Harmony's channels are not marks; its parser tells reasoning."""
    return next((marks for marks in _KNOWN if marks.end in chat_template), None)


def thinking_variables(chat_template: str) -> dict[str, Any]:
    """Variables with which the template asks for thinking; empty if it asks without."""
    return {_SWITCH: True} if _SWITCH in chat_template else {}


def effort_variables(chat_template: str, effort: str) -> dict[str, Any] | None:
    """Variables with which the template asks for this much thinking, such as none, low or high. None: it has none."""
    if "reasoning_effort" in chat_template:
        return {"reasoning_effort": effort}
    if effort != "none":
        return None
    if _SWITCH in chat_template:
        return {_SWITCH: False}
    return {} if reasoning_marks(chat_template) is None else None


def ends_inside_thought(rendered_prompt: str, marks: ReasoningMarks) -> bool:
    """Whether the template has begun a thought for the model."""
    return rendered_prompt.rstrip().endswith(marks.begin)


class ReasoningSplitter:
    """A thought is at the beginning of an answer, or nowhere. Newlines at its marks are left out."""

    def __init__(self, begin: str = "<think>", end: str = "</think>", starts_inside: bool = False) -> None:
        self._parser = SteppedParser(lambda reader, output: _read(reader, output, begin, end, starts_inside))

    def push(self, text: str) -> list[Event]:
        return self._parser.push(text)

    def finish(self) -> list[Event]:
        return self._parser.finish()


def _read(reader: Reader, output: Output, begin: str, end: str, starts_inside: bool) -> Steps[None]:
    yield from reader.spaces()
    # Some templates begin a thought and some models begin it once more.
    if (yield from reader.word(begin)):
        reader.commit()
    elif not starts_inside:
        output.content(reader.taken())
        yield from reader.rest(output.content)
        return
    yield from reader.characters("\n", _MAX_NEWLINES)
    output.reasoning(reader.taken().lstrip("\n"))
    thought = _WithoutLastNewlines(output)
    if (yield from reader.text_until(Marks([end]), thought.add)) is None:
        output.reasoning(thought.newlines)
        return
    yield from reader.characters("\n", _MAX_NEWLINES)
    reader.commit()
    yield from reader.rest(output.content)


class _WithoutLastNewlines:
    def __init__(self, output: Output) -> None:
        self._output = output
        self.newlines = ""

    def add(self, text: str) -> None:
        spoken = text.rstrip("\n")
        if spoken or len(self.newlines) > _MAX_NEWLINES:
            self._output.reasoning(self.newlines + spoken)
            self.newlines = ""
        self.newlines += text[len(spoken) :]


def with_thought(grammar: str, marks: ReasoningMarks, starts_inside: bool, special_token_id: SpecialTokenId) -> str:
    """The grammar of a thought of any text, and of the answer after it that `grammar` describes. starts_inside: the
    prompt has begun the thought; otherwise there may be none."""
    lark = Lark(special_token_id)
    thought = f"{lark.text_up_to('thought', marks.end)} /\\n{{0,2}}/"
    if not starts_inside:
        spaces = r"[ \n]{0,4}"
        if lark.is_special(marks.begin):
            begin = f"/{spaces}/ {lark.mark(marks.begin)}"
        else:  # a thought is no text of the answer
            begin = f"/{spaces}{re.escape(marks.begin)}/"
            grammar = with_answer_text(grammar, f"{ANY_TEXT} & ~/{spaces}{re.escape(marks.begin)}(?s:.*)/")
        thought = f"[{begin} {thought}]"
    lark.rule("start", f"{thought} answer")
    return lark.written() + re.sub(r"(?m)^start:", "answer:", grammar.partition("\n")[2], count=1)
