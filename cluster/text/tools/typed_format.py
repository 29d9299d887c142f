"""What formats share that write arguments as marked text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.lark import Lark, answer_with_calls, either, line, repeated
from cluster.text.tools.stepped_format import SteppedFormat
from cluster.text.tools.tool import Tool, ToolChoice
from cluster.text.tools.typed_grammar import ValueStyle, typed_members

MAX_KEY_CHARS = 256


class TypedFormat(SteppedFormat):
    """A call is begin, before_name, the name, after_name, a line break, the arguments and end."""

    begin: str
    before_name: tuple[str, ...] = ()
    after_name = ""
    style: ValueStyle
    end: tuple[str, ...]

    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        bodies = [
            f"{line(tool.name + self.after_name)} {typed_members(lark, tool, index, self.style)}"
            for index, tool in enumerate(tools)
        ]
        if not bodies:
            return answer_with_calls(lark, self.begin, "", choice)
        call = f"{lark.marks(*self.before_name)} {either(bodies)} {lark.marks(*self.end)}"
        calls = repeated(lark, call, lark.marks("\n", self.begin), choice, parallel)
        return answer_with_calls(lark, self.begin, calls, choice)


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Schemas of arguments by the names of tools."""
    return {tool.name: tool.parameters for tool in tools}
