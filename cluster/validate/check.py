"""Runs all layers over paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.validate.api_versions import check_api_version
from cluster.validate.cluster_files import check_config, is_config, looks_like_config
from cluster.validate.documents import Document, read_documents
from cluster.validate.finding import Finding, Problem, finding
from cluster.validate.kustomize import FILES, build, kustomization_in
from cluster.validate.objects import check_object
from cluster.validate.ray_cluster import check_ray, is_ray
from cluster.validate.report import Report
from cluster.validate.rules import RULES
from cluster.validate.schemas import Schemas
from cluster.validate.serve_config import check_serve_config
from cluster.validate.sets import check_set
from cluster.validate.suggestion import did_you_mean
from cluster.validate.tree import mapping

_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_BYTES = 32 * 2**20


def validate(paths: list[Path], crds: Path | None = None, ignore: Sequence[str] = ()) -> Report:
    """All findings but those of the rules to `ignore`, in the order of files and lines. Raises ConfigError for a path
    or a rule that is not there, and where manifests are found and the optional packages are not."""
    for rule in ignore:
        if rule not in RULES:
            raise ConfigError(f"--ignore {rule}: there is no such rule{did_you_mean(rule, RULES)}")
    run = _Run(crds)
    for path in paths:
        if path.is_dir():
            run.directory(path)
        elif path.name in FILES:
            run.overlay(path)
        else:
            run.documents_of([path], is_given=True)
    found = {finding for finding in run.report.findings if finding.rule not in ignore}
    run.report.findings = sorted(found)
    if run.schemas is not None and run.schemas.unchecked:
        kinds = ", ".join(sorted(run.schemas.unchecked))
        run.report.notes.append(f"no schema for {kinds}; give their definitions with --crds")
    return run.report


@dataclass(slots=True)
class _Run:
    crds: Path | None
    report: Report = field(default_factory=Report)
    schemas: Schemas | None = None

    def directory(self, directory: Path) -> None:
        """An overlay is built; in other directories every file is read. A chart is left to `helm template`."""
        if kustomization_in(directory) is not None:
            self.overlay(directory / kustomization_in(directory).name)  # type: ignore[union-attr]
            return
        if (directory / "Chart.yaml").is_file():
            self.report.notes.append(f"{directory} is a chart; give what `helm template` renders of it")
            return
        entries = sorted(directory.iterdir())
        files = [entry for entry in entries if entry.is_file() and entry.suffix in _SUFFIXES]
        self.documents_of(files, is_given=False)
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                self.directory(entry)

    def overlay(self, kustomization: Path) -> None:
        documents, problems = self._read(kustomization)
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
            documents, problems = self._read(file)
            # Files that only lie beside manifests may be anything.
            if (
                is_given
                or any(_is_manifest(document.value) or is_config(document.value) for document in documents)
                or (problems and not documents)
            ):
                self.report.findings += problems
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

    def _read(self, file: Path) -> tuple[list[Document], list[Finding]]:
        try:
            size = file.stat().st_size
            if size > _MAX_BYTES:
                raise ConfigError(f"{file} has {size} bytes; the limit is {_MAX_BYTES}")
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            return [], [finding(str(file), 1, "", Problem("yaml-syntax", (), "the file is not UTF-8"))]
        return read_documents(str(file), text)

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


def _is_manifest(value: object) -> bool:
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
