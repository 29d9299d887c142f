"""The schema layer: kinds of Kubernetes by the schemas that kubernetes-validate brings, custom resources by the files
of their definitions, and KubeRay's kinds by a list of our own where those are not given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.api_versions import is_removed
from cluster.deploy.validate.core_schemas import CoreSchemas
from cluster.deploy.validate.crd_rules import check_crd_rules
from cluster.deploy.validate.crd_schemas import CrdSchemas, fill_defaults, without_nulls
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.ray_cluster import cluster_of, groups_of, is_ray
from cluster.deploy.validate.ray_fields import check_ray_fields
from cluster.deploy.validate.shown import may_be_told, shown
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import items
from cluster.errors import ConfigError

_INSTALL = "checking manifests takes kubernetes-validate, jsonschema and cel-python: pip install 'paceline[k8s]'"


class Schemas:
    """Raises ConfigError without the optional packages."""

    def __init__(self, crds: CrdSchemas | None) -> None:
        try:
            import celpy  # noqa: F401
            import jsonschema
        except ImportError:
            raise ConfigError(_INSTALL) from None
        self._validator = jsonschema.Draft202012Validator
        self._core = CoreSchemas(_INSTALL)
        self._crds = crds
        self._validators: dict[tuple[str, str], Any] = {}
        self.unchecked: set[str] = set()  # kinds that no schema is there for

    def check(self, manifest: dict[str, Any]) -> Iterator[Problem]:
        version, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
        plain = without_nulls(manifest)
        definition = self._crds.schema(version, kind) if self._crds is not None else None
        if definition is not None and self._crds is not None:
            fill_defaults(plain, definition)
            if (version, kind) not in self._validators:
                self._validators[version, kind] = self._validator(self._crds.closed(version, kind))
            yield from _problems(self._validators[version, kind], plain, ())
            yield from check_crd_rules(plain, definition)
            return
        core = self._core.of(version, kind)
        if core is not None:
            yield from _problems(core, plain, ())
        elif is_ray(manifest):
            yield from check_ray_fields(manifest)
            yield from self._check_ray_templates(plain)
        elif self._core.has_group(version):
            if not is_removed(version, kind):
                yield Problem("api-unknown", ("apiVersion",), f"{version} has no {kind}")
        else:
            self.unchecked.add(f"{version} {kind}")

    def _check_ray_templates(self, manifest: dict[str, Any]) -> Iterator[Problem]:
        cluster, where = cluster_of(manifest)
        template = self._core.pod_template
        for group in groups_of(cluster, where):
            if "template" in group.spec:
                yield from _problems(template, group.spec["template"], (*group.where, "template"))
            elif group.spec:
                yield Problem("schema-missing", (*group.where, "template"), "template must be given")
        for index, spec in items(cluster, "workerGroupSpecs"):
            if not spec.get("groupName"):
                place = (*where, "workerGroupSpecs", index, "groupName")
                yield Problem("schema-missing", place, "groupName must be given")


def _problems(validator: Any, value: Any, base: Location) -> Iterator[Problem]:
    for error in validator.iter_errors(value):
        where: Location = (*base, *error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            known = error.schema.get("properties", {})
            for name in sorted(error.instance.keys() - known.keys(), key=str):
                what = f"unknown field {name!r}{did_you_mean(str(name), known)}"
                yield Problem("schema-unknown-field", (*where, str(name)), what)
        elif error.validator == "required":
            for name in error.validator_value:
                if isinstance(error.instance, dict) and name not in error.instance:
                    yield Problem("schema-missing", (*where, name), f"{name} must be given")
        elif error.validator == "type":
            wanted = error.validator_value
            types = wanted if isinstance(wanted, str) else " or ".join(wanted)
            yield Problem("schema-type", where, f"{shown(error.instance, where)} is not of type {types}")
        elif not may_be_told(where):
            yield Problem("schema-value", where, f"{shown(error.instance, where)} that {error.validator} rules out")
        elif error.validator in ("oneOf", "anyOf", "allOf", "not", "if"):
            reasons = "; ".join(sorted({_plain(part.message) for part in error.context}))
            yield Problem("schema-value", where, reasons[:300] or _plain(error.message)[:300])
        else:
            yield Problem("schema-value", where, _plain(error.message)[:300])


def _plain(message: str) -> str:
    return re.sub(r"\s+", " ", message)
