"""Hermes, Qwen 2.5 and 3, and many others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.tools.format import SpecialTokenId, ToolParser
from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.json_call import JsonCall, read_end
from cluster.text.tools.lark import Lark, answer_with_calls, json_call, repeated, tools_of
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_parser import SteppedParser
from cluster.text.tools.tool import Tool, ToolChoice

BEGIN, END = "<tool_call>", "</tool_call>"
_MARKS = Marks([BEGIN])


class Hermes:
    name = "hermes"
    history_needs = HistoryNeeds()
    marks_every_answer = False

    def detects(self, chat_template: str) -> bool:
        return BEGIN in chat_template

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return SteppedParser(_read_answer)

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, special_token_id: SpecialTokenId
    ) -> str:
        lark = Lark(special_token_id)
        call = json_call(lark, tools_of(tools, choice), "\n", lark.marks("}\n", END))
        calls = repeated(lark, call, lark.marks("\n", BEGIN), choice, parallel) if call else ""
        return answer_with_calls(lark, BEGIN, calls, choice)


def _read_answer(reader: Reader, output: Output) -> Steps[None]:
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        if (yield from JsonCall(reader, output, bool).read()):
            yield from read_end(reader, output, END)
        else:
            output.content(reader.taken())
