"""The reference of all configuration keys, docs/configuration.md, written from the records themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from cluster.config import ClusterConfig

_HEAD = """\
# Configuration

One YAML file describes one cluster: `paceline serve FILE`, `--set section.key=value` for single keys. Unknown keys are
errors. `paceline config schema` prints the same as a JSON schema for editors. This page is written by
`paceline config reference`.
"""
_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "below {}"),
)


def config_reference() -> str:
    """Markdown: a section for each record, a row for each key with type, limits, default and meaning."""
    return "\n".join([_HEAD, *_sections("", ClusterConfig())])


def _sections(path: str, record: BaseModel) -> Iterator[str]:
    """record: with its defaults."""
    kind = type(record)
    properties = kind.model_json_schema()["properties"]
    rows = []
    nested: list[tuple[str, BaseModel]] = []
    for name, field in kind.model_fields.items():
        default = getattr(record, name)
        if isinstance(default, BaseModel):
            nested.append((f"{path}.{name}" if path else name, default))
            continue
        meaning = _one_line(field.description).replace("|", "\\|")
        value = json.dumps(default, default=str)
        rows.append(f"| `{name}` | {_type_of(properties[name])} | `{value}` | {meaning} |")
    if path:
        yield f"## `{path}`\n\n{_one_line(kind.__doc__)}\n"
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for name, section in nested:
        yield from _sections(name, section)


def _type_of(schema: Mapping[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    return " or ".join(_one_type(option) for option in options)


def _one_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if schema.get("type") == "object":
        return "mapping"
    bounds = [text.format(schema[key]) for key, text in _BOUNDS if key in schema]
    return ", ".join([str(schema.get("type", "any")), *bounds])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
