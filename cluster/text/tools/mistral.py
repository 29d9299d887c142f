"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and since 2025 [TOOL_CALLS]f[ARGS]{...} for each call.

The parsers are the same. Grammars differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.json_call import JsonCall, read_arguments, show_unless_over
from cluster.text.tools.lark import (
    Lark,
    Plain,
    answer_with_calls,
    arguments_rule,
    either,
    json_call,
    quoted,
    repeated,
)
from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import Tool, ToolChoice

_BEGIN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MARKS = Marks([_BEGIN])
_SHORT_IDS = HistoryNeeds(short_ids=True)


class MistralArray(SteppedFormat):
    name = "mistral"
    history_needs = _SHORT_IDS

    def detects(self, chat_template: str) -> bool:
        return _BEGIN in chat_template and _ARGUMENTS not in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        call = json_call(lark, tools, "", quoted("}"))
        # Tokenizers of some versions write a space before the bracket.
        calls = f"/ ?\\[/ {repeated(lark, call, quoted(', '), choice, parallel)} {quoted(']')}" if call else ""
        return answer_with_calls(lark, _BEGIN, calls, choice)


class MistralArgs(SteppedFormat):
    name = "mistral_args"
    history_needs = _SHORT_IDS

    def detects(self, chat_template: str) -> bool:
        return _BEGIN in chat_template and _ARGUMENTS in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output)

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        bodies = []
        for index, tool in enumerate(tools):
            bodies.append(f"{lark.marks(Plain(tool.name), _ARGUMENTS)} {arguments_rule(lark, tool, index)}")
        calls = repeated(lark, either(bodies), lark.mark(_BEGIN), choice, parallel) if bodies else ""
        return answer_with_calls(lark, _BEGIN, calls, choice)


def _read_answer(reader: Reader, output: Output) -> Steps[None]:
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        if (yield from reader.peek()) == "[":
            yield from _read_array(reader, output)
        elif not (yield from _read_named(reader, output)):
            output.content(reader.taken())


def _read_array(reader: Reader, output: Output) -> Steps[None]:
    separator = yield from reader.one_of(("[",))
    while separator in ("[", ","):
        yield from reader.spaces()
        if not (yield from JsonCall(reader, output, bool).read()):
            output.content(reader.taken())
            return
        yield from reader.spaces()
        separator = yield from reader.one_of((",", "]"))
    if separator is None:
        show_unless_over(reader, output)
    reader.commit()


def _read_named(reader: Reader, output: Output) -> Steps[bool]:
    name = yield from read_name(reader)
    for mark in (_ID, _ARGUMENTS):  # either may be missing
        if (yield from reader.peek()) == "[":
            found = yield from reader.one_of((_ID, _ARGUMENTS) if mark == _ID else (_ARGUMENTS,))
            if found is None:
                return False
            if found == _ID:
                yield from read_name(reader)
    yield from reader.spaces()
    if not name or (yield from reader.peek()) != "{":
        return False
    output.begin_call(name)
    reader.commit()
    return (yield from read_arguments(reader, output))
