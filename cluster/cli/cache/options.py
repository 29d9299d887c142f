"""Options of the commands of `paceline cache`: the cluster, the namespace and the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

import typer

from actors.errors import MISSING, InvalidRequest
from actors.home import paceline_home
from actors.models.catalog import Progress, resolve_model
from cache_service.admin.audit_log import os_user
from cluster.cache.access import data_directory
from cluster.cache.admin.documents import ImportModel
from cluster.cache.admin.names import Names
from cluster.cache.admin.service import CacheAdminService, NamespaceQuery
from cluster.cache.admin.store_access import administered
from cluster.cli.shared_options import ClusterOptions
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.tenants.access import registry_path
from cluster.tenants.registry_file import read_registry

FingerprintOption = Annotated[str | None, typer.Option(help="Of one model, as `list` shows it.", show_default=False)]
TargetOption = Annotated[
    str | None, typer.Option(help="The model; by default the configuration's.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class NamespaceOptions:
    """Which namespace, of every model that has it."""

    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="As `list` shows it; or the name of a part, which requests ask for in speculation.namespace.",
            show_default=False,
        ),
    ] = None
    tenant: Annotated[
        str | None, typer.Option(help="Whose namespace, by the tenant's name; without, of requests without a key.")
    ] = None

    def query(self, fingerprint: str | None = None) -> NamespaceQuery:
        """Raises InvalidRequest where neither a namespace nor a tenant is named."""
        if self.namespace is None and self.tenant is None:
            raise InvalidRequest("--namespace", MISSING, "name one, or a --tenant; see `paceline cache list`")
        return NamespaceQuery(self.namespace or "", self.tenant or "", fingerprint or "")


@dataclass(frozen=True, kw_only=True)
class StoredNamespace(NamespaceOptions):
    """Which namespace, of every model or of one."""

    fingerprint: FingerprintOption = None

    def stored(self) -> NamespaceQuery:
        """Raises InvalidRequest where neither a namespace nor a tenant is named."""
        return self.query(self.fingerprint)


@dataclass(frozen=True, kw_only=True)
class Place(ClusterOptions):
    """Which cluster, and where its cache is."""

    url: Annotated[
        str | None, typer.Option(help="Of the Redis or Valkey server, instead of cache.url.", show_default=False)
    ] = None
    directory: Annotated[
        Path | None,
        typer.Option(help="Data of a cluster's own server, instead of cache.directory.", show_default=False),
    ] = None

    @cached_property
    def cluster(self) -> ClusterConfig:
        """Raises ConfigError."""
        overrides: list[str] = []
        if self.url is not None and self.directory is not None:
            raise ConfigError("give --url or --directory, not both")
        if self.url is not None:
            overrides.append(f"cache.url={json.dumps(self.url)}")
        if self.directory is not None:
            overrides += ["cache.url=null", f"cache.directory={json.dumps(str(self.directory))}"]
        return self.load(*overrides)

    @property
    def where(self) -> str:
        """Where the cache is, without a password."""
        url = self.cluster.cache.url
        return f"in {data_directory(self.cluster.cache)}" if url is None else f"at {re.sub('//.*@', '//', url)}"

    @property
    def is_missing(self) -> bool:
        """Whether the cache would be a server's own that has never stored anything."""
        return self.cluster.cache.url is None and not data_directory(self.cluster.cache).is_dir()

    def names(self) -> Names:
        return Names(read_registry(registry_path(self.cluster, paceline_home())), self.cluster.tenants.allow_shared)

    def model(self, target: str | None, progress: Progress | None) -> ImportModel:
        """target: None: the configuration's."""
        return model_of(target or self.cluster.target.model, progress)

    @contextmanager
    def service(
        self, target: str | None = None, progress: Progress | None = None, *, creates: bool = False
    ) -> Iterator[CacheAdminService]:
        """target: the model of imports. Raises ConfigError where there is no cache, unless the command `creates` it."""
        if self.is_missing and not creates:
            raise ConfigError(f"there is no cache {self.where}; name another with --url, --directory or --config")
        model = cache(lambda: self.model(target, progress))
        with administered(self.cluster.cache, f"cli {os_user()}") as administration:
            yield CacheAdminService(administration, model, self.names, self.cluster.cache.promotion)


def model_of(target: str, progress: Progress | None) -> ImportModel:
    """Raises ModelError."""
    return ImportModel(resolve_model(target, paceline_home(), *([progress] if progress is not None else [])))
