"""Hermes, Qwen 2.5 and 3, and many others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.tools.json_call import JsonCall, read_end
from cluster.text.tools.lark import Lark, answer_with_calls, json_call, repeated
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import Tool, ToolChoice

BEGIN, END = "<tool_call>", "</tool_call>"
_MARKS = Marks([BEGIN])


class Hermes(SteppedFormat):
    name = "hermes"

    def detects(self, chat_template: str) -> bool:
        return BEGIN in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        call = json_call(lark, tools, "\n", lark.marks("}\n", END))
        calls = repeated(lark, call, lark.marks("\n", BEGIN), choice, parallel) if call else ""
        return answer_with_calls(lark, BEGIN, calls, choice)


def _read_answer(reader: Reader, output: Output) -> Steps[None]:
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        if (yield from JsonCall(reader, output, bool).read()):
            yield from read_end(reader, output, END)
        else:
            output.content(reader.taken())
