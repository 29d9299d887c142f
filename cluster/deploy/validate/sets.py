"""What only several objects together get wrong: those of one file, directory or overlay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.documents import Document
from cluster.deploy.validate.finding import Problem
from cluster.deploy.validate.labels import selects
from cluster.deploy.validate.ray_cluster import allows_dns
from cluster.deploy.validate.tree import items, listed, mapping

_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")


def check_set(documents: list[Document]) -> Iterator[tuple[Document, Problem]]:
    manifests = [document for document in documents if isinstance(document.value, dict)]
    yield from _doubles(manifests)
    yield from _service_ports(manifests)
    yield from _dns(manifests)


def _doubles(documents: list[Document]) -> Iterator[tuple[Document, Problem]]:
    seen: dict[tuple[str, ...], Document] = {}
    for document in documents:
        metadata = mapping(document.value, "metadata")
        if not metadata.get("name"):
            continue
        group = str(document.value.get("apiVersion")).rpartition("/")[0]
        key = (group, str(document.value.get("kind")), str(metadata.get("namespace", "")), str(metadata["name"]))
        if key in seen:
            what = f"{document.name} is defined twice; first on line {seen[key].line(())} of {seen[key].file}"
            rule = "object-twice" if seen[key].file == document.file else "object-in-files"
            yield document, Problem(rule, ("metadata", "name"), what)
        seen.setdefault(key, document)


def _service_ports(documents: list[Document]) -> Iterator[tuple[Document, Problem]]:
    """Ports that a service forwards to by a name that the pods it selects do not have."""
    workloads = [document.value for document in documents if document.value.get("kind") in _WORKLOADS]
    for document in documents:
        if document.value.get("kind") != "Service" or "/" in str(document.value.get("apiVersion")):
            continue
        selector = mapping(document.value, "spec", "selector")
        chosen = [
            workload
            for workload in workloads
            if selector
            and _namespace(workload) == _namespace(document.value)
            and selects({"matchLabels": selector}, mapping(workload, "spec", "template", "metadata", "labels"))
        ]
        names = {
            str(port.get("name"))
            for workload in chosen
            for group in ("containers", "initContainers")
            for _, container in items(workload, "spec", "template", "spec", group)
            for _, port in items(container, "ports")
        }
        for index, port in items(document.value, "spec", "ports"):
            target = port.get("targetPort")
            if chosen and isinstance(target, str) and target not in names:
                what = f"no pod that the service selects has a port named {target!r}"
                yield document, Problem("service-target", ("spec", "ports", index, "targetPort"), what)


def _namespace(manifest: dict[str, Any]) -> str:
    return str(mapping(manifest, "metadata").get("namespace", ""))


def _dns(documents: list[Document]) -> Iterator[tuple[Document, Problem]]:
    """Policies that deny a whole namespace its egress, where none lets it ask for names."""
    policies = [
        document
        for document in documents
        if document.value.get("kind") == "NetworkPolicy" and "Egress" in listed(document.value, "spec", "policyTypes")
    ]
    for document in policies:
        spec = mapping(document.value, "spec")
        if mapping(spec, "podSelector") or spec.get("egress"):
            continue
        open_to = [
            other
            for other in policies
            if _namespace(other.value) == _namespace(document.value)
            and any(allows_dns(rule) for _, rule in items(other.value, "spec", "egress"))
        ]
        if not open_to:
            yield document, Problem("network-dns", ("spec",), "all egress is denied, and no policy lets DNS through")
