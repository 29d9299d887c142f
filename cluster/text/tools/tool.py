"""Functions that a model may call, and how free it is to call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: JSON schema of the arguments, an object; empty: any object. strict: the schema is followed to the
    letter, and refused if it has keywords that no grammar can follow."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def openai_form(self) -> dict[str, Any]:
        """As chat templates expect it, which look into the parameters."""
        parameters = {"type": "object", "properties": {}, **self.parameters}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The answer is one call of this function. A class of its own: a function may be called "auto"."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedFunction
