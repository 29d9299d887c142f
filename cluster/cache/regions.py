"""What this cluster shares with others, by its tenant registry: the public pool and the namespaces of its groups."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actors.errors import PacelineError
from actors.models.source import ModelSource
from cache_service.errors import SettingError
from cache_service.formats.namespaces import PUBLIC, REGIONS, namespace_of_group
from cache_service.promotion.promotion_gate import Blocks, nothing_blocked
from cache_service.regions.exchange import RegionExchange
from cache_service.regions.local_store import RedisLocalStore
from cache_service.regions.object_store import FsspecObjects
from cache_service.regions.plan import RegionTerms
from cache_service.regions.records import PUBLIC_LABEL, group_label
from cache_service.regions.regions_thread import RegionsThread
from cache_service.store.store import OpenNamespace
from cluster.cache.access import read_secret
from cluster.cache.promotion import may_feed, sensitive_spans
from cluster.config import PromotionConfig, RegionsConfig
from cluster.errors import ConfigError
from cluster.tenants.registry import Registry
from cluster.tenants.registry_file import RegistryFollower

logger = logging.getLogger(__name__)

OPTIONS_VARIABLE = "PACELINE_REGIONS_OPTIONS"
_LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class RegionsSource:
    """What a router needs to exchange with other clusters."""

    registry_file: Path
    model: ModelSource
    config: RegionsConfig
    promotion: PromotionConfig


def open_regions(
    source: RegionsSource, fingerprint: str, open_namespace: OpenNamespace, keep_s: int
) -> RegionsThread | None:
    """Exchange from now on. None: no url is configured."""
    config = source.config
    url, cluster = config.url, config.cluster
    if url is None or cluster is None:
        return None

    def open_exchange() -> RegionExchange:
        lease_s = max(_LEASE_S, 3 * config.interval_s)
        return RegionExchange(
            RedisLocalStore(open_namespace, keep_s, int(lease_s * 1000)),
            FsspecObjects(url, fingerprint, lambda: storage_options(config)),
            open_namespace(REGIONS)[1],
            cluster,
            max_bytes=config.max_mb * 2**20,
            keep_s=keep_s,
        )

    return RegionsThread(open_exchange, RegionRights(source).terms, config.interval_s)


def storage_options(config: RegionsConfig) -> dict[str, Any]:
    """Options of fsspec's file system. Raises SettingError, which shows no secret."""
    try:
        text = read_secret(
            f"cache.regions.options_file is {config.options_file}", config.options_file, OPTIONS_VARIABLE
        )
        return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])
    except ConfigError as error:
        raise SettingError("options_file", str(config.options_file), str(error)) from None
    except msgspec.MsgspecError:
        where = f"${OPTIONS_VARIABLE}" if config.options_file is None else str(config.options_file)
        raise SettingError("options_file", where, "it must hold an object of JSON") from None


class RegionRights:
    """What may be shared according to the current registry. For one thread."""

    def __init__(self, source: RegionsSource, find_blocks: Callable[[RegionsSource], Blocks] | None = None) -> None:
        self._source = source
        self._find_blocks = find_blocks or (lambda source: sensitive_spans(source.model, source.promotion.never))
        self._follower: RegistryFollower | None = None
        self._blocks: Blocks | None = None
        self._has_no_filter = False

    def terms(self) -> RegionTerms | None:
        """None while the registry cannot be read, or there is none."""
        try:
            if self._follower is None:
                self._follower = RegistryFollower(self._source.registry_file, lambda: None)
            registry = self._follower.current()
        except ConfigError as error:
            logger.debug("nothing is exchanged while there is no registry: %s", error)
            return None
        if registry is None:
            return None
        namespaces = _groups(registry)
        blocks = self._filter() if self._source.promotion.enabled and any(map(may_feed, registry.tenants)) else None
        if blocks is not None:
            namespaces[PUBLIC_LABEL] = PUBLIC
        policy = self._source.promotion
        return RegionTerms(
            namespaces,
            min_tenants=policy.min_tenants,
            max_tokens=policy.max_tokens,
            blocks=nothing_blocked if blocks is None else blocks,
            rules=hashlib.sha256(repr((policy.max_tokens, policy.never)).encode()).hexdigest(),
        )

    def _filter(self) -> Blocks | None:
        if self._blocks is None and not self._has_no_filter:
            try:
                self._blocks = self._find_blocks(self._source)
            except PacelineError as error:
                logger.error("public phrases are not exchanged: %s", error)
                self._has_no_filter = True
        return self._blocks


def _groups(registry: Registry) -> dict[str, str]:
    """Namespaces of groups with a member, by label."""
    server_key = bytes.fromhex(registry.server_key)
    return {
        group_label(tenant.group): namespace_of_group(server_key, tenant.group)
        for tenant in registry.tenants
        if tenant.policy == "group" and tenant.group is not None and not tenant.disabled
    }
