"""The strict schemas of Kubernetes' own kinds that kubernetes-validate brings along."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from cluster.errors import ConfigError

_PLACE = "/api/_definitions.json"


class CoreSchemas:
    """The schemas of the newest version that is installed. Raises ConfigError, with `install`, if none is."""

    def __init__(self, install: str) -> None:
        try:
            from jsonschema import Draft202012Validator
            from kubernetes_validate.utils import latest_version
            from referencing import Registry, Resource
            from referencing.jsonschema import DRAFT202012
        except ImportError:
            raise ConfigError(install) from None
        directory = f"v{latest_version()}-local-strict"
        file = resources.files("kubernetes_validate") / "kubernetes-json-schema" / directory / "_definitions.json"
        definitions = json.loads(file.read_text(encoding="utf-8"))
        resource = Resource.from_contents(definitions, default_specification=DRAFT202012)
        self._registry = Registry().with_resource(_PLACE, resource)
        self._validator_class = Draft202012Validator
        self._names: dict[tuple[str, str], str] = {}
        for name, schema in definitions["$defs"].items():
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                if "properties" in schema and "metadata" in schema["properties"]:
                    version = f"{kind['group']}/{kind['version']}" if kind["group"] else kind["version"]
                    self._names[version, kind["kind"]] = name
        self._groups = {version.rpartition("/")[0] for version, _ in self._names}
        self._validators: dict[str, Any] = {}

    def of(self, version: str, kind: str) -> Any | None:
        """The validator of a kind, or None."""
        name = self._names.get((version, kind))
        return self._validator(name) if name is not None else None

    @property
    def pod_template(self) -> Any:
        """Schema of the template from which workloads and Ray groups make pods."""
        return self._validator("io.k8s.api.core.v1.PodTemplateSpec")

    def has_group(self, version: str) -> bool:
        """Whether the group of an apiVersion is one of Kubernetes itself."""
        return version.rpartition("/")[0] in self._groups

    def _validator(self, name: str) -> Any:
        if name not in self._validators:
            schema = {"$ref": f"{_PLACE}#/$defs/{name}"}
            self._validators[name] = self._validator_class(schema, registry=self._registry)
        return self._validators[name]
