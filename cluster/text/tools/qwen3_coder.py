"""Qwen3-Coder: <tool_call>, <function=f>, for each argument <parameter=k>, the value in lines of its own, </parameter>,
then </function> and </tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.json_call import read_end
from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.tool import Tool
from cluster.text.tools.typed_arguments import TypedArguments
from cluster.text.tools.typed_format import MAX_KEY_CHARS, TypedFormat, schemas_of
from cluster.text.tools.typed_grammar import ValueStyle

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = Marks([_BEGIN, _FUNCTION])  # models leave the outer mark out
_VALUE_MARKS = Marks(["\n" + _PARAMETER_END, _PARAMETER_END])


class Qwen3Coder(TypedFormat):
    name = "qwen3_coder"
    begin = _BEGIN
    before_name = ("\n", _FUNCTION)
    after_name = ">"
    style = ValueStyle(
        before_key=(_PARAMETER,), after_key=(">\n",), end=_PARAMETER_END, before_end=("\n",), after_value=("\n",)
    )
    end = (_FUNCTION_END, "\n", _END)

    def detects(self, chat_template: str) -> bool:
        return _FUNCTION in chat_template and _PARAMETER in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output, schemas_of(tools))


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
    key = yield from reader.short_text_until(">", MAX_KEY_CHARS)
    if key is None:
        return False
    if (yield from reader.peek()) == "\n":
        yield from reader.word("\n")
    return (yield from arguments.read_value(key.strip(), _VALUE_MARKS))
