"""Definitions of custom resources as JSON schemas, closed as the API server's strict mode closes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from cluster.deploy.validate.tree import items, mapping
from cluster.errors import ConfigError

_KIND = re.compile(r"^    kind:\s*(\w+)\s*$", re.MULTILINE)
_MARKS = ("format", "default", "description", "nullable", "pattern")


class Definitions:
    """Those below a directory; a file is read when one of its kinds is asked for. Raises ConfigError when there is
    none, or a file is not YAML."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"--crds {directory}: there is no such directory")
        self._files: dict[str, list[Path]] = {}  # by a kind that it may define
        self._schemas: dict[Path, dict[tuple[str, str], dict[str, Any]]] = {}
        for path in sorted(file for file in directory.rglob("*") if file.suffix in (".yaml", ".yml", ".json")):
            if path.is_file() and "CustomResourceDefinition" in (text := path.read_text("utf-8", "replace")):
                for kind in set(_KIND.findall(text)) or {"*"}:
                    self._files.setdefault(kind, []).append(path)
        if not self._files:
            raise ConfigError(f"--crds {directory}: no file in it defines a custom resource")

    def closed(self, version: str, kind: str) -> dict[str, Any] | None:
        """The schema of a kind, which takes no unknown keys, or None."""
        for path in self._files.get(kind, []) + self._files.get("*", []):
            if path not in self._schemas:
                self._schemas[path] = dict(_read(path))
            if (version, kind) in self._schemas[path]:
                return self._schemas[path][version, kind]
        return None


def _read(path: Path) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        documents = list(yaml.load_all(path.read_text("utf-8", "replace"), Loader=loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    for document in documents:
        if mapping(document).get("kind") == "CustomResourceDefinition":
            spec = mapping(document, "spec")
            for _, version in items(spec, "versions"):
                schema = mapping(version, "schema", "openAPIV3Schema")
                key = f"{spec.get('group')}/{version.get('name')}", str(mapping(spec, "names").get("kind"))
                if schema and version.get("served", True):
                    yield key, _closed(schema, is_root=True)


def _closed(schema: dict[str, Any], *, is_root: bool = False, closes: bool = True) -> dict[str, Any]:
    """A structural schema of the API server as JSON schema without unknown keys; of a part of allOf and the like, which
    closes nothing, with them."""
    closed: dict[str, Any] = {key: value for key, value in schema.items() if key not in _MARKS}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    elif schema.get("nullable") and "type" in schema:
        closed["type"] = [schema["type"], "null"]
    # In JSON schema these two are numbers, in the API server's they are marks.
    for mark, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if closed.pop(mark, False) and limit in closed:
            closed[mark] = closed.pop(limit)
    if _is_pattern(schema.get("pattern")):
        closed["pattern"] = schema["pattern"]
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"], closes=closes)
    if isinstance(schema.get("additionalProperties"), dict):
        closed["additionalProperties"] = _closed(schema["additionalProperties"], closes=closes)
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            closed[key] = [_closed(part, closes=False) for part in schema[key]]
    if "not" in schema:
        closed["not"] = _closed(schema["not"], closes=False)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        parts = {name: child for name, child in properties.items() if isinstance(child, dict)}
        closed["properties"] = {name: _closed(child, closes=closes) for name, child in parts.items()}
        if is_root or schema.get("x-kubernetes-embedded-resource"):
            for name in ("apiVersion", "kind", "metadata", "status"):
                closed["properties"].setdefault(name, {})
        if closes and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
        # What has a default may be left out.
        closed["required"] = [name for name in schema.get("required", ()) if "default" not in mapping(properties, name)]
    return closed


def _is_pattern(text: object) -> bool:
    """Whether Python understands it: the API server's patterns are Go's."""
    try:
        return isinstance(text, str) and bool(re.compile(text))
    except re.error:
        return False
