"""Whether a cluster asks for API keys: decided when it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.workers.ray_environment import is_loopback
from cluster.errors import ConfigError
from cluster.tenants.registry_file import read_registry

if TYPE_CHECKING:
    from cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class TenantAccess:
    """file: absolute path. may_be_open: everybody is served until the file exists, then keys are required.
    allow_shared, allow_promoted: whether these policies are in force; otherwise such tenants are isolated. has_regions:
    other clusters share with this one."""

    file: Path
    may_be_open: bool
    allow_shared: bool = False
    allow_promoted: bool = True
    has_regions: bool = False


def registry_path(config: ClusterConfig, home: Path) -> Path:
    return (config.tenants.file or home / "tenants.json").expanduser().absolute()


def tenant_access(config: ClusterConfig, home: Path) -> tuple[TenantAccess, str | None]:
    """The access and a warning to show, or None. Raises ConfigError if the cluster would be open by accident."""
    file = registry_path(config, home)
    access = TenantAccess(
        file,
        may_be_open=False,
        allow_shared=config.tenants.allow_shared,
        allow_promoted=config.cache.promotion.enabled,
        has_regions=config.cache.regions.url is not None,
    )
    registry = read_registry(file)
    if registry is not None:
        warning = None if registry.tenants else f"{file} holds no tenants, so nobody is served"
        return access, warning
    host = config.gateway.host
    if config.tenants.open:
        warning = f"no tenants: whoever reaches {host} is served without a key (tenants.open)"
    elif config.tenants.file is not None:
        raise ConfigError(
            f"tenants.file is {str(file)!r}: there is no such file; make it with `paceline tenant add NAME`, or set "
            "tenants.open to true"
        )
    elif is_loopback(host):
        warning = f"no tenants: everybody on this machine is served without a key; {file} would name them"
    else:
        raise ConfigError(
            f"gateway.host is {host!r}, and {file} names no tenants: others could reach it without a key; add one with "
            "`paceline tenant add NAME`, stay on 127.0.0.1, or set tenants.open to true"
        )
    return replace(access, may_be_open=True), warning
