"""Volumes of a pod and where its containers mount them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.naming import is_label
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.tree import items, mapping


def check_volumes(spec: dict[str, Any], where: Location) -> Iterator[Problem]:
    seen = set[str]()
    for index, volume in items(spec, "volumes"):
        place = (*where, "volumes", index)
        name = volume.get("name")
        if isinstance(name, str):
            if not is_label(name):
                yield Problem("volume-name", (*place, "name"), f"{name!r} is not a DNS label")
            if name in seen:
                yield Problem("volume-name", (*place, "name"), f"{name!r} names two volumes")
            seen.add(name)
        sources = sorted(key for key, value in volume.items() if key != "name" and value is not None)
        if len(sources) > 1:
            yield Problem("volume-source", place, f"{name!r} has {' and '.join(sources)}; a volume has one source")
        empty = mapping(volume, "emptyDir")
        if empty.get("sizeLimit") is not None and parse_quantity(empty["sizeLimit"]) is None:
            yield Problem("quantity", (*place, "emptyDir", "sizeLimit"), f"{empty['sizeLimit']!r} is no quantity")
        medium = empty.get("medium")
        if isinstance(medium, str) and medium not in ("", "Memory") and not medium.startswith("HugePages"):
            yield Problem("enum", (*place, "emptyDir", "medium"), f"{medium!r}; it must be Memory or not given")


def check_mounts(container: dict[str, Any], where: Location, volumes: set[str]) -> Iterator[Problem]:
    paths = set[str]()
    for index, mount in items(container, "volumeMounts"):
        place = (*where, "volumeMounts", index)
        name, path = mount.get("name"), mount.get("mountPath")
        if isinstance(name, str) and name not in volumes:
            yield Problem("mount-volume", (*place, "name"), f"the pod has no volume {name!r}")
        if isinstance(path, str):
            if path in paths:
                yield Problem("mount-path", (*place, "mountPath"), f"two volumes at {path!r}")
            if not path or ":" in path:
                yield Problem("mount-path", (*place, "mountPath"), f"{path!r} is no place for a volume")
            paths.add(path)
        sub = mount.get("subPath")
        if isinstance(sub, str) and (sub.startswith("/") or ".." in sub.split("/")):
            yield Problem("mount-path", (*place, "subPath"), f"{sub!r} must be relative, without ..")
