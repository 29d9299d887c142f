"""Metrics of a router: rounds, drafters, links and shared cache. Names follow the rules of
`cluster.gateway.observability.metrics`; no name is used by both."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from actors.workers.demand import combined_drafts
from cache_service.counts.soft_exchange import SoftExchangeStats
from cluster.cache.shared_cache import CacheStats, SharedCache
from cluster.router.connections import Connections
from cluster.router.core import RouterCore
from cluster.router.counters import RouterCounters
from cluster.router.driver import RouterDriver

_CURVE_ROWS = (1, 4, 16, 64, 256)  # row counts at which the cost curve is shown

_Table = tuple[tuple[str, str, str], ...]  # name, attribute of the source that is read, help text

# fmt: off
_GAUGES: _Table = (
    ("paceline_sequences_running", "core.num_running", "Sequences in rounds"),
    ("paceline_sequences_waiting", "core.num_waiting", "Sequences that wait to be admitted"),
    ("paceline_kv_blocks", "core.blocks.total", "KV blocks of the target"),
    ("paceline_kv_blocks_free", "core.blocks.free", "KV blocks of the target without a sequence"),
    ("paceline_draft_workers", "connections.num_draft_links", "Draft workers connected"),
    ("paceline_draft_worker_gain_ratio", "demand.gain",
     "Estimated rise of tokens a second with one draft worker more: 0.1 is a tenth more"),
    ("paceline_draft_worker_loss_ratio", "demand.loss",
     "Estimated fall of tokens a second with one draft worker fewer"),
    ("paceline_target_connected", "driver.has_target", "1 while the target group answers"),
    ("paceline_link_calls_in_flight", "connections.num_in_flight", "Calls to workers that wait for an answer"),
)

_COUNTERS: _Table = (
    ("paceline_rounds", "counters.rounds", "Rounds committed"),
    ("paceline_target_rows", "counters.rows", "Rows computed by the target, prompts included"),
    ("paceline_target_seconds", "counters.verify_s", "The target's own time in rounds"),
    ("paceline_head_seconds", "counters.head_s", "Time of the draft head beside the target"),
    ("paceline_router_seconds", "driver.router_seconds", "Time spent in the router's own code"),
    ("paceline_emitted_tokens", "counters.emitted_tokens", "Tokens emitted"),
    ("paceline_requests_refused", "counters.refused", "Requests refused: queue full, or objective out of reach"),
    ("paceline_preemptions", "counters.preempted", "Sequences that gave up their KV blocks"),
    ("paceline_stale_sequences", "counters.stale_sequences", "Sequences that the target had lost"),
    ("paceline_abandoned_rounds", "counters.abandoned_rounds", "Rounds without an answer of the target"),
    ("paceline_rounds_ahead_sent", "counters.ahead_sent", "Rounds sent while the target computed the one before"),
    ("paceline_rounds_ahead_used", "counters.ahead_used", "Rounds sent ahead that the target carried out"),
    ("paceline_rounds_ahead_declined", "counters.ahead_declined",
     "Rounds sent ahead that the target declined, because their drafts would have cost more than the wait"),
    ("paceline_targets_lost", "counters.targets_lost", "Target groups lost without notice"),
    ("paceline_drafts_ahead_ready", "counters.ready_drafts", "Drafts made ahead that were ready when asked for"),
    ("paceline_drafts_ahead_missed", "counters.missed_drafts", "Drafts made ahead that were not ready, or not whole"),
    ("paceline_spec_decode_num_proposed_tokens", "counters.proposed_nodes",
     "Draft nodes that could have been verified; equal ones of several sources count once"),
    ("paceline_spec_decode_wasted_rows", "counters.wasted_rows", "Draft nodes that the target computed and rejected"),
    ("paceline_awaited_drafts", "counters.awaited_drafts", "Answers of draft workers that rounds waited for"),
    ("paceline_late_drafts", "counters.late_drafts", "Awaited answers that came too late"),
    ("paceline_stale_drafts", "counters.stale_drafts", "Sequences that a draft worker had lost"),
    ("paceline_link_disconnects", "disconnects", "Connections to workers that ended"),
)

# name, label, attribute of the source that is read: values by label, help text
_LABELLED = (
    ("paceline_spec_decode_num_draft_tokens", "source", "counters.drafted_tokens", "Draft nodes verified"),
    ("paceline_spec_decode_num_accepted_tokens", "source", "counters.accepted_tokens", "Draft tokens accepted"),
    ("paceline_drafter_errors", "source", "counters.drafter_errors", "Failures of a drafter"),
    ("paceline_invalid_draft_trees", "source", "counters.invalid_trees", "Malformed trees dropped"),
    ("paceline_planner_rounds", "decision", "counters.planner_rounds",
     "Rounds by what was decided about drafts: see `cluster.router.draft_choice.PlannerDecision`"),
    ("paceline_answers", "class", "counters.answers", "Answers that have begun and finished at this router"),
    ("paceline_answers_within_objectives", "class", "counters.good_answers",
     "Of those, within the objectives of their class; without objectives, all"),
    ("paceline_objective_refusals", "class", "counters.unreachable",
     "Requests refused because their first token would have been late"),
    ("paceline_link_messages", "direction", "messages", "Messages on links, at the router's end"),
    ("paceline_link_bytes", "direction", "sizes", "Bytes of these messages"),
)

_CACHE_GAUGES: _Table = (
    ("paceline_cache_queued_tokens", "queued_tokens", "Committed tokens that wait to be written"),
    ("paceline_cache_breaker_open", "breaker_open", "1 while the store is left alone after failed writes"),
    ("paceline_cache_index_namespaces", "index.namespaces", "Namespaces that are followed"),
    ("paceline_cache_index_tokens", "index.tokens", "Tokens that can be drafted from"),
    ("paceline_cache_index_memory_bytes", "index.memory_bytes", "Bytes of indexes in this process alone"),
    ("paceline_cache_index_mapped_bytes", "index.mapped_bytes", "Bytes of indexes in files that processes share"),
    ("paceline_cache_warm_ratio", "index.warm_ratio",
     "Share of the stored segments of followed namespaces that can be drafted from"),
    ("paceline_cache_lag_seconds", "index.lag_s", "Longest time since a namespace in use was known to have been read"),
)

_CACHE_COUNTERS: _Table = (
    ("paceline_cache_published_tokens", "publisher.published_tokens", "Committed tokens that were to be shared"),
    ("paceline_cache_written_tokens", "publisher.written_tokens", "Tokens written to the store"),
    ("paceline_cache_written_bytes", "publisher.written_bytes", "Bytes written to the store for them"),
    ("paceline_cache_write_failures", "publisher.failures", "Writes that found the store unavailable"),
    ("paceline_cache_breaker_openings", "publisher.breaker_opened", "Pauses of the store after failed writes"),
    ("paceline_cache_invalid_pieces", "publisher.invalid_pieces", "Pieces of text that no entry can hold"),
    ("paceline_cache_missing_segments", "index.missing_segments", "Segments of a manifest that the store lacks"),
    ("paceline_cache_index_builds", "index.builds", "Indexes built here"),
    ("paceline_cache_index_maps", "index.maps", "Indexes found built by another process"),
    ("paceline_cache_folds", "folds", "Parts of logs folded into segments"),
    ("paceline_cache_resets", "index.resets", "Namespaces read anew: other data, or a gap"),
    ("paceline_cache_damaged", "index.damaged", "Stored entries, segments and manifests that cannot be read"),
    ("paceline_cache_index_evictions", "index.evictions", "Namespaces that gave way to others"),
    ("paceline_cache_index_refusals", "index.refusals", "Namespaces not drafted from: no room, or an invalid name"),
    ("paceline_cache_index_overflows", "index.overflows", "Logs folded too slowly, of which a part was left out"),
    ("paceline_cache_index_faults", "index.build_faults", "Indexes that could not be built"),
    ("paceline_cache_publisher_faults", "publisher.faults", "Faults of the publisher: each one is a bug"),
)

_PROMOTION_GAUGES: _Table = (
    ("paceline_cache_promotion_queued_answers", "queued_texts", "Answers that wait to be looked through for phrases"),
)

_PROMOTION_COUNTERS: _Table = (
    ("paceline_cache_promotion_offered_phrases", "counters.offered", "Phrases offered to the gate"),
    ("paceline_cache_promotion_refused_phrases", "counters.refused_offers", "Phrases over quota, or opted out"),
    ("paceline_cache_promotion_kept_phrases", "counters.kept", "Phrases that got enough supporters"),
    ("paceline_cache_promotion_dropped_phrases", "counters.dropped", "Phrases that lost support, or look sensitive"),
    ("paceline_cache_promotion_batches", "counters.batches", "Batches of the public pool written"),
    ("paceline_cache_promotion_refused_batches", "counters.refused_batches", "Batches that the store refused"),
    ("paceline_cache_promotion_damaged", "counters.unreadable", "Stored phrases and batches that cannot be read"),
    ("paceline_cache_promotion_foreign_writes", "counters.foreign_writes", "Writes into the public pool past the gate"),
    ("paceline_cache_promotion_dropped_answers", "dropped_texts", "Answers not searched: too many, or tenant gone"),
    ("paceline_cache_promotion_failures", "failures", "Tries that found the store unavailable or refusing"),
)

_REGIONS_GAUGES: _Table = (
    ("paceline_cache_regions_clusters", "gauges.clusters", "Other clusters that share with this one, at its leader"),
    ("paceline_cache_regions_segments", "gauges.segments", "Segments imported from them"),
    ("paceline_cache_regions_bytes", "gauges.bytes", "Bytes of these segments"),
    ("paceline_cache_regions_lag_seconds", "gauges.lag_s", "Longest time since one of them wrote its listing"),
)

_REGIONS_COUNTERS: _Table = (
    ("paceline_cache_regions_exchanges", "counters.exchanges", "Exchanges with the object store"),
    ("paceline_cache_regions_failures", "counters.failures", "Exchanges that found a store unavailable or refusing"),
    ("paceline_cache_regions_exported_bytes", "counters.exported_bytes", "Bytes of segments written for others"),
    ("paceline_cache_regions_exported_segments", "counters.exported_segments", "Segments written for others"),
    ("paceline_cache_regions_imported_bytes", "counters.imported_bytes", "Bytes of segments read from others"),
    ("paceline_cache_regions_imported_segments", "counters.imported_segments", "Segments read from others"),
    ("paceline_cache_regions_rejected_objects", "counters.rejected_objects", "Torn, forged or unreadable objects"),
    ("paceline_cache_regions_missing_segments", "counters.missing_segments", "Listed segments that were not to be had"),
)

_SOFT_GAUGES: _Table = (
    ("paceline_cache_soft_namespaces", "namespaces", "Namespaces whose counts are exchanged"),
    ("paceline_cache_soft_waiting_contexts", "waiting_contexts", "Contexts of others, read and not yet added"),
    ("paceline_cache_soft_warm_ratio", "warm_ratio", "Share of the stored counts read, the least of all namespaces"),
)

_SOFT_COUNTERS: _Table = (
    ("paceline_cache_soft_merged_contexts", "merged_contexts", "Contexts of others that were added"),
    ("paceline_cache_soft_exported_contexts", "exported_contexts", "Contexts taken to be written"),
    ("paceline_cache_soft_written_bytes", "written_bytes", "Bytes written to the store for them"),
    ("paceline_cache_soft_refused_contexts", "refused_contexts", "Contexts that the store refused"),
    ("paceline_cache_soft_damaged", "corrupt", "Stored counts that cannot be read"),
    ("paceline_cache_soft_resets", "resets", "Tables dropped because their data set ended"),
    ("paceline_cache_soft_failures", "failures", "Tries that found the store unavailable or refusing"),
    ("paceline_cache_soft_faults", "faults", "Faults of the exchange itself"),
)
# fmt: on


class RouterMetrics:
    """Reads the counts of core, driver, links and cache at scrape time: rounds pay nothing for metrics."""

    def __init__(
        self, core: RouterCore, driver: RouterDriver, connections: Connections, cache: SharedCache | None = None
    ) -> None:
        self._core = core
        self._driver = driver
        self._connections = connections
        self._cache = cache
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> str:
        """Prometheus text format."""
        return generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Metric]:
        core, traffic = self._core, self._connections.traffic()
        sources = SimpleNamespace(
            core=core,
            counters=core.counters,
            driver=self._driver,
            connections=self._connections,
            demand=combined_drafts(scaling.demand(time.monotonic()) for scaling in core.draft_scaling.values()),
            messages={direction: traffic[direction] for direction in ("sent", "received")},
            sizes={direction: traffic[f"{direction}_bytes"] for direction in ("sent", "received")},
            disconnects=traffic["closed"],
        )
        yield from _read(_GAUGES, _COUNTERS, sources)
        for name, label, path, text in _LABELLED:
            yield _labelled(CounterMetricFamily(name, text, labels=[label]), attrgetter(path)(sources))
        yield from _histograms(core.counters)
        text = "Expected time of a target forward by its rows, as the planner has measured it"
        seconds = {str(rows): core.step_times.seconds(rows) for rows in _CURVE_ROWS}
        yield _labelled(GaugeMetricFamily("paceline_step_time_seconds", text, labels=["rows"]), seconds)
        text = "Draft workers connected, by pool"
        workers = {pool: len(models) for pool, models in self._connections.draft_models().items()}
        by_pool = dict.fromkeys(core.pools, 0) | workers
        yield _labelled(GaugeMetricFamily("paceline_draft_pool_workers", text, labels=["pool"]), by_pool)
        text = "1 while drafts of the source are accepted far more seldom than they used to be"
        collapsed = GaugeMetricFamily("paceline_spec_decode_acceptance_collapsed", text, labels=["source"])
        yield _labelled(collapsed, core.acceptance.collapsed)
        text = "Messages dropped on links, by the end that dropped them and reason; workers tell theirs every second"
        errors = CounterMetricFamily("paceline_link_errors", text, labels=["end", "reason"])
        for end_and_reason, count in sorted(self._connections.drops().items()):
            errors.add_metric(end_and_reason, count)
        yield errors
        if self._cache is not None:
            yield from cache_metrics(self._cache.stats())
        if core.soft_sharing is not None:
            yield from soft_metrics(core.soft_sharing.stats())


def _read(gauges: _Table, counters: _Table, source: object) -> Iterator[Metric]:
    for name, path, text in gauges:
        yield GaugeMetricFamily(name, text, value=attrgetter(path)(source))
    for name, path, text in counters:
        yield CounterMetricFamily(name, text, value=attrgetter(path)(source))


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _histograms(counters: RouterCounters) -> Iterator[Metric]:
    """Without the times at which they were made."""
    for histogram in (counters.draft_lateness, counters.queue_time, counters.prefill_time):
        for metric in histogram.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    """Metrics of the shared cache; its drafts are counted among the other sources, as `cache`."""
    yield from _read(_CACHE_GAUGES, _CACHE_COUNTERS, stats)
    text = "Tokens that were not written: the queue was full, the store refused them, or their time was purged"
    dropped = CounterMetricFamily("paceline_cache_dropped_tokens", text, labels=["reason"])
    publisher = stats.publisher
    reasons = {"overflow": publisher.overflow_tokens, "refused": publisher.refused_tokens}
    yield _labelled(dropped, reasons | {"purged": publisher.purged_tokens})
    if stats.promotion is not None:
        # Phrases are counted when their batch is written, and not before.
        yield from _read(_PROMOTION_GAUGES, _PROMOTION_COUNTERS, stats.promotion)
    if stats.regions is not None:
        yield from _read(_REGIONS_GAUGES, _REGIONS_COUNTERS, stats.regions)


def soft_metrics(stats: SoftExchangeStats) -> Iterator[Metric]:
    """Metrics of the soft_ngram counts that routers exchange through the shared cache."""
    yield from _read(_SOFT_GAUGES, _SOFT_COUNTERS, stats)
