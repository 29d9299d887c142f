"""DeepSeek V3.1: <｜tool▁calls▁begin｜>, for each call <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>,
and <｜tool▁calls▁end｜>. V3 and R1 write "function" before the separator, and the name and the arguments in a block of
code after it.

The parsers are the same. Grammars differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.json_call import read_arguments, show_unless_over
from cluster.text.tools.lark import Lark, Plain, answer_with_calls, arguments_rule, either, quoted, repeated
from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import Tool, ToolChoice

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CODE_BEGIN, _CODE_END = "```json\n", "\n```"
_KIND = "function"
_MARKS = Marks([_CALLS_BEGIN])
_TEXT_ARGUMENTS = HistoryNeeds(arguments_as_text=True)


class DeepSeekV31(SteppedFormat):
    name = "deepseek_v31"
    history_needs = _TEXT_ARGUMENTS

    def detects(self, chat_template: str) -> bool:
        return _BEGIN in chat_template and "```json" not in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        bodies = []
        for index, tool in enumerate(tools):
            bodies.append(f"{lark.marks(Plain(tool.name), _SEPARATOR)} {arguments_rule(lark, tool, index)}")
        return _answer(lark, bodies, lark.mark(_BEGIN), lark.mark(_END), "", choice, parallel)


class DeepSeekV3(SteppedFormat):
    name = "deepseek_v3"
    history_needs = _TEXT_ARGUMENTS

    def detects(self, chat_template: str) -> bool:
        return _BEGIN in chat_template and "```json" in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        bodies = []
        for index, tool in enumerate(tools):
            head = f"{tool.name}\n{_CODE_BEGIN}"
            bodies.append(f"{quoted(head)} {arguments_rule(lark, tool, index)}")
        begin, end = lark.marks(_BEGIN, _KIND, _SEPARATOR), lark.marks(_CODE_END, _END)
        return _answer(lark, bodies, begin, end, quoted("\n"), choice, parallel)


def _answer(
    lark: Lark, bodies: Sequence[str], begin: str, end: str, separator: str, choice: ToolChoice, parallel: bool
) -> str:
    if not bodies:
        return answer_with_calls(lark, _CALLS_BEGIN, "", choice)
    calls = repeated(lark, f"{begin} {either(bodies)} {end}", separator, choice, parallel)
    return answer_with_calls(lark, _CALLS_BEGIN, f"{calls} {lark.mark(_CALLS_END)}", choice)


def _read_answer(reader: Reader, output: Output) -> Steps[None]:
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        mark = yield from reader.one_of((_BEGIN,))
        while mark == _BEGIN and (yield from _read_call(reader, output)):
            yield from reader.spaces()
            mark = yield from reader.one_of((_BEGIN, _CALLS_END))
            if mark is None:
                show_unless_over(reader, output)
        if mark != _CALLS_END:
            output.content(reader.taken())
        reader.commit()


def _read_call(reader: Reader, output: Output) -> Steps[bool]:
    name = yield from read_name(reader)
    if not name or not (yield from reader.word(_SEPARATOR)):
        return False
    is_code = (yield from reader.peek()) != "{"
    if is_code:
        name = yield from read_name(reader)
        yield from reader.spaces()
        if not name or not (yield from reader.word(_CODE_BEGIN.strip())):
            return False
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            return False
    output.begin_call(name)
    reader.commit()
    if not (yield from read_arguments(reader, output)):
        return False
    for mark in ("```", _END):  # either may be missing
        yield from reader.spaces()
        yield from reader.word(mark)
    reader.commit()
    return True
