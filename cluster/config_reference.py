"""The reference of all configuration keys, docs/configuration.md, written from the records themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

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


def _sections(path: str, record: BaseModel, meaning: str = "") -> Iterator[str]:
    """record: with its defaults; meaning: in place of what its class says."""
    kind = type(record)
    properties = kind.model_json_schema()["properties"]
    rows = []
    nested: list[tuple[str, BaseModel]] = []
    mappings: list[tuple[str, str, BaseModel]] = []  # with the meaning of the key
    for name, field in kind.model_fields.items():
        default = getattr(record, name, ...)
        if isinstance(default, BaseModel):
            nested.append((f"{path}.{name}" if path else name, default))
            continue
        told = _one_line(field.description).replace("|", "\\|")
        if (named := _record_of_mapping(field.annotation)) is not None:
            where = f"{path}.{name}" if path else name
            mappings.append((f"{where}.NAME", told, named.model_construct()))
            continue
        value = "required" if default is ... else f"`{json.dumps(default, default=str)}`"
        rows.append(f"| `{name}` | {_type_of(properties[name])} | {value} | {told} |")
    if path:
        yield f"## `{path}`\n\n{meaning or _one_line(kind.__doc__)}\n"
        if rows:
            yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for name, section in nested:
        yield from _sections(name, section)
    for name, told, section in mappings:
        yield from _sections(name, section, told)


def _record_of_mapping(annotation: Any) -> type[BaseModel] | None:
    """The record that a mapping of names to records holds; None: it is none."""
    arguments = get_args(annotation) if get_origin(annotation) is dict else ()
    kind = arguments[1] if arguments else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


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
