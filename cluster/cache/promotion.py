"""The cluster's promotion gate: which tenants feed the public pool, by which policy, and what is kept out."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actors.errors import PacelineError
from actors.models.loader import load_tokenizer
from actors.models.source import ModelSource
from actors.models.token_text import TokenText
from cache_service.formats.frame import FrameCodec
from cache_service.formats.namespaces import namespace_of
from cache_service.promotion.promotion_gate import Blocks, PromotionGate, PromotionTerms
from cache_service.promotion.sensitive_spans import SensitiveSpans
from cache_service.store.store import Store
from cluster.config import PromotionConfig
from cluster.errors import ConfigError
from cluster.tenants.registry import Registry, StoredTenant
from cluster.tenants.registry_file import RegistryFollower

logger = logging.getLogger(__name__)

_REST_S = 0.002  # pause between slices of a batch, since rounds wait for each slice
_COMMON_TOKENS = 0.9  # share of the vocabulary, from id 0, that counts as common: tokenizers number by frequency


def may_feed(tenant: StoredTenant) -> bool:
    """Whether the tenant's answers may become public with enough others."""
    return tenant.policy == "promoted" and not tenant.disabled and tenant.limits.cache_bytes != 0


def organisation_of(registry: Registry, tenant_id: str) -> str:
    """The tenant's own namespace. Under it the tenant counts once at the gate, independent of its number of keys."""
    return namespace_of(bytes.fromhex(registry.server_key), tenant_id)


def secret_of(registry: Registry) -> bytes:
    return hmac.digest(bytes.fromhex(registry.server_key), b"promotion", "sha256")


def terms_of(registry: Registry, config: PromotionConfig) -> PromotionTerms:
    members = frozenset(organisation_of(registry, tenant.id) for tenant in registry.tenants if may_feed(tenant))
    return PromotionTerms(secret_of(registry), config, members)


def sensitive_spans(source: ModelSource, never: tuple[str, ...] = ()) -> SensitiveSpans:
    """The filter for a model's tokens. Raises ModelError where their bytes are unknown."""
    text = TokenText(load_tokenizer(source), source.name)
    first_rare = int(_COMMON_TOKENS * len(text))
    return SensitiveSpans(text.bytes_of, is_rare=lambda token_id: token_id >= first_rare, never=never)


@dataclass(frozen=True, slots=True)
class PromotionSource:
    """What a router needs to open its gate."""

    registry_file: Path
    model: ModelSource
    config: PromotionConfig
    clock: Callable[[], float] | None = None  # Unix time; None: the clock of Redis, which all routers share
    poll_s: float = 1.0


class PublicPool:
    """Opens the gate of one model's public pool and follows the registry of tenants. For one thread."""

    def __init__(self, source: PromotionSource, open_pool: Callable[[], tuple[Store, FrameCodec]]) -> None:
        self._source = source
        self._open_pool = open_pool
        self._follower: RegistryFollower | None = None
        self._registry: Registry | None = None
        self._members: dict[str, str] = {}  # organisations by tenant
        self._terms: PromotionTerms | None = None
        self._gate: PromotionGate | None = None
        self._blocks: Blocks | None = None
        self._is_broken = False

    def look(self) -> tuple[PromotionGate, frozenset[str]] | None:
        """The gate and its members; None while no tenant has the policy, or if the filter cannot be made."""
        registry = self._follow()
        if registry is None or self._is_broken:
            return None
        if registry is not self._registry or self._terms is None:
            terms = self._terms_of(registry)
            if self._terms is None or terms.secret != self._terms.secret:
                self._gate = None
            self._registry, self._terms = registry, terms
        if self._gate is None:
            if not self._terms.members and not any(tenant.policy == "promoted" for tenant in registry.tenants):
                return None
            self._gate = self._open_gate(self._terms)
        return None if self._gate is None else (self._gate, self._terms.members)

    def _terms_of(self, registry: Registry) -> PromotionTerms:
        """As `terms_of`, by what has changed: there may be very many tenants."""
        same_key = self._registry is not None and self._registry.server_key == registry.server_key
        if not same_key:
            self._members.clear()
        for tenant_id, tenant in registry.changes_since(self._registry if same_key else None).items():
            if tenant is not None and may_feed(tenant):
                self._members[tenant_id] = organisation_of(registry, tenant_id)
            else:
                self._members.pop(tenant_id, None)
        return PromotionTerms(secret_of(registry), self._source.config, frozenset(self._members.values()))

    def _follow(self) -> Registry | None:
        try:
            if self._follower is None:
                self._follower = RegistryFollower(self._source.registry_file, lambda: None)
        except ConfigError as error:
            logger.debug("nothing is promoted while there is no registry: %s", error)
            return None
        return self._follower.current()

    def _open_gate(self, terms: PromotionTerms) -> PromotionGate | None:
        if self._blocks is None:
            try:
                self._blocks = sensitive_spans(self._source.model, self._source.config.never)
            except PacelineError as error:
                logger.error("nothing is promoted here: %s", error)
                self._is_broken = True
                return None
        store, codec = self._open_pool()
        return PromotionGate(
            store, codec, terms.secret, self._blocks, policy=terms.policy, clock=self._source.clock, rest_s=_REST_S
        )
