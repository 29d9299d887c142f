"""Schemas of custom resources, read from the files of their definitions, and closed as the API server's strict mode
closes them: defaults are filled and nulls dropped before anything is looked at."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from cluster.deploy.validate.tree import items, mapping
from cluster.errors import ConfigError

_COPIED = (
    "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems",
    "minProperties", "maxProperties", "multipleOf", "required",
)  # fmt: skip
_DEFINED = re.compile(r"^[ \t]*kind:\s*([\"']?)CustomResourceDefinition\1\s*$", re.MULTILINE)
_KIND = re.compile(r"^    kind:\s*(\w+)\s*$", re.MULTILINE)


class CrdSchemas:
    """Definitions below a directory. Raises ConfigError when it has none."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, list[Path]] = {}  # kind: files that may define it
        self._read: dict[Path, dict[tuple[str, str], dict[str, Any]]] = {}
        self._closed: dict[tuple[str, str], dict[str, Any]] = {}
        if not directory.is_dir():
            raise ConfigError(f"--crds {directory}: there is no such directory")
        for path in sorted(file for file in directory.rglob("*") if file.suffix in (".yaml", ".yml", ".json")):
            text = _text_of(path)
            if _DEFINED.search(text):
                for kind in set(_KIND.findall(text)) or {"*"}:
                    self._files.setdefault(kind, []).append(path)
        if not self._files:
            raise ConfigError(f"--crds {directory}: no file in it defines a custom resource")

    def schema(self, version: str, kind: str) -> dict[str, Any] | None:
        """As its definition has it, or None where there is none."""
        for path in self._files.get(kind, []) + self._files.get("*", []):
            found = self._schemas_of(path).get((version, kind))
            if found is not None:
                return found
        return None

    def closed(self, version: str, kind: str) -> dict[str, Any] | None:
        """As JSON schema that takes no unknown keys."""
        key = (version, kind)
        if key not in self._closed:
            schema = self.schema(version, kind)
            if schema is None:
                return None
            self._closed[key] = close(schema, is_root=True)
        return self._closed[key]

    def _schemas_of(self, path: Path) -> dict[tuple[str, str], dict[str, Any]]:
        if path not in self._read:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            found = {}
            try:
                documents = list(yaml.load_all(_text_of(path), Loader=loader))
            except yaml.YAMLError as error:
                raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
            for document in documents:
                if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition":
                    spec = mapping(document, "spec")
                    kind = mapping(spec, "names").get("kind")
                    for _, version in items(spec, "versions"):
                        schema = mapping(version, "schema", "openAPIV3Schema")
                        if schema and version.get("served", True):
                            found[f"{spec.get('group')}/{version.get('name')}", str(kind)] = schema
            self._read[path] = found
        return self._read[path]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def close(schema: dict[str, Any], *, is_root: bool = False) -> dict[str, Any]:
    """A structural schema of the API server as JSON schema without unknown keys."""
    closed: dict[str, Any] = {key: schema[key] for key in _COPIED if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    elif "type" in schema:
        closed["type"] = [schema["type"], "null"] if schema.get("nullable") else schema["type"]
    # In JSON schema these two are numbers, in the API server's they are marks.
    for mark, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if schema.get(mark) is True and limit in closed:
            closed[mark] = closed.pop(limit)
    if "pattern" in schema and _is_pattern(schema["pattern"]):
        closed["pattern"] = schema["pattern"]
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            closed[key] = [_within(part) for part in schema[key]]
    if "not" in schema:
        closed["not"] = _within(schema["not"])
    if isinstance(schema.get("items"), dict):
        closed["items"] = close(schema["items"])
    properties = schema.get("properties")
    if isinstance(properties, dict):
        closed["properties"] = {name: close(child) for name, child in properties.items()}
        if is_root or schema.get("x-kubernetes-embedded-resource"):
            for name in ("apiVersion", "kind", "metadata", "status"):
                closed["properties"].setdefault(name, {})
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            closed["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        closed["additionalProperties"] = close(schema["additionalProperties"])
    return closed


def _within(schema: dict[str, Any]) -> dict[str, Any]:
    """A part of allOf and the like: it says more of a value, and closes nothing."""
    part = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(key), bool):
            del part[key]
    if "properties" in part:
        part["properties"] = {name: _within(child) for name, child in part["properties"].items()}
    if isinstance(part.get("items"), dict):
        part["items"] = _within(part["items"])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in part:
            part[key] = [_within(child) for child in part[key]]
    if "pattern" in part and not _is_pattern(part["pattern"]):
        del part["pattern"]
    return part


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def without_nulls(value: Any) -> Any:
    """As the server stores it: a key whose value is null is as good as not given."""
    if isinstance(value, dict):
        return {key: without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [without_nulls(child) for child in value]
    return value


def fill_defaults(value: Any, schema: dict[str, Any]) -> None:
    """Enter the defaults of a schema into a value that has no nulls."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        for name, child in properties.items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                fill_defaults(value[name], child)
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            for name, child in value.items():
                if name not in properties:
                    fill_defaults(child, rest)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for child in value:
            fill_defaults(child, schema["items"])
