"""Qwen3-Coder: <tool_call>, <function=f>, for each argument <parameter=k>, the value in lines of its own, </parameter>,
then </function> and </tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.format import SpecialTokenId, ToolParser
from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.json_call import read_end
from cluster.text.tools.lark import Lark, answer_with_calls, either, line, repeated, tools_of
from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.stepped_parser import SteppedParser
from cluster.text.tools.tool import Tool, ToolChoice
from cluster.text.tools.typed_arguments import TypedArguments
from cluster.text.tools.typed_grammar import ValueStyle, typed_members

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_KEY_CHARS = 256
_MARKS = Marks([_BEGIN, _FUNCTION])  # models leave the outer mark out
_VALUE_MARKS = Marks(["\n" + _PARAMETER_END, _PARAMETER_END])


class Qwen3Coder:
    name = "qwen3_coder"
    history_needs = HistoryNeeds()
    marks_every_answer = False

    def detects(self, chat_template: str) -> bool:
        return _FUNCTION in chat_template and _PARAMETER in chat_template

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        schemas = {tool.name: tool.parameters for tool in tools}
        return SteppedParser(lambda reader, output: _read_answer(reader, output, schemas))

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, special_token_id: SpecialTokenId
    ) -> str:
        lark = Lark(special_token_id)
        style = ValueStyle(
            before_key=(_PARAMETER,), after_key=(">\n",), end=_PARAMETER_END, before_end=("\n",), after_value=("\n",)
        )
        bodies = [
            f"{line(tool.name + '>')} {typed_members(lark, tool, index, style)}"
            for index, tool in enumerate(tools_of(tools, choice))
        ]
        if not bodies:
            return answer_with_calls(lark, _BEGIN, "", choice)
        begin, end = lark.marks("\n", _FUNCTION), lark.marks(_FUNCTION_END, "\n", _END)
        call = f"{begin} {either(bodies)} {end}"
        return answer_with_calls(lark, _BEGIN, repeated(lark, call, lark.marks("\n", _BEGIN), choice, parallel), choice)


def _read_answer(reader: Reader, output: Output, schemas: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    while mark := (yield from reader.text_until(_MARKS, output.content)):
        if mark == _BEGIN:
            yield from reader.spaces()
        if mark == _BEGIN and not (yield from reader.word(_FUNCTION)):
            output.content(reader.taken())
            continue
        name = yield from read_name(reader)
        if not name or not (yield from reader.word(">")):
            output.content(reader.taken())
            continue
        output.begin_call(name)
        reader.commit()
        is_whole = yield from _read_arguments(reader, output, schemas.get(name, {}))
        if is_whole and mark == _BEGIN:
            yield from read_end(reader, output, _END)


def _read_arguments(reader: Reader, output: Output, schema: Mapping[str, Any]) -> Steps[bool]:
    """Whether the end of the function has come."""
    arguments = TypedArguments(reader, output, schema)
    mark: str | None = _PARAMETER
    while mark == _PARAMETER:
        yield from reader.spaces()
        mark = yield from reader.one_of((_PARAMETER, _FUNCTION_END))
        if mark == _PARAMETER and not (yield from _read_argument(reader, arguments)):
            mark = None
    if mark is None and reader.is_exhausted:
        return False  # cut off
    arguments.close()
    if mark is None:
        output.content(reader.taken())
    reader.commit()
    return mark is not None


def _read_argument(reader: Reader, arguments: TypedArguments) -> Steps[bool]:
    key = yield from reader.short_text_until(">", _MAX_KEY_CHARS)
    if key is None:
        return False
    if (yield from reader.peek()) == "\n":
        yield from reader.word("\n")
    return (yield from arguments.read_value(key.strip(), _VALUE_MARKS))
