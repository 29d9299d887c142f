"""The schemas within a JSON schema, and where in it they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by free names
_MOST_STEPS = 12  # of a place that are written
_MOST_STEP_CHARS = 40


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema within another one. Its place is the last step to it, and the part of the step before."""

    schema: dict[str, Any]
    step: str = ""  # ".items", "[0]", ".properties.city"; "": the whole
    within: SchemaPart | None = None

    def place(self, field: str, keyword: str = "") -> str:
        """As errors name it: "schema.properties.city.pattern". field: the client's name of the whole schema."""
        steps: list[str] = []
        part: SchemaPart | None = self
        while part is not None and len(steps) <= _MOST_STEPS:
            steps.append(part.step)
            part = part.within
        if part is not None:  # deeper than anybody reads
            steps.append("...")
        return field + "".join(reversed(steps)) + (f".{keyword}" if keyword else "")


def schema_parts(schema: Mapping[str, Any]) -> Iterator[SchemaPart]:
    """The schema and all schemas within, however deep, in the order in which they are written. A reference may name
    one below any keyword."""
    waiting: list[tuple[Any, str, SchemaPart | None]] = [(schema, "", None)]
    while waiting:
        value, step, within = waiting.pop()
        if isinstance(value, list):
            listed = [(index, one) for index, one in enumerate(value) if isinstance(one, (dict, list))]
            waiting += [(one, f"{step}[{index}]", within) for index, one in reversed(listed)]
        elif isinstance(value, dict):
            part = SchemaPart(value, step, within)
            yield part
            for key, one in reversed(value.items()):
                if key in _BY_NAME and isinstance(one, dict):
                    waiting += [(by_name, f".{key}.{_short(name)}", part) for name, by_name in reversed(one.items())]
                elif key not in _VALUES and isinstance(one, (dict, list)):
                    waiting.append((one, f".{_short(key)}", part))


def _short(name: str) -> str:
    return name if len(name) <= _MOST_STEP_CHARS else f"{name[:_MOST_STEP_CHARS]}..."
