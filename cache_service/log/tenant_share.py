"""A tenant's byte budget, shared equally by its namespaces.

A sorted set in Redis lists a tenant's namespaces by expiry time. A compactor adds its namespace and gets some of the
others, so that it can also shrink those that no other process folds. When a tenant begins another namespace, the budget
of its other ones shrinks at their next fold. A purge removes a namespace from the set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_service.errors import StoreRefused
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.fold_plan import FoldLimits
from cache_service.store.answers import as_count, as_text, faults_told
from cache_service.store.connection import Connection

log = logging.getLogger(__name__)

_TOLD_AT_ONCE = 16  # a tenant may have very many namespaces
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """max_bytes: limit for the segments of all of a tenant's namespaces."""

    tenant: str
    max_bytes: int


def share_of(limits: FoldLimits, max_bytes: int, num_namespaces: int) -> FoldLimits:
    """Budgets of one of `num_namespaces` namespaces: an equal share of `max_bytes`, but at least one byte."""
    share = max_bytes // max(1, num_namespaces)
    return limits.model_copy(update={"max_bytes": max(1, min(limits.max_bytes, share))})


class TenantShare:
    """Computes the budgets of one namespace at each fold."""

    def __init__(
        self,
        connection: Connection,
        keys: StoreKeys,
        budget: TenantBudget,
        limits: FoldLimits,
        keep_s: int,
        on_others: Callable[[list[str]], None],
    ) -> None:
        """limits: the budgets of a tenant's only namespace. keep_s: the namespace's time to live after a fold.
        on_others: receives a random sample of the tenant's other namespaces."""
        self._connection = connection
        self._namespace = keys.namespace
        self._name = tenant_key(keys.fingerprint, budget.tenant)
        self._budget = budget
        self._limits = limits
        self._keep_s = keep_s
        self._on_others = on_others
        self._is_refused = False

    def __call__(self, has_new: bool) -> FoldLimits:
        """has_new: there are new entries, so its life is extended. If Redis refuses, the namespace counts as the
        tenant's only one, so that folding goes on. Raises StoreUnavailable."""
        try:
            num_others = self._count_others(has_new)
        except StoreRefused as error:
            if not self._is_refused:
                log.warning("each namespace of a tenant may take the tenant's whole budget: %s", error)
            self._is_refused, num_others = True, 0
        return share_of(self._limits, self._budget.max_bytes, num_others + 1)

    def _count_others(self, has_new: bool) -> int:
        now = time.time()
        with faults_told(), self._connection.client().pipeline(transaction=True) as pipeline:
            if has_new:
                pipeline.zadd(self._name, {self._namespace: now + self._keep_s})
                pipeline.expire(self._name, self._keep_s)
            pipeline.zremrangebyscore(self._name, "-inf", now)
            pipeline.zscore(self._name, self._namespace)
            pipeline.zcard(self._name)
            pipeline.zrandmember(self._name, _TOLD_AT_ONCE)
            *_, own, count, some = pipeline.execute()
            num_others = as_count(count) - (own is not None)
            others = {as_text(member) for member in some or ()} - {self._namespace}
        self._on_others(sorted(others))
        return num_others


def leave_tenants(connection: Connection, keys: StoreKeys) -> None:
    """Remove a purged namespace from the set of its tenant. Scans the whole server. Raises StoreError."""
    with faults_told():
        client = connection.client()
        for name in client.scan_iter(match=tenant_key(keys.fingerprint, "*"), count=_SCAN_COUNT):
            client.zrem(name, keys.namespace)


def tenant_key(fingerprint: str, tenant: str) -> str:
    """The key of a tenant's set; it belongs to no namespace."""
    return f"sd:tenant:{{{fingerprint}:{tenant}}}:namespaces"
