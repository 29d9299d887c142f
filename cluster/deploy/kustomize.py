"""The directory `k8s`: base, overlays and component for Kustomize. An overlay is its difference from the base."""

from __future__ import annotations

from typing import Any

import yaml

from cluster.deploy.json_patch import json_patch
from cluster.deploy.manifests import identity, manifests
from cluster.deploy.pods import Object
from cluster.deploy.profiles import BASE, OVERLAYS, WITH_COMPONENT
from cluster.deploy.tenancy import tenancy
from cluster.deploy.values import DeployValues

HEADER = "# Written by `paceline k8s render`; the values are in cluster/deploy/profiles.py.\n"
COMPONENT = "multi-tenant"

_COMPONENT_LABEL = "app.kubernetes.io/component"


def overlay_manifests(name: str) -> list[Object]:
    """What `kubectl kustomize` makes of an overlay, in any order."""
    values = OVERLAYS[name]
    return manifests(values) + (tenancy(values) if name in WITH_COMPONENT else [])


def rendered_files() -> dict[str, str]:
    """Text by path below `k8s`."""
    files = _tree("base", manifests(BASE), {"kind": "Kustomization"})
    files |= _tree(f"components/{COMPONENT}", tenancy(BASE), {"kind": "Component"})
    for name, values in OVERLAYS.items():
        files |= _overlay(name, values)
    return files


def is_rendered(name: str, text: str) -> bool:
    """Whether a file was written by this, and not by its user. A JSON file cannot say so."""
    return name.endswith(".json") or text.startswith(HEADER)


def _overlay(name: str, values: DeployValues) -> dict[str, str]:
    given = {identity(each): each for each in manifests(BASE)}
    if name in WITH_COMPONENT:
        given |= {identity(each): each for each in tenancy(BASE)}
    wanted = {identity(each): each for each in overlay_manifests(name)}
    missing = sorted(given.keys() - wanted.keys())
    assert not missing, f"overlay {name} lacks {missing}, which the base has"
    folder = f"overlays/{name}"
    kustomization: dict[str, Any] = {"kind": "Kustomization", "resources": ["../../base"]}
    if name in WITH_COMPONENT:
        kustomization["components"] = [f"../../components/{COMPONENT}"]
    files: dict[str, str] = {}
    patches = []
    for key, manifest in wanted.items():
        if key in given and (operations := json_patch(given[key], manifest)):
            kind, object_name = key
            file = f"{kind.lower()}-{object_name}.patch.yaml"
            files[f"{folder}/{file}"] = HEADER + yaml_text([operations])
            patches.append({"path": file, "target": {"kind": kind, "name": object_name}})
    if patches:
        kustomization["patches"] = patches
    added = [manifest for key, manifest in wanted.items() if key not in given]
    return files | _tree(folder, added, kustomization)


def _tree(folder: str, objects: list[Object], kustomization: dict[str, Any]) -> dict[str, str]:
    """A file for each part of the deployment, and the kustomization that names them."""
    parts: dict[str, list[Object]] = {}
    for each in objects:
        parts.setdefault(each["metadata"]["labels"][_COMPONENT_LABEL], []).append(each)
    kind = kustomization.pop("kind")
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    head: dict[str, Any] = {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind}
    resources = [*kustomization.pop("resources", []), *(f"{part}.yaml" for part in parts)]
    if resources:
        head["resources"] = resources
    files = {f"{folder}/{part}.yaml": HEADER + yaml_text(group) for part, group in parts.items()}
    files[f"{folder}/kustomization.yaml"] = HEADER + yaml_text([head | kustomization])
    return files


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def yaml_text(documents: list[Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
