"""GLM 4.5 and later: <tool_call>f, then for each argument <arg_key>k</arg_key> and <arg_value>v</arg_value>, then
</tool_call>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.names import read_name
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.tool import Tool
from cluster.text.tools.typed_arguments import TypedArguments
from cluster.text.tools.typed_format import MAX_KEY_CHARS, TypedFormat, schemas_of
from cluster.text.tools.typed_grammar import ValueStyle

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY_BEGIN, _KEY_END, _VALUE_BEGIN, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MARKS, _VALUE_MARKS = Marks([_BEGIN]), Marks([_VALUE_END])


class Glm(TypedFormat):
    name = "glm"
    begin = _BEGIN
    style = ValueStyle(
        before_key=(_KEY_BEGIN,), after_key=(_KEY_END, "\n", _VALUE_BEGIN), end=_VALUE_END, after_value=("\n",)
    )
    end = (_END,)

    def detects(self, chat_template: str) -> bool:
        return _KEY_BEGIN in chat_template and _BEGIN in chat_template

    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        return _read_answer(reader, output, schemas_of(tools))


def _read_answer(reader: Reader, output: Output, schemas: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    while (yield from reader.text_until(_MARKS, output.content)):
        yield from reader.spaces()
        name = yield from read_name(reader)
        yield from reader.spaces()
        mark = yield from reader.one_of((_KEY_BEGIN, _END))
        if not name or mark is None:
            output.content(reader.taken())
            continue
        output.begin_call(name)
        reader.commit(unused="" if mark == _END else mark)
        arguments = TypedArguments(reader, output, schemas.get(name, {}))
        while mark == _KEY_BEGIN and (yield from _read_argument(reader, arguments)):
            yield from reader.spaces()
            mark = yield from reader.one_of((_KEY_BEGIN, _END))
        if mark != _END and reader.is_exhausted:
            return  # cut off
        arguments.close()
        if mark == _END:
            reader.commit()
        else:
            output.content(reader.taken())


def _read_argument(reader: Reader, arguments: TypedArguments) -> Steps[bool]:
    key = yield from reader.short_text_until(_KEY_END, MAX_KEY_CHARS)
    yield from reader.spaces()
    if key is None or not (yield from reader.word(_VALUE_BEGIN)):
        return False
    return (yield from arguments.read_value(key.strip(), _VALUE_MARKS))
