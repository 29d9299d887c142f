"""What the commands of `paceline cache` are told: which cluster's cache, which namespace of it, which model's."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from actors.errors import InvalidRequest
from actors.models.catalog import Progress, resolve_model
from cache_service.admin.audit_log import os_user
from cluster.cache.access import data_directory
from cluster.cache.admin.documents import ImportModel
from cluster.cache.admin.names import Names
from cluster.cache.admin.service import CacheAdminService, NamespaceQuery
from cluster.cache.admin.store_access import administered
from cluster.cli.serve import default_config
from cluster.config import ClusterConfig, load_config, paceline_home
from cluster.errors import ConfigError
from cluster.tenants.access import registry_path
from cluster.tenants.registry_file import read_registry

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="As `list` shows it; or the name of a part, which requests ask for in speculation.namespace.",
        show_default=False,
    ),
]
TenantOption = Annotated[
    str | None, typer.Option(help="Whose namespace, by the tenant's name; without, of requests without a key.")
]
FingerprintOption = Annotated[str | None, typer.Option(help="Of one model, as `list` shows it.", show_default=False)]
TargetOption = Annotated[
    str | None, typer.Option(help="The model; by default the configuration's.", show_default=False)
]
UrlOption = Annotated[
    str | None, typer.Option(help="Of the Redis or Valkey server, instead of cache.url.", show_default=False)
]
DirectoryOption = Annotated[
    Path | None, typer.Option(help="Data of a cluster's own server, instead of cache.directory.", show_default=False)
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="The cluster's configuration, whose section cache counts.", show_default=False)
]
SettingsOption = Annotated[list[str], typer.Option("--set", metavar="PATH.TO.KEY=VALUE", help="Override a setting.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]

Own = ParamSpec("Own")


class Place:
    """Which cluster, and where its cache is."""

    def __init__(
        self,
        url: UrlOption = None,
        directory: DirectoryOption = None,
        config: ConfigOption = None,
        settings: SettingsOption = [],  # noqa: B006 (typer makes a new list of it)
    ) -> None:
        """Raises ConfigError."""
        overrides = list(settings)
        if url is not None and directory is not None:
            raise ConfigError("give --url or --directory, not both")
        if url is not None:
            overrides.append(f"cache.url={json.dumps(url)}")
        if directory is not None:
            overrides += ["cache.url=null", f"cache.directory={json.dumps(str(directory))}"]
        self.config: ClusterConfig = load_config(config or default_config(), overrides)

    @property
    def where(self) -> str:
        """Where the cache is, without a password."""
        url = self.config.cache.url
        return f"in {data_directory(self.config.cache)}" if url is None else f"at {re.sub('//.*@', '//', url)}"

    @property
    def is_missing(self) -> bool:
        """Whether the cache would be a server's own that has never stored anything."""
        return self.config.cache.url is None and not data_directory(self.config.cache).is_dir()

    def names(self) -> Names:
        return Names(read_registry(registry_path(self.config, paceline_home())), self.config.tenants.allow_shared)

    def model(self, target: str | None, progress: Progress | None) -> ImportModel:
        """target: None: the configuration's."""
        return model_of(target or self.config.target.model, progress)

    @contextmanager
    def service(
        self, target: str | None = None, progress: Progress | None = None, *, creates: bool = False
    ) -> Iterator[CacheAdminService]:
        """target: the model of imports. Raises ConfigError where there is no cache, unless the command `creates` it."""
        if self.is_missing and not creates:
            raise ConfigError(f"there is no cache {self.where}; name another with --url, --directory or --config")
        model = cache(lambda: self.model(target, progress))
        with administered(self.config.cache, f"cli {os_user()}") as administration:
            yield CacheAdminService(administration, model, self.names, self.config.cache.promotion)


def at_place(command: Callable[Concatenate[Place, Own], None]) -> Callable[..., None]:
    """The command with the options of a place behind its own; it gets the place as its first argument."""
    options = inspect.signature(Place, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        place = Place(**{name: given.pop(name) for name in options})
        command(place, **given)  # type: ignore[call-arg]  # typer gives what the signature below asks for

    own = inspect.signature(command, eval_str=True)
    parameters = [*list(own.parameters.values())[1:], *options.values()]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # where typer looks
    return run


def model_of(target: str, progress: Progress | None) -> ImportModel:
    """Raises ModelError."""
    return ImportModel(resolve_model(target, paceline_home(), *([progress] if progress is not None else [])))


def query_of(namespace: str | None, tenant: str | None, fingerprint: str | None = None) -> NamespaceQuery:
    """Raises InvalidRequest where neither a namespace nor a tenant is named."""
    if namespace is None and tenant is None:
        raise InvalidRequest("--namespace", None, "name one, or a --tenant; see `paceline cache list`")
    return NamespaceQuery(namespace or "", tenant or "", fingerprint or "")
