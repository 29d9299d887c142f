"""What the namespaces of one tenant may hold together: each an equal share of it.

Which namespaces a tenant has is a sorted set in Redis, by the time at which they expire. Whoever folds one of them
joins it and learns of some others, and whoever finds one that nobody folds may have it shrink: when a tenant begins
another namespace, the older ones have less from their next turn on. A purge of a namespace takes it out.
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

_TOLD_AT_ONCE = 16  # others: a tenant may have very many
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class TenantBudget:
    """max_bytes: of the segments of all namespaces of the tenant."""

    tenant: str
    max_bytes: int


def share_of(limits: FoldLimits, max_bytes: int, num_namespaces: int) -> FoldLimits:
    """The budgets of one of so many namespaces. Their `max_bytes` together are never more than the tenant's, but for a
    byte each where there is none to share."""
    share = max_bytes // max(1, num_namespaces)
    return limits.model_copy(update={"max_bytes": max(1, min(limits.max_bytes, share))})


class TenantShare:
    """The budgets of one namespace, as the tenant has others or not. Asked by the one that folds it."""

    def __init__(
        self,
        connection: Connection,
        keys: StoreKeys,
        budget: TenantBudget,
        limits: FoldLimits,
        keep_s: int,
        on_others: Callable[[list[str]], None] = lambda others: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """keys: of the namespace. limits: its budgets were it alone in the world. keep_s: that it lives after what is
        folded now. on_others: told of some of the tenant's other namespaces, ever others."""
        self._connection = connection
        self._namespace = keys.namespace
        self._name = tenant_key(keys.fingerprint, budget.tenant)
        self._budget = budget
        self._limits = limits
        self._keep_s = keep_s
        self._on_others = on_others
        self._clock = clock
        self._is_refused = False

    def __call__(self, has_new: bool) -> FoldLimits:
        """has_new: there is something to fold, so it lives on. Where Redis does not let us ask, the namespace counts as
        the tenant's only one: better than none that is folded. Raises StoreUnavailable."""
        try:
            num_others = self._ask(has_new)
        except StoreRefused as error:
            if not self._is_refused:
                log.warning("each namespace of a tenant may take what all may together: %s", error)
            self._is_refused, num_others = True, 0
        return share_of(self._limits, self._budget.max_bytes, num_others + 1)

    def _ask(self, has_new: bool) -> int:
        """How many others there are."""
        now = self._clock()
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
    """Take a namespace that has been purged out of the list of its tenant, whoever that is. Looks through the whole
    server. Raises StoreError."""
    with faults_told():
        client = connection.client()
        for name in client.scan_iter(match=tenant_key(keys.fingerprint, "*"), count=_SCAN_COUNT):
            client.zrem(name, keys.namespace)


def tenant_key(fingerprint: str, tenant: str) -> str:
    """A key of the tenant's own: no namespace's, so that it is no part of what a namespace holds."""
    return f"sd:tenant:{{{fingerprint}:{tenant}}}:namespaces"
