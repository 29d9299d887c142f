"""The choice among a request's tools, checked: for all endpoints that take tools, each with its own field names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from actors.errors import InvalidRequest
from cluster.text.chat_format import NO_TOOLS, ToolUse
from cluster.text.tools.tool import MAX_NAME_CHARS, NamedFunction, Tool, ToolChoice
from cluster.validation import shown

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_CHARS}}}$")]


@dataclass(frozen=True, slots=True)
class AllowedFunctions:
    """Some of the tools. required: one of them must be called."""

    names: frozenset[str]
    mode: Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolFieldNames:
    """What an endpoint calls the fields, for errors. tool_name: of one tool, behind its index."""

    tool_name: str
    choice_name: str
    allowed: str


def tool_use_of(
    tools: Sequence[Tool], choice: ToolChoice | AllowedFunctions, parallel: bool, fields: ToolFieldNames
) -> ToolUse:
    """Raises InvalidRequest for a choice of tools that are not there, and for two tools of one name."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"tools[{index}].{fields.tool_name}", name, "another tool has this name")
    if not tools:
        if choice in ("none", "auto"):
            return NO_TOOLS
        told = choice if isinstance(choice, str) else _kind_of(choice)
        raise InvalidRequest("tool_choice", told, "it needs tools; send them in the parameter tools")
    if isinstance(choice, AllowedFunctions):
        _check_names(choice.names, names, fields.allowed)
        return ToolUse(tuple(tool for tool in tools if tool.name in choice.names), choice.mode, parallel)
    if isinstance(choice, NamedFunction):
        _check_names({choice.name}, names, fields.choice_name)
    return ToolUse(tuple(tools), choice, parallel)


def _kind_of(choice: NamedFunction | AllowedFunctions) -> str:
    return "function" if isinstance(choice, NamedFunction) else "allowed_tools"


def _check_names(wanted: set[str] | frozenset[str], names: list[str], field: str) -> None:
    for name in sorted(wanted):
        if name not in names:
            raise InvalidRequest(field, name, f"it is none of the tools, which are {shown(', '.join(names))}")
