"""Requests and limits of containers."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.naming import is_qualified_name
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.tree import mapping

_PLAIN = ("cpu", "memory", "ephemeral-storage")


def is_extended(name: str) -> bool:
    """Whether it is a device such as nvidia.com/gpu."""
    domain, slash, _ = name.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def check_resources(resources: dict[str, Any], where: Location) -> Iterator[Problem]:
    values: dict[str, dict[str, Decimal]] = {"requests": {}, "limits": {}}
    for kind, read in values.items():
        for name, text in mapping(resources, kind).items():
            place = (*where, kind, str(name))
            if not is_known_resource(str(name)):
                yield Problem("resource-name", place, f"{name!r} is no resource of a container")
            value = parse_quantity(text)
            if value is None:
                if text is not None:
                    yield Problem("quantity", place, f"{text!r} is no quantity")
            elif value < 0:
                yield Problem("quantity", place, f"{text!r} is below 0")
            else:
                read[str(name)] = value
                if is_extended(str(name)) and value != value.to_integral_value():
                    yield Problem("resource-whole", place, f"{text!r} of {name}; devices come whole")
    for name, request in values["requests"].items():
        place = (*where, "requests", name)
        limit = values["limits"].get(name)
        if is_extended(name) or name.startswith("hugepages-"):
            if name not in mapping(resources, "limits"):
                yield Problem("resource-device-limit", place, f"{name} has a request and no limit")
            elif limit is not None and limit != request:
                yield Problem("resource-device-limit", place, f"{name} has request {request} and limit {limit}")
        elif limit is not None and request > limit:
            shown = mapping(resources, "requests")[name], mapping(resources, "limits")[name]
            yield Problem("resource-limit", place, f"request {shown[0]} of {name} is over the limit {shown[1]}")


def is_known_resource(name: str) -> bool:
    if "/" in name:
        return is_qualified_name(name)
    return name in _PLAIN or name.startswith("hugepages-")
