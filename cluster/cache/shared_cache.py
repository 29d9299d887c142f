"""A router's side of the shared cache: publishes the tokens it commits, and indexes those of all routers to draft from.

Nothing here raises or waits because of the store: an outage costs speed, never a request.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import SOFT_NGRAM
from actors.drafters.soft_ngram import SoftNgramDrafter
from cache_service.counts.soft_compactor import SoftCompactorSettings
from cache_service.counts.soft_exchange import MAX_NAMESPACES, SoftExchange, SoftExchangeSettings
from cache_service.errors import SettingError, StoreRefused
from cache_service.formats.documents import Int32Array, RecordKind
from cache_service.formats.earnings import Earnings
from cache_service.formats.frame import FrameCodec
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.namespaces import OPEN, PUBLIC
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.epoch_watch import MAX_NAMESPACES as MAX_WATCHED
from cache_service.index.epoch_watch import EpochWatch, EpochWatchSettings
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.index_files import default_directory
from cache_service.index.warm_index import WarmIndex, WarmIndexStats
from cache_service.log.compactor import Compactor, CompactorSettings, CompactorThread
from cache_service.log.earnings_ledger import EarningsLedger
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.hit_rate_limits import limits_by_hit_rate
from cache_service.log.log_feed import LogFeed
from cache_service.log.publisher import Publisher, PublisherCounters, PublisherSettings
from cache_service.log.tenant_share import TenantBudget, TenantShare
from cache_service.promotion.promotion_thread import PromotionThread
from cache_service.regions.regions_thread import RegionsThread
from cache_service.store.admin_store import AdminStore
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.fair_share import first_to_give_way
from cache_service.store.store import Store
from cluster.cache.access import connection_settings, key_ring
from cluster.cache.promotion import PromotionSource, PublicPool
from cluster.cache.regions import RegionsSource, open_regions
from cluster.cache.soft_sharing import SoftSharing
from cluster.config import CacheConfig
from cluster.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedCacheSettings:
    """How a router uses the cache."""

    publisher: PublisherSettings = field(default_factory=PublisherSettings)
    compactor: CompactorSettings = field(default_factory=CompactorSettings)
    index: WarmIndexSettings = field(default_factory=WarmIndexSettings)
    soft: SoftExchangeSettings = field(default_factory=SoftExchangeSettings)  # `order` is taken from the drafter
    epochs: EpochWatchSettings = field(default_factory=EpochWatchSettings)
    publish_prompts: bool = False
    max_compacted: int = 256  # namespaces that this process compacts, most recently written


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Figures for the metrics."""

    publisher: PublisherCounters
    queued_tokens: int
    breaker_open: bool
    folds: int
    index: WarmIndexStats
    promotion: PromotionThread | None  # None: nothing is promoted through this process
    regions: RegionsThread | None = None  # None: nothing is exchanged with other clusters


class SharedCache:
    """Publisher, compactor and index of one process."""

    def __init__(
        self,
        connection: ConnectionSettings,
        fingerprint: str,
        ring: KeyRing | None = None,
        settings: SharedCacheSettings | None = None,
        promotion: PromotionSource | None = None,
        regions: RegionsSource | None = None,
    ) -> None:
        """fingerprint: hash of target weights, tokenizer and chat template. promotion: None: this process promotes
        nothing to the public pool. regions: None: it exchanges nothing with other clusters. Raises SettingError."""
        StoreKeys(fingerprint, OPEN)
        self._settings = settings or SharedCacheSettings()
        self.fingerprint = fingerprint
        self._ring = ring
        self._connection = Connection(connection)
        self.publisher = Publisher(self._open, self._settings.publisher)
        self.compactor = CompactorThread(self._open, self._settings.compactor)
        self._feed = LogFeed(connection, self._settings.index.directory)
        self.index = WarmIndex(self._open, self._settings.index, self._feed)
        self.earnings = EarningsLedger(self._open_earnings, keep_s=self._settings.compactor.keep_s)
        self.epochs = EpochWatch(self._connection, self._keys, self._settings.epochs, self._feed)
        self._compactors: OrderedDict[str, Compactor] = OrderedDict()  # most recently written last
        self._folds = 0  # by compactors that were dropped
        self._exchanges: list[SoftExchange] = []  # one for each live drafter
        self._budgets: dict[str, TenantBudget] = {}  # by namespace compacted here
        self._others: deque[tuple[str, TenantBudget]] = deque(maxlen=self._settings.max_compacted)
        self._promotion: PromotionThread | None = None
        if promotion is not None:
            pool = PublicPool(promotion, lambda: self._open(PUBLIC))
            self._promotion = PromotionThread(pool.look, poll_s=promotion.poll_s)
        self._regions: RegionsThread | None = None
        if regions is not None:
            self._regions = open_regions(regions, fingerprint, self._open, self._settings.compactor.keep_s)

    def bounded(self, namespace: str, tenant: str, max_bytes: int | None) -> None:
        """max_bytes: limit of all namespaces of the tenant together; None: as much as others."""
        budget = None if max_bytes is None else TenantBudget(tenant, max_bytes)
        if self._budgets.get(namespace) != budget:
            self._compact(namespace, budget)
        while self._others:  # the tenant's other namespaces, which perhaps nobody writes to any more
            other, others_budget = self._others.popleft()
            if other not in self._compactors:
                self._compact(other, others_budget)
                break  # one a request: a tenant may have very many

    def prompted(self, namespace: str, document_id: bytes, token_ids: Int32Array) -> None:
        if self._settings.publish_prompts:
            self._publish(namespace, document_id, 0, token_ids, kind=RecordKind.PROMPT)

    def committed(self, namespace: str, document_id: bytes, offset: int, token_ids: Sequence[int] | Int32Array) -> None:
        self._publish(namespace, document_id, offset, token_ids, kind=RecordKind.OUTPUT)

    def answered(self, organisation: str, token_ids: Int32Array) -> None:
        """A whole answer, shape [n], of a request whose organisation feeds the public pool."""
        if self._promotion is not None:
            self._promotion.submit(organisation, token_ids)

    def finished(self, namespace: str, earnings: Earnings) -> None:
        self.earnings.add(namespace, earnings)

    def follow(self, namespaces: Sequence[str]) -> None:
        """Index these namespaces, so that requests can draft from them."""
        for namespace in namespaces:
            self.index.follow(namespace)

    def watch(self, namespace: str, learner: object) -> None:
        """The learner learns of this namespace, so `ended` reports its end. Call it with every request, and again for
        ended namespaces in use."""
        self.epochs.watch(namespace, learner)

    def ended(self, learner: object) -> Sequence[str]:
        """Namespaces whose learnt statistics this learner must drop now; each is reported once to every learner."""
        return self.epochs.ended(learner)

    def share_counts(self, drafters: Mapping[str, CpuDrafter]) -> SoftSharing | None:
        """Exchange the counts of the drafter soft_ngram with other processes until this cache is closed or the drafter
        is collected. None: there is no such drafter, or it records no deltas."""
        drafter = drafters.get(SOFT_NGRAM)
        if not isinstance(drafter, SoftNgramDrafter) or not drafter.delta_bytes:
            return None
        settings = self._settings.soft.model_copy(update={"order": drafter.order})
        exchange = SoftExchange(self._open, settings, feed=self._feed)
        self._exchanges.append(exchange)
        weakref.finalize(drafter, _end, self._exchanges, exchange).atexit = False
        return SoftSharing(exchange, drafter, self._settings.publish_prompts)

    def stats(self) -> CacheStats:
        return CacheStats(
            publisher=replace(self.publisher.counters),
            queued_tokens=self.publisher.queued_tokens,
            breaker_open=self.publisher.is_breaker_open,
            folds=self._folds + sum(compactor.counters.folds for compactor in list(self._compactors.values())),
            index=self.index.stats(),
            promotion=self._promotion,
            regions=self._regions,
        )

    def close(self, timeout_s: float = 2.0) -> bool:
        """Flush the queue and end all threads; False if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        is_done = True
        own = (self.publisher.close, self.compactor.close, self.index.close, self.earnings.close, self.epochs.close)
        lent = [exchange.close for exchange in list(self._exchanges)]
        if self._promotion is not None:
            lent.append(self._promotion.close)
        if self._regions is not None:
            lent.append(self._regions.close)
        for close in (*own, *lent, self._feed.close):
            is_done &= close(max(0.0, deadline - time.monotonic()))
        self._connection.close()
        return is_done

    def _publish(
        self,
        namespace: str,
        document_id: bytes,
        offset: int,
        token_ids: Sequence[int] | Int32Array,
        kind: RecordKind,
    ) -> None:
        self.publisher.publish(namespace, document_id, offset, token_ids, kind=kind)
        if namespace in self._compactors:
            self._compactors.move_to_end(namespace)
            if self._compactors[namespace].rests:
                self.compactor.wake(namespace, self._compactors[namespace])
        else:
            self._compact(namespace)

    def _compact(self, namespace: str, budget: TenantBudget | None = None) -> None:
        try:
            limits = self._limits(namespace, budget)
            replaced = self._compactors.pop(namespace, None)
            self._compactors[namespace] = self.compactor.compact(namespace, limits, may_rest=budget is None)
            if budget is not None:
                self._budgets[namespace] = budget
            else:
                self._budgets.pop(namespace, None)
        except SettingError:  # not a valid namespace: the publisher drops it and logs that
            return
        if replaced is not None:
            self._folds += replaced.counters.folds
        if len(self._compactors) > self._settings.max_compacted:
            gone = first_to_give_way(list(self._compactors))
            compactor = self._compactors.pop(gone)
            self.compactor.forget(gone)
            self._budgets.pop(gone, None)
            self._folds += compactor.counters.folds

    def _limits(self, namespace: str, budget: TenantBudget | None) -> Callable[[bool], FoldLimits]:
        """Limits for folding a namespace: its tenant's share, reduced if hit rates are low. Raises SettingError."""
        own, earnings = self._settings.compactor.limits, self._open_earnings(namespace)
        share = None
        if budget is not None:
            share = TenantShare(
                self._connection,
                self._keys(namespace),
                budget,
                own,
                keep_s=self._settings.compactor.keep_s,
                on_others=lambda others: self._others.extend((other, budget) for other in others),
            )

        def limits(has_new: bool) -> FoldLimits:
            allowed = own if share is None else share(has_new)
            try:
                return limits_by_hit_rate(allowed, earnings.read_earnings())
            except StoreRefused:  # the cache user may fold but not read earnings
                return allowed

        return limits

    def _open(self, namespace: str) -> tuple[Store, FrameCodec]:
        keys = self._keys(namespace)
        return Store(self._connection, keys), FrameCodec(keys, self._ring)

    def _keys(self, namespace: str) -> StoreKeys:
        return StoreKeys(self.fingerprint, namespace or OPEN)

    def _open_earnings(self, namespace: str) -> AdminStore:
        return AdminStore(self._connection, self._keys(namespace))


def _end(exchanges: list[SoftExchange], exchange: SoftExchange) -> None:
    """Finalizer: close a collected drafter's exchange without blocking."""
    exchanges.remove(exchange)
    exchange.close(0.0)


def open_shared_cache(
    config: CacheConfig,
    fingerprint: str,
    vocab_size: int,
    promotion: PromotionSource | None = None,
    regions: RegionsSource | None = None,
) -> SharedCache | None:
    """The cache that the configuration names, for the model with this fingerprint; None if it names none or its secrets
    cannot be read here."""
    try:
        connection, ring = connection_settings(config), key_ring(config)
    except ConfigError as error:
        logger.error("there is no shared cache here: %s", error)
        return None
    if connection is None:
        return None
    settings = settings_of(config, vocab_size)
    cache = SharedCache(connection, fingerprint, ring, settings=settings, promotion=promotion, regions=regions)
    cache.follow([OPEN])  # namespaces of tenants are followed with their first request
    return cache


def settings_of(config: CacheConfig, vocab_size: int) -> SharedCacheSettings:
    return SharedCacheSettings(
        publisher=PublisherSettings(max_queued_tokens=config.max_queued_tokens, keep_s=config.keep_s),
        compactor=CompactorSettings(keep_s=config.keep_s),
        index=WarmIndexSettings(
            directory=config.index_directory or default_directory(),
            vocab_size=vocab_size,
            index_tokens=config.index_tokens,
            namespace_tokens=min(config.namespace_tokens, config.index_tokens),
            max_namespaces=config.max_namespaces,
        ),
        soft=SoftExchangeSettings(
            max_namespaces=min(config.max_namespaces, MAX_NAMESPACES),
            keep_s=config.keep_s,
            compactor=SoftCompactorSettings(keep_s=config.keep_s),
        ),
        epochs=EpochWatchSettings(
            max_namespaces=min(max(EpochWatchSettings().max_namespaces, config.max_namespaces), MAX_WATCHED),
            keep_s=config.keep_s,
        ),
        publish_prompts=config.publish_prompts,
    )
