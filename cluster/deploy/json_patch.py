"""The difference of two objects as a JSON patch (RFC 6902)."""

from __future__ import annotations

from typing import Any

Operation = dict[str, Any]


def json_patch(old: Any, new: Any, path: str = "") -> list[Operation]:
    """Operations that turn `old` into `new`: mappings key by key, lists of one length item by item, all else whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        operations: list[Operation] = []
        for key, value in old.items():
            at = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            operations += json_patch(value, new[key], at) if key in new else [{"op": "remove", "path": at}]
        for key, value in new.items():
            if key not in old:
                at = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
                operations.append({"op": "add", "path": at, "value": value})
        return operations
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [each for i, pair in enumerate(zip(old, new, strict=True)) for each in json_patch(*pair, f"{path}/{i}")]
    return [] if old == new and type(old) is type(new) else [{"op": "replace", "path": path, "value": new}]
