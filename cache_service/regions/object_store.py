"""The object store between clusters: a directory, S3 or whatever else fsspec reads. The part of a store that belongs
to one model is `<url>/<fingerprint>/`, with a folder for each cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from cache_service.errors import ObjectStoreError, SettingError
from cache_service.regions.records import CLUSTER_PATTERN


class ObjectStore(Protocol):
    """Objects by cluster and name. Methods raise ObjectStoreError."""

    def clusters(self) -> list[str]: ...

    def sizes(self, cluster: str) -> dict[str, int]:
        """Bytes of a cluster's objects."""

    def read(self, cluster: str, name: str, max_bytes: int) -> bytes | None:
        """At most max_bytes + 1 bytes; None if there is no such object."""

    def write(self, cluster: str, name: str, data: bytes) -> None: ...

    def delete(self, cluster: str, name: str) -> None: ...


class FsspecObjects:
    """Objects in a file system of fsspec. Nothing is contacted before the first call."""

    def __init__(self, url: str, fingerprint: str, options: Mapping[str, Any] | None = None) -> None:
        """options: storage options of the file system, e.g. its credentials. Raises SettingError, which does not show
        them."""
        from fsspec.core import url_to_fs  # takes a while, and most clusters do without

        try:
            self._files, root = url_to_fs(url, use_listings_cache=False, **dict(options or {}))
        except (ImportError, ValueError, TypeError) as error:
            raise SettingError("url", url, f"fsspec cannot open it: {type(error).__name__}") from None
        self._root = f"{root.rstrip('/')}/{fingerprint}"

    def clusters(self) -> list[str]:
        return sorted(name for name in self._list(self._root) if re.fullmatch(CLUSTER_PATTERN, name))

    def sizes(self, cluster: str) -> dict[str, int]:
        return self._list(f"{self._root}/{cluster}")

    def read(self, cluster: str, name: str, max_bytes: int) -> bytes | None:
        with _faults_told(), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._path(cluster, name), start=0, end=max_bytes + 1))
        return None

    def write(self, cluster: str, name: str, data: bytes) -> None:
        with _faults_told():
            path = self._path(cluster, name)
            if "file" not in self._files.protocol:
                self._files.pipe_file(path, data)
                return
            # A directory needs folders, and a file appears in it before it is complete.
            self._files.makedirs(f"{self._root}/{cluster}", exist_ok=True)
            self._files.pipe_file(f"{path}.part", data)
            self._files.mv(f"{path}.part", path)

    def delete(self, cluster: str, name: str) -> None:
        with _faults_told(), suppress(FileNotFoundError):
            self._files.rm_file(self._path(cluster, name))

    def _path(self, cluster: str, name: str) -> str:
        return f"{self._root}/{cluster}/{name}"

    def _list(self, path: str) -> dict[str, int]:
        found: list[Any] = []
        with _faults_told(), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(path, detail=True)
        return {one["name"].rstrip("/").rpartition("/")[2]: int(one.get("size") or 0) for one in found}


@contextmanager
def _faults_told() -> Iterator[None]:
    """File systems raise whatever their libraries do."""
    try:
        yield
    except Exception as error:
        raise ObjectStoreError(f"{type(error).__name__}: {error}") from error
