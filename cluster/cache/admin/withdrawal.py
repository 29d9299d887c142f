"""Tenants that may feed the public pool no longer leave it as soon as an administrator says so."""

from __future__ import annotations

from cache_service.admin.audit_log import os_user
from cluster.cache.access import data_directory
from cluster.cache.admin.store_access import administered
from cluster.cache.promotion import terms_of
from cluster.config import NO_CACHE, ClusterConfig, paceline_home
from cluster.tenants.access import registry_path
from cluster.tenants.registry_file import read_registry


def feeders(config: ClusterConfig) -> frozenset[str]:
    """Organisations that may feed the public pool, by the registry as it is now. Raises ConfigError."""
    registry = read_registry(registry_path(config, paceline_home()))
    return frozenset() if registry is None else terms_of(registry, config.cache.promotion).members


def withdraw_those_gone(config: ClusterConfig, before: frozenset[str]) -> bool:
    """Those of `before` that are no feeders now are out of all public pools when this returns, and those that are new
    may come in. Returns whether somebody was in a pool's reach. Raises ConfigError and CacheError; the routers of a
    running cluster do the same when they look at the registry next."""
    registry = read_registry(registry_path(config, paceline_home()))
    if registry is None:
        return False
    terms = terms_of(registry, config.cache.promotion)
    gone = before - terms.members
    if terms.members == before or not _may_have_data(config):
        return False
    with administered(config.cache, paceline_home() / "cache-audit.jsonl", f"cli {os_user()}") as administration:
        pools = administration.withdraw(gone, terms)
    return bool(gone and pools)


def _may_have_data(config: ClusterConfig) -> bool:
    if config.cache.url is None:
        return data_directory(config.cache).is_dir()
    return config.cache.url != NO_CACHE
