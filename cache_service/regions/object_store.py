"""The object store between clusters: a directory, S3, or another file system of fsspec. The part of a store that
belongs to one model is `<url>/<fingerprint>/`, with a folder for each cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EINVAL
from typing import Any, Protocol

from cache_service.errors import ObjectStoreError, SettingError
from cache_service.regions.records import CLUSTER_PATTERN

_SECRET_CHARS = 4  # shorter texts in options are no secrets
_SHOWN_CHARS = 300  # of an error of the file system


class ObjectStore(Protocol):
    """Objects by cluster and name. Methods raise ObjectStoreError; listings also SettingError."""

    def clusters(self) -> list[str]: ...

    def sizes(self, cluster: str) -> dict[str, int]:
        """Bytes of a cluster's objects."""

    def read(self, cluster: str, name: str, max_bytes: int) -> bytes | None:
        """At most max_bytes + 1 bytes; None if there is no such object."""

    def write(self, cluster: str, name: str, data: bytes) -> None: ...

    def delete(self, cluster: str, name: str) -> None: ...


class FsspecObjects:
    """Objects in a file system of fsspec. Nothing is contacted before the first call."""

    def __init__(self, url: str, fingerprint: str, options: Callable[[], Mapping[str, Any]] = dict) -> None:
        """options: storage options of the file system, e.g. its credentials; asked for again with every listing, since
        they may be replaced. Raises SettingError, which does not show them, as listings do."""
        self._url = url
        self._fingerprint = fingerprint
        self._options = options
        self._open()

    def clusters(self) -> list[str]:
        return sorted(name for name in self._list() if re.fullmatch(CLUSTER_PATTERN, name))

    def sizes(self, cluster: str) -> dict[str, int]:
        return self._list(f"/{cluster}")

    def read(self, cluster: str, name: str, max_bytes: int) -> bytes | None:
        path = self._path(cluster, name)
        with self._faults_told(), suppress(FileNotFoundError):
            if not self._is_directory or self._files.isfile(path):  # opening a pipe would wait for its writer
                return self._first_bytes(path, max_bytes + 1)
        return None

    def _first_bytes(self, path: str, count: int) -> bytes:
        try:
            return bytes(self._files.cat_file(path, start=0, end=count))
        except OSError as error:  # S3 has no range of an empty object
            if error.errno != EINVAL or self._files.size(path):
                raise
            return b""

    def write(self, cluster: str, name: str, data: bytes) -> None:
        path = self._path(cluster, name)
        with self._faults_told():
            if self._is_directory:
                self._write_file(path, data)
            else:
                self._files.pipe_file(path, data)

    def delete(self, cluster: str, name: str) -> None:
        with self._faults_told(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(cluster, name))

    def _write_file(self, path: str, data: bytes) -> None:
        """A directory needs folders, and a file appears in it before it is complete."""
        part = f"{path}.part"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with suppress(FileNotFoundError):
            self._files.rm_file(part)
        with self._files.open(part, "xb") as file:  # not through a link that somebody has put there
            file.write(data)
        self._files.mv(part, path)

    def _path(self, cluster: str, name: str) -> str:
        return f"{self._root}/{cluster}/{name}"

    def _open(self) -> None:
        """Cheap with unchanged options: fsspec remembers its file systems."""
        from fsspec.core import url_to_fs  # takes a while, and most clusters do without

        options = self._options()
        try:
            self._files, root = url_to_fs(self._url, use_listings_cache=False, **options)
        except Exception as error:  # whatever the file system's library does
            raise SettingError("url", self._url, f"fsspec cannot open it: {type(error).__name__}") from None
        self._root = f"{root.rstrip('/')}/{self._fingerprint}"
        self._is_directory = "file" in self._files.protocol
        self._secrets = tuple(_texts(options))

    def _list(self, below: str = "") -> dict[str, int]:
        self._open()
        with self._faults_told(), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(f"{self._root}{below}", detail=True)
            return {one["name"].rstrip("/").rpartition("/")[2]: int(one.get("size") or 0) for one in found}
        return {}

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        """File systems raise any exceptions of their libraries."""
        try:
            yield
        except Exception as error:
            raise ObjectStoreError(f"{type(error).__name__}: {_shown(str(error), self._secrets)}") from None


def _texts(options: Any) -> Iterator[str]:
    """All text in storage options, any of which may be a credential."""
    if isinstance(options, str) and len(options) >= _SECRET_CHARS:
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _texts(value)
    elif isinstance(options, list):
        for value in options:
            yield from _texts(value)


def _shown(message: str, secrets: Iterable[str]) -> str:
    """One short line without secrets, users of urls, and signatures in their queries."""
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, "***")
    message = re.sub(r"\?\S+", "?***", re.sub(r"//[^/@\s]+@", "//***@", message))
    return " ".join(message.split())[:_SHOWN_CHARS]
