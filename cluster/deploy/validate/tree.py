"""Reading values that may be of any type: what is not as it should be is empty, since the schemas say so."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]  # an object of Kubernetes, or a part of one


def mapping(value: object, *keys: str | int) -> dict[str, Any]:
    """The mapping at these keys, or an empty one."""
    found = at(value, *keys)
    return found if isinstance(found, dict) else {}


def items(value: object, *keys: str | int) -> list[tuple[int, dict[str, Any]]]:
    """The mappings of the list at these keys, with their indices."""
    found = at(value, *keys)
    return [(i, item) for i, item in enumerate(found) if isinstance(item, dict)] if isinstance(found, list) else []


def listed(value: object, *keys: str | int) -> list[Any]:
    """The list at these keys, or an empty one."""
    found = at(value, *keys)
    return found if isinstance(found, list) else []


def strings(value: object, *keys: str | int) -> dict[str, str]:
    """The entries of the mapping at these keys whose values are texts."""
    return {k: v for k, v in mapping(value, *keys).items() if isinstance(k, str) and isinstance(v, str)}


def at(value: object, *keys: str | int) -> Any:
    """What lies at these keys, or None."""
    found: Any = value
    for key in keys:
        if not has(found, key):
            return None
        found = found[key]
    return found


def has(value: object, key: str | int) -> bool:
    """Whether a mapping or a list has something at a key."""
    if isinstance(value, list):
        return isinstance(key, int) and 0 <= key < len(value)
    return isinstance(value, dict) and key in value


def whole(value: object) -> int | None:
    """A whole number, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def scalar(value: object) -> str | int | None:
    """A text or a number, or None."""
    return value if isinstance(value, str | int) else None
