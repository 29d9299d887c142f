"""Llama 3: {"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>; several calls are separated
by semicolons."""

from __future__ import annotations

from collections.abc import Container, Sequence

from cluster.text.tools.json_call import JsonCall, show_unless_over
from cluster.text.tools.lark import Lark, answer_text, json_call, quoted, repeated
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import Tool, ToolChoice

_TAG = "<|python_tag|>"
_MARKS = Marks([_TAG])
_TEXT = r"/([ \t\r\n]*[^ \t\r\n{](?s:.*))?/"  # a brace at the beginning begins a call


class Llama3Json(SteppedFormat):
    name = "llama3_json"

    def detects(self, chat_template: str) -> bool:
        return "<|start_header_id|>" in chat_template and '"parameters"' in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output, frozenset(tool.name for tool in tools))

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        call = json_call(lark, tools, "", quoted("}"), "parameters")
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
