"""Rules of custom resource definitions beyond their schemas: lists whose items have keys, and expressions in CEL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from cluster.deploy.validate.finding import Location, Problem


def check_crd_rules(value: Any, schema: dict[str, Any], where: Location = ()) -> Iterator[Problem]:
    """A value with its defaults filled, against the definition's own schema."""
    yield from _expressions(value, schema, where)
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        rest = schema.get("additionalProperties")
        for name, child in value.items():
            below = properties.get(name, rest)
            if isinstance(below, dict):
                yield from check_crd_rules(child, below, (*where, name))
    elif isinstance(value, list):
        yield from _double_items(value, schema, where)
        if isinstance(schema.get("items"), dict):
            for index, child in enumerate(value):
                yield from check_crd_rules(child, schema["items"], (*where, index))


def _double_items(value: list[Any], schema: dict[str, Any], where: Location) -> Iterator[Problem]:
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys")
    seen: list[Any] = []
    for index, item in enumerate(value):
        if kind == "map" and keys and isinstance(item, dict):
            # Items without a key that has no default are the schema's to find.
            key: Any = [item.get(name) for name in keys]
            shown = ", ".join(f"{name} {item.get(name)!r}" for name in keys)
        elif kind == "set":
            key, shown = item, repr(item)
        else:
            return
        if key in seen:
            yield Problem("crd-list-unique", (*where, index), f"two items have {shown}")
        seen.append(key)


def _expressions(value: Any, schema: dict[str, Any], where: Location) -> Iterator[Problem]:
    for rule in schema.get("x-kubernetes-validations") or ():
        expression = str(rule.get("rule"))
        if "oldSelf" in expression:
            continue  # of changes
        if not _holds(expression, value):
            yield Problem(
                "crd-cel", where, str(rule.get("message") or f"the rule {' '.join(expression.split())} fails")
            )


def _holds(expression: str, value: Any) -> bool:
    """Whether a rule holds. One that cannot be evaluated here does: it is the API server's to say."""
    from celpy import CELEvalError, json_to_cel

    program = _program(expression)
    if program is None:
        return True
    try:
        return bool(program.evaluate({"self": json_to_cel(value)}))
    except (CELEvalError, ValueError, TypeError, KeyError, AttributeError):
        return True


@lru_cache(maxsize=1024)
def _program(expression: str) -> Any:
    from celpy import CELEvalError, CELParseError, Environment

    environment = Environment()
    try:
        return environment.program(environment.compile(expression))
    except (CELParseError, CELEvalError, ValueError):
        return None
