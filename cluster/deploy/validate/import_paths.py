"""Whether an import path leads somewhere, found out without running what it leads to."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Reason:
    text: str
    is_sure: bool  # else the code may be where the application runs


def why_not_importable(path: str) -> Reason | None:
    """`module.sub:name` or `module.sub.name`; None where it can be imported, or nobody can tell."""
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        return None  # the schema says so
    parts = module.split(".")
    spec = PathFinder.find_spec(parts[0])
    if spec is None and parts[0] not in sys.builtin_module_names:
        return Reason(f"there is no module {parts[0]!r} here", is_sure=False)
    for depth, part in enumerate(parts[1:], 2):
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return Reason(f"{'.'.join(parts[: depth - 1])} is no package", is_sure=True)
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
        if spec is None:
            return Reason(f"{'.'.join(parts[: depth - 1])} has no module {part!r}", is_sure=True)
    names = _names(spec)
    first = name.split(".")[0]
    if names is None or first in names:
        return None
    return Reason(f"{module} defines no {first!r}", is_sure=True)


def _names(spec: ModuleSpec | None) -> set[str] | None:
    """What a module defines at its top level; None where that cannot be read off its source."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            if node.name == "__getattr__":
                return None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    return None
                names.add(alias.asname or alias.name.split(".")[0])
    return names
