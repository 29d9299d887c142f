"""Runs all layers over paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.deploy.validate.admission import check_admission
from cluster.deploy.validate.cluster_files import check_config
from cluster.deploy.validate.crds import Definitions
from cluster.deploy.validate.documents import Document, read_documents
from cluster.deploy.validate.finding import Problem, finding
from cluster.deploy.validate.kustomize import FILES, build, kustomization_in
from cluster.deploy.validate.ray_cluster import check_ray, is_ray
from cluster.deploy.validate.references import References, check_doubles
from cluster.deploy.validate.report import Report
from cluster.deploy.validate.rules import RULES
from cluster.deploy.validate.schemas import Schemas
from cluster.deploy.validate.serve_config import check_serve_config
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import mapping
from cluster.errors import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 32 * 2**20  # of a file; what lies under a name may have no end
_SECTIONS = ClusterConfig.model_fields.keys()
# What a file has in it where its mistakes matter, although it only lies beside others.
_MAY_BE_OURS = re.compile(rf"""^[ \t{{]*["']?(apiVersion|kind|{"|".join(_SECTIONS)})["']?\s*:""", re.MULTILINE)


def validate(paths: list[Path], crds: Path | None = None, ignore: Sequence[str] = ()) -> Report:
    """All findings but those of the rules to `ignore`, in the order of files and lines. Raises ConfigError for a path
    that is not there or cannot be read, for a rule that there is not, for `crds` without definitions, and where
    manifests are found and the optional packages are not."""
    for rule in ignore:
        if rule not in RULES:
            raise ConfigError(f"--ignore {rule}: there is no such rule{did_you_mean(rule, RULES)}")
    run = _Run(Definitions(crds) if crds is not None else None)
    for path in paths:
        try:
            run.path(path)
        except OSError as error:
            raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from None
    run.report.findings = sorted({each for each in run.report.findings if each.rule not in ignore})
    if run.schemas is not None and run.schemas.unchecked:
        kinds = ", ".join(sorted(run.schemas.unchecked))
        run.report.notes.append(f"no schema for {kinds}; give their definitions with --crds")
    return run.report


class _Run:
    def __init__(self, definitions: Definitions | None) -> None:
        self.report = Report()
        self.schemas: Schemas | None = None
        self._definitions = definitions
        self._entered: set[Path] = set()  # directories; links may lead round in a circle

    def path(self, path: Path) -> None:
        """One that was given. Raises OSError where it cannot be read."""
        before = self.report.num_documents, len(self.report.findings), len(self.report.notes)
        if path.is_dir():
            self._entered.clear()
            self._directory(path)
        elif path.name in FILES:
            self._overlay(path)
        else:
            self._files([path], is_given=True)
        if before == (self.report.num_documents, len(self.report.findings), len(self.report.notes)):
            self.report.notes.append(f"{path} has nothing in it to check")

    def _directory(self, directory: Path) -> None:
        """An overlay is built; in other directories every file is read."""
        if (real := directory.resolve()) in self._entered:
            return
        self._entered.add(real)
        if (kustomization := kustomization_in(directory)) is not None:
            self._overlay(kustomization)
        elif (directory / "Chart.yaml").is_file() or (directory.parent / "Chart.yaml").is_file():
            self.report.notes.append(f"{directory} is of a chart; give what `helm template` renders of it")
        else:
            entries = sorted(directory.iterdir())
            self._files([entry for entry in entries if entry.is_file() and entry.suffix in _SUFFIXES], is_given=False)
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith("."):
                    self._directory(entry)

    def _overlay(self, kustomization: Path) -> None:
        documents = self._read(kustomization)[0]
        if any(mapping(document.value).get("kind") == "Component" for document in documents):
            what = "is a component; it is checked in the overlays that use it"
            self.report.notes.append(f"{kustomization.parent} {what}")
            return
        text, why = build(kustomization.parent)
        if why is not None:
            self.report.findings.append(finding(str(kustomization), 1, "", Problem("kustomize-build", (), why)))
            return
        documents, problems = read_documents(str(kustomization), text)
        self.report.findings += problems
        self._manifests(documents)

    def _files(self, files: list[Path], *, is_given: bool) -> None:
        manifests: list[Document] = []
        for file in files:
            documents, problems, text = self._read(file)
            ours = [document for document in documents if _is_manifest(document.value) or _is_config(document.value)]
            # Files that only lie beside manifests may be anything.
            if is_given or ours or (not documents and _MAY_BE_OURS.search(text)):
                self.report.findings += problems
            elif problems:
                self.report.notes.append(f"{file} is neither manifest nor cluster configuration")
            for document in documents:
                if _is_manifest(document.value):
                    manifests.append(document)
                elif _is_config(document.value) or (is_given and _SECTIONS & mapping(document.value).keys()):
                    self.report.num_documents += 1
                    self.report.findings += [document.find(problem) for problem in check_config(document.value)]
                elif is_given:
                    what = "neither apiVersion and kind nor a section of a cluster configuration"
                    self.report.findings.append(document.find(Problem("file-kind", (), what)))
                else:
                    self.report.notes.append(f"{file} is neither manifest nor cluster configuration")
        self._manifests(manifests)

    def _read(self, file: Path) -> tuple[list[Document], list[Any], str]:
        """The documents of a file, what is wrong with it, and its text. Raises OSError."""
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig", errors="replace")
        if len(data) > MAX_BYTES:
            what = f"it has more than {MAX_BYTES} bytes, the most that is read"
        elif "\ufffd".encode() not in data and "\ufffd" in text:
            what = "the file is not UTF-8"
        else:
            return *read_documents(str(file), text), text
        return [], [finding(str(file), 1, "", Problem("yaml-syntax", (), what))], text

    def _manifests(self, documents: list[Document]) -> None:
        self.report.num_documents += len(documents)
        if documents and self.schemas is None:
            self.schemas = Schemas(self._definitions)
        found = [(document, problem) for document in documents for problem in check_manifest(document, self.schemas)]
        found += check_set(documents)
        self.report.findings += [document.find(problem) for document, problem in found]


def _is_manifest(value: object) -> bool:
    """A kubectl configuration is none, although it has a version and a kind."""
    version, kind = (mapping(value).get(key) for key in ("apiVersion", "kind"))
    return isinstance(version, str) and isinstance(kind, str) and (version, kind) != ("v1", "Config")


def _is_config(value: object) -> bool:
    """Whether a document has nothing but our sections at its top."""
    return bool(mapping(value)) and mapping(value).keys() <= _SECTIONS


def check_manifest(document: Document, schemas: Schemas | None) -> Iterator[Problem]:
    """What can be said of one object alone. Where a schema and another layer say something of the same place, the
    other layer is heard: it knows what the value is for."""
    if not _is_manifest(document.value):
        yield Problem("file-kind", (), "a document without apiVersion and kind")
        return
    others: list[Problem] = []
    if is_ray(document.value):
        others += check_ray(document.value)
        if document.value["kind"] == "RayService":
            others += check_serve_config(document.value)
    places = {problem.where for problem in others}
    if schemas is not None and document.value["kind"] != "CustomResourceDefinition":
        yield from (problem for problem in schemas.check(document.value) if problem.where not in places)
    yield from others


def check_set(documents: list[Document]) -> Iterator[tuple[Document, Problem]]:
    """What only several objects together get wrong: those of one file, directory or overlay."""
    manifests = [document for document in documents if _is_manifest(document.value)]
    yield from check_doubles(manifests)
    yield from References(manifests).check()
    yield from check_admission(manifests)
