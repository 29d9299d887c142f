"""Llama 3: {"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>; several calls are separated
by semicolons."""

from __future__ import annotations

from collections.abc import Container, Sequence

from cluster.text.tools.format import SpecialTokenId, ToolParser
from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.json_call import JsonCall, show_unless_over
from cluster.text.tools.lark import Lark, answer_text, json_call, quoted, repeated, tools_of
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_parser import SteppedParser
from cluster.text.tools.tool import Tool, ToolChoice

_TAG = "<|python_tag|>"
_MARKS = Marks([_TAG])
_TEXT = r"/([ \t\r\n]*[^ \t\r\n{](?s:.*))?/"  # a brace at the beginning begins a call


class Llama3Json:
    name = "llama3_json"
    history_needs = HistoryNeeds()
    marks_every_answer = False

    def detects(self, chat_template: str) -> bool:
        return "<|start_header_id|>" in chat_template and '"parameters"' in chat_template

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        names = frozenset(tool.name for tool in tools)
        return SteppedParser(lambda reader, output: _read_answer(reader, output, names))

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, special_token_id: SpecialTokenId
    ) -> str:
        lark = Lark(special_token_id)
        call = json_call(lark, tools_of(tools, choice), "", quoted("}"), "parameters")
        calls = repeated(lark, call, quoted("; "), choice, parallel) if call else ""
        if choice == "auto" and calls:
            tag = f"[{lark.mark(_TAG)}]" if lark.is_special(_TAG) else ""
            lark.rule("FREE_TEXT", f"{answer_text(lark)} & {_TEXT}")
            lark.rule("free_text", "FREE_TEXT")
            lark.rule("start", f"free_text | {tag} {calls}")
        else:
            lark.rule("start", calls or _TEXT)
        return lark.written()


def _read_answer(reader: Reader, output: Output, names: Container[str]) -> Steps[None]:
    yield from reader.spaces()
    if (yield from reader.peek()) == "{":
        yield from _read_calls(reader, output, names)
    else:
        output.content(reader.taken())
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        yield from _read_calls(reader, output, None)


def _read_calls(reader: Reader, output: Output, names: Container[str] | None) -> Steps[None]:
    """names: calls of other functions are content; None: there are none such."""
    while (yield from JsonCall(reader, output, lambda name: names is None or name in names).read()):
        yield from reader.spaces()
        yield from reader.word(";")
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            show_unless_over(reader, output)
            return
    output.content(reader.taken())
