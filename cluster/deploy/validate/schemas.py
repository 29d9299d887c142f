"""The schema layer: Kubernetes' own kinds by the strict schemas of `kubernetes-validate` and by what an API server
demands beyond them, custom resources by their definitions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from cluster.deploy.validate.crds import Definitions
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.ray_cluster import cluster_of, groups_of, is_ray
from cluster.deploy.validate.shown import may_be_told, shown
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.errors import ConfigError

_PLACE = "/api/_definitions.json"
_POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"


class Schemas:
    """Raises ConfigError without the optional packages."""

    def __init__(self, definitions: Definitions | None) -> None:
        try:
            from jsonschema import Draft202012Validator
            from kubernetes_validate.utils import latest_version
            from referencing import Registry, Resource
            from referencing.jsonschema import DRAFT202012
        except ImportError:
            what = "checking manifests takes kubernetes-validate and jsonschema: pip install 'paceline[k8s]'"
            raise ConfigError(what) from None
        directory = resources.files("kubernetes_validate") / "kubernetes-json-schema"
        file = directory / f"v{latest_version()}-local-strict" / "_definitions.json"
        core = json.loads(file.read_text(encoding="utf-8"))
        self._core: dict[str, Any] = core["$defs"]
        _add_demands(self._core)
        resource = Resource.from_contents(core, default_specification=DRAFT202012)
        self._registry = Registry().with_resource(_PLACE, resource)
        self._validator_class = Draft202012Validator
        self._definitions = definitions
        self._validators: dict[Any, Any] = {}
        self._names = {
            ("/".join(filter(None, (kind["group"], kind["version"]))), kind["kind"]): name
            for name, schema in self._core.items()
            for kind in schema.get("x-kubernetes-group-version-kind", ())
            if "metadata" in schema.get("properties", ())
        }
        self._groups = {version.rpartition("/")[0] for version, _ in self._names}
        self.unchecked: set[str] = set()  # kinds that no schema is there for

    def check(self, manifest: dict[str, Any]) -> Iterator[Problem]:
        version, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
        plain = without_nulls(manifest)
        closed = self._definitions.closed(version, kind) if self._definitions is not None else None
        templates = list(_ray_templates(plain)) if is_ray(manifest) else []
        if closed is not None:
            covered = [where for where, _ in templates]
            for problem in self._problems(closed, plain, (), (version, kind)):
                if not any(problem.where[: len(where)] == where for where in covered):
                    yield problem
        elif (version, kind) in self._names:
            yield from self._problems_of(self._names[version, kind], plain, ())
        elif version.rpartition("/")[0] in self._groups:
            yield Problem("api-unknown", ("apiVersion",), f"{version} has no {kind}")
        else:
            self.unchecked.add(f"{version} {kind}")
        for where, template in templates:
            yield from self._problems_of(_POD_TEMPLATE, template, where)

    def _problems_of(self, name: str, value: Any, where: Location) -> Iterator[Problem]:
        yield from self._problems({"$ref": f"{_PLACE}#/$defs/{name}"}, value, where, name)

    def _problems(self, schema: dict[str, Any], value: Any, where: Location, key: object) -> Iterator[Problem]:
        if key not in self._validators:
            self._validators[key] = self._validator_class(schema, registry=self._registry)
        yield from _refused(self._validators[key], value, where)
        yield from self._doubles(schema, value, where)

    def _doubles(self, schema: dict[str, Any], value: Any, where: Location) -> Iterator[Problem]:
        """Items of a list with keys (x-kubernetes-list-map-keys) that have the same keys."""
        schema = self._core[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if isinstance(value, dict):
            properties, others = schema.get("properties", {}), schema.get("additionalProperties")
            for name, child in value.items():
                below = properties.get(name, others)
                if isinstance(below, dict):
                    yield from self._doubles(below, child, (*where, str(name)))
        elif isinstance(value, list) and isinstance(schema.get("items"), dict):
            keys = schema.get("x-kubernetes-list-map-keys", ())
            seen = set[str]()
            for index, item in enumerate(value):
                if keys and isinstance(item, dict):
                    # What is left out has the default of the definition; of ports that is TCP.
                    own = [item.get(name, "TCP" if name == "protocol" else None) for name in keys]
                    if str(own) in seen:
                        what = f"a second item with {', '.join(map('{} {!r}'.format, keys, own))}"
                        yield Problem("list-unique", (*where, index), what)
                    seen.add(str(own))
                yield from self._doubles(schema["items"], item, (*where, index))


def _add_demands(core: dict[str, Any]) -> None:
    here = Path(__file__).parent
    for path, values in yaml.safe_load((here / "api_enums.yaml").read_bytes()).items():
        name, _, field = path.rpartition(".")
        field_schema = core[f"io.k8s.api.{name}"]["properties"][field]
        # The default takes the place of an empty text.
        field_schema.get("items", field_schema)["enum"] = [*values, "", None]
    for name, demand in yaml.safe_load((here / "pod_demands.yaml").read_bytes()).items():
        prefix = "io.k8s." if name.startswith("apimachinery.") else "io.k8s.api."
        core[prefix + name].setdefault("allOf", []).append(demand)


def _ray_templates(manifest: dict[str, Any]) -> Iterator[tuple[Location, Any]]:
    for group in groups_of(*cluster_of(manifest)):
        if "template" in group.spec:
            yield (*group.where, "template"), group.spec["template"]


def without_nulls(value: Any) -> Any:
    """As the server stores it: a key whose value is null is as good as not given."""
    if isinstance(value, dict):
        return {key: without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [without_nulls(child) for child in value]
    return value


def _refused(validator: Any, value: Any, base: Location) -> Iterator[Problem]:
    for error in validator.iter_errors(value):
        where: Location = (*base, *error.absolute_path)
        says = error.schema.get("says") if isinstance(error.schema, dict) else None
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            known = error.schema.get("properties", {})
            for name in sorted(error.instance.keys() - known.keys(), key=str):
                what = f"unknown field {name!r}{did_you_mean(str(name), known)}"
                yield Problem("schema-unknown-field", (*where, str(name)), what)
        elif error.validator == "required" and says is None:
            for name in error.validator_value:
                if isinstance(error.instance, dict) and name not in error.instance:
                    yield Problem("schema-missing", (*where, name), f"{name} must be given")
        elif error.validator == "type":
            wanted = error.validator_value
            types = wanted if isinstance(wanted, str) else " or ".join(wanted)
            yield Problem("schema-type", where, f"{shown(error.instance, where)} is not of type {types}")
        elif says is not None:
            is_short = isinstance(error.instance, str | int | float)
            yield Problem("schema-value", where, f"{shown(error.instance, where)}: {says}" if is_short else says)
        elif not may_be_told(where):
            yield Problem("schema-value", where, f"{shown(error.instance, where)} that {error.validator} rules out")
        elif error.validator in ("oneOf", "anyOf", "allOf", "not", "if"):
            reasons = "; ".join(sorted({_plain(part.message) for part in error.context}))
            yield Problem("schema-value", where, reasons[:300] or _plain(error.message)[:300])
        else:
            yield Problem("schema-value", where, _plain(error.message)[:300])


def _plain(message: str) -> str:
    return re.sub(r"\s+", " ", message)
