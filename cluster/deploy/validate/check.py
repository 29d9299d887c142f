"""Runs all layers over paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.deploy.validate.api_versions import check_api_version
from cluster.deploy.validate.cluster_files import check_config, is_config, looks_like_config
from cluster.deploy.validate.crd_schemas import CrdSchemas
from cluster.deploy.validate.documents import Document, read_documents
from cluster.deploy.validate.finding import Finding, Problem, finding
from cluster.deploy.validate.kustomize import FILES, build, kustomization_in
from cluster.deploy.validate.objects import check_object
from cluster.deploy.validate.ray_cluster import check_ray, is_ray
from cluster.deploy.validate.report import Report
from cluster.deploy.validate.rules import RULES
from cluster.deploy.validate.schemas import Schemas
from cluster.deploy.validate.serve_config import check_serve_config
from cluster.deploy.validate.sets import check_set
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import mapping
from cluster.errors import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 32 * 2**20  # of a file; what lies under a name may have no end
_SECTIONS = "|".join(ClusterConfig.model_fields)
# What a file has in it where its mistakes matter, although it only lies beside others.
_MAY_BE_OURS = re.compile(rf"""^[ \t{{]*["']?(apiVersion|kind|{_SECTIONS})["']?\s*:""", re.MULTILINE)


def validate(paths: list[Path], crds: Path | None = None, ignore: Sequence[str] = ()) -> Report:
    """All findings but those of the rules to `ignore`, in the order of files and lines. Raises ConfigError for a path
    that is not there or cannot be read, for a rule that there is not, for `crds` without definitions, and where
    manifests are found and the optional packages are not."""
    for rule in ignore:
        if rule not in RULES:
            raise ConfigError(f"--ignore {rule}: there is no such rule{did_you_mean(rule, RULES)}")
    run = _Run(CrdSchemas(crds) if crds is not None else None)
    for path in paths:
        try:
            run.path(path)
        except OSError as error:
            raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from None
    found = {finding for finding in run.report.findings if finding.rule not in ignore}
    run.report.findings = sorted(found)
    if run.schemas is not None and run.schemas.unchecked:
        kinds = ", ".join(sorted(run.schemas.unchecked))
        run.report.notes.append(f"no schema for {kinds}; give their definitions with --crds")
    return run.report


@dataclass(slots=True)
class _Run:
    crds: CrdSchemas | None
    report: Report = field(default_factory=Report)
    schemas: Schemas | None = None
    entered: set[Path] = field(default_factory=set)  # directories; links may lead round in a circle

    def path(self, path: Path) -> None:
        """One that was given. Raises OSError where it cannot be read."""
        before = self.report.num_documents, len(self.report.findings), len(self.report.notes)
        if path.is_dir():
            self.entered.clear()
            self.directory(path)
        elif path.name in FILES:
            self.overlay(path)
        else:
            self.documents_of([path], is_given=True)
        if before == (self.report.num_documents, len(self.report.findings), len(self.report.notes)):
            self.report.notes.append(f"{path} has nothing in it to check")

    def directory(self, directory: Path) -> None:
        """An overlay is built; in other directories every file is read. A chart is left to `helm template`."""
        if (real := directory.resolve()) in self.entered:
            return
        self.entered.add(real)
        if (kustomization := kustomization_in(directory)) is not None:
            self.overlay(kustomization)
            return
        is_of_chart = directory.name == "templates" and (directory.parent / "Chart.yaml").is_file()
        if is_of_chart or (directory / "Chart.yaml").is_file():
            what = "is of a chart" if is_of_chart else "is a chart"
            self.report.notes.append(f"{directory} {what}; give what `helm template` renders of it")
            return
        entries = sorted(directory.iterdir())
        files = [entry for entry in entries if entry.is_file() and entry.suffix in _SUFFIXES]
        self.documents_of(files, is_given=False)
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                self.directory(entry)

    def overlay(self, kustomization: Path) -> None:
        _, documents, problems = self._read(kustomization)
        self.report.findings += problems
        if problems:
            return
        if any(mapping(document.value).get("kind") == "Component" for document in documents):
            self.report.notes.append(
                f"{kustomization.parent} is a component; it is checked in the overlays that use it"
            )
            return
        text, why = build(kustomization.parent)
        if why is not None:
            self.report.findings.append(finding(str(kustomization), 1, "", Problem("kustomize-build", (), why)))
            return
        documents, problems = read_documents(str(kustomization), text, rendered=True)
        self.report.findings += problems
        self._manifests(documents)

    def documents_of(self, files: list[Path], *, is_given: bool) -> None:
        manifests: list[Document] = []
        for file in files:
            text, documents, problems = self._read(file)
            # Files that only lie beside manifests may be anything.
            if (
                is_given
                or any(_is_manifest(document.value) or is_config(document.value) for document in documents)
                or (problems and not documents and _MAY_BE_OURS.search(text))
            ):
                self.report.findings += problems
            elif problems and not documents:
                self.report.notes.append(f"{file} is neither manifest nor cluster configuration")
            for document in documents:
                if _is_manifest(document.value):
                    manifests.append(document)
                elif is_config(document.value) or (is_given and looks_like_config(document.value)):
                    self.report.num_documents += 1
                    self.report.findings += [document.find(problem) for problem in check_config(document.value)]
                elif is_given:
                    what = "neither apiVersion and kind nor a section of a cluster configuration"
                    self.report.findings.append(document.find(Problem("file-kind", (), what)))
                else:
                    self.report.notes.append(f"{file} is neither manifest nor cluster configuration")
        self._manifests(manifests)

    def _read(self, file: Path) -> tuple[str, list[Document], list[Finding]]:
        """The text of a file, its documents, and what is wrong with it. Raises OSError."""
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig", errors="replace")
        if len(data) > MAX_BYTES:
            what = f"it has more than {MAX_BYTES} bytes, the most that is read"
        elif "\ufffd" in text and not _is_utf8(data):
            what = "the file is not UTF-8"
        else:
            return text, *read_documents(str(file), text)
        return text, [], [finding(str(file), 1, "", Problem("yaml-syntax", (), what))]

    def _manifests(self, documents: list[Document]) -> None:
        for document in documents:
            self.report.num_documents += 1
            if not _is_manifest(document.value):
                what = "a document without apiVersion and kind"
                self.report.findings.append(document.find(Problem("file-kind", (), what)))
                continue
            if document.value["kind"] == "CustomResourceDefinition":
                continue
            if self.schemas is None:
                self.schemas = Schemas(self.crds)
            self.report.findings += [document.find(problem) for problem in check_manifest(document.value, self.schemas)]
        manifests = [document for document in documents if _is_manifest(document.value)]
        self.report.findings += [document.find(problem) for document, problem in check_set(manifests)]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_manifest(value: object) -> bool:
    """A kubectl configuration is none, although it has a version and a kind."""
    if isinstance(value, dict) and value.get("apiVersion") == "v1" and value.get("kind") == "Config":
        return False
    return isinstance(value, dict) and isinstance(value.get("apiVersion"), str) and isinstance(value.get("kind"), str)


def check_manifest(manifest: dict[str, Any], schemas: Schemas) -> list[Problem]:
    """All layers over one object. Where a schema and another layer say something of the same place, the other layer is
    heard: it knows what the value is for."""
    others = list(_beyond_schemas(manifest))
    places = {problem.where for problem in others}
    return [problem for problem in schemas.check(manifest) if problem.where not in places] + others


def _beyond_schemas(manifest: dict[str, Any]) -> Iterator[Problem]:
    yield from check_api_version(manifest)
    yield from check_object(manifest)
    if is_ray(manifest):
        yield from check_ray(manifest)
    if manifest.get("kind") == "RayService" and is_ray(manifest):
        yield from check_serve_config(manifest)
