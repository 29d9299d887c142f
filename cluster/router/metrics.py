"""Metrics of a router: the round, its drafters, links and shared cache. Names follow the rules of
`cluster.gateway.metrics`, which none of them repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from actors.workers.demand import DraftDemand
from cache_service.counts.soft_exchange import SoftExchangeStats
from cluster.cache.shared_cache import CacheStats, SharedCache
from cluster.router.connections import Connections
from cluster.router.core import RouterCore
from cluster.router.counters import Distribution
from cluster.router.driver import RouterDriver

_CURVE_ROWS = (1, 4, 16, 64, 256)  # row counts at which the cost curve is shown

_Table = tuple[tuple[str, str, str], ...]  # name, help text, attribute of the source that is read

_GAUGES: _Table = (
    ("paceline_sequences_running", "Sequences in rounds", "core.num_running"),
    ("paceline_sequences_waiting", "Sequences that wait to be admitted", "core.num_waiting"),
    ("paceline_kv_blocks", "KV blocks of the target", "core.total_blocks"),
    ("paceline_kv_blocks_free", "KV blocks of the target without a sequence", "core.free_blocks"),
    ("paceline_draft_workers", "Draft workers connected", "connections.num_draft_links"),
    (
        "paceline_draft_worker_gain_ratio",
        "Of tokens a second by one draft worker more, by the planner's estimate: 0.1 is a tenth more",
        "demand.gain",
    ),
    ("paceline_draft_worker_loss_ratio", "Of tokens a second with one draft worker fewer", "demand.loss"),
    ("paceline_target_connected", "1 while the target group answers", "driver.has_target"),
    ("paceline_link_calls_in_flight", "Calls to workers that wait for an answer", "connections.num_in_flight"),
)

_COUNTERS: _Table = (
    ("paceline_rounds", "Rounds committed", "core.counters.rounds"),
    ("paceline_target_rows", "Rows computed by the target, prompts included", "core.counters.rows"),
    ("paceline_target_seconds", "The target's own time in rounds", "core.counters.verify_s"),
    ("paceline_head_seconds", "Time of the EAGLE head beside the target", "core.counters.head_s"),
    ("paceline_router_seconds", "Time spent in the router's own code", "driver.router_seconds"),
    ("paceline_emitted_tokens", "Tokens emitted", "core.counters.emitted_tokens"),
    ("paceline_requests_refused", "Requests refused because the queue was full", "core.counters.refused"),
    ("paceline_preemptions", "Sequences that gave up their KV blocks", "core.counters.preempted"),
    ("paceline_stale_sequences", "Sequences the target had lost", "core.counters.stale_sequences"),
    ("paceline_abandoned_rounds", "Rounds without an answer of the target", "core.counters.abandoned_rounds"),
    (
        "paceline_targets_lost",
        "Target groups that were lost without having said that they would leave",
        "core.counters.targets_lost",
    ),
    (
        "paceline_drafts_ahead_ready",
        "Drafts that a worker drafting ahead had ready when it was asked",
        "core.counters.ready_drafts",
    ),
    (
        "paceline_drafts_ahead_missed",
        "Drafts that a worker drafting ahead had not, or not all of, when it was asked",
        "core.counters.missed_drafts",
    ),
    (
        "paceline_spec_decode_num_proposed_tokens",
        "Draft nodes that could have been verified; equal ones of several sources count once",
        "core.counters.proposed_nodes",
    ),
    (
        "paceline_spec_decode_wasted_rows",
        "Draft nodes that the target computed and that were not accepted",
        "core.counters.wasted_rows",
    ),
    ("paceline_awaited_drafts", "Answers of draft workers that rounds waited for", "core.counters.awaited_drafts"),
    ("paceline_late_drafts", "Of these, those that came too late", "core.counters.late_drafts"),
    ("paceline_stale_drafts", "Sequences a draft worker had lost", "core.counters.stale_drafts"),
)

_COUNTERS_BY_SOURCE: _Table = (
    ("paceline_spec_decode_num_draft_tokens", "Draft nodes verified, by source", "core.counters.drafted_tokens"),
    ("paceline_spec_decode_num_accepted_tokens", "Draft tokens accepted, by source", "core.counters.accepted_tokens"),
    ("paceline_drafter_errors", "Failures of a drafter, by source", "core.counters.drafter_errors"),
    ("paceline_invalid_draft_trees", "Malformed trees dropped, by source", "core.counters.invalid_trees"),
)

_HISTOGRAMS: _Table = (
    (
        "paceline_draft_lateness_seconds",
        "How long a round that had all else waited for the last of its draft workers",
        "core.counters.draft_lateness",
    ),
    (
        "paceline_request_queue_time_seconds",
        "From a request's arrival at the router to its first round",
        "core.counters.queue_time",
    ),
    (
        "paceline_request_prefill_time_seconds",
        "From a request's first round to its first token",
        "core.counters.prefill_time",
    ),
)

_CACHE_GAUGES: _Table = (
    ("paceline_cache_queued_tokens", "Committed tokens that wait to be written", "queued_tokens"),
    ("paceline_cache_breaker_open", "1 while the store is left alone after failed writes", "breaker_open"),
    ("paceline_cache_index_namespaces", "Namespaces that are followed", "index.namespaces"),
    ("paceline_cache_index_tokens", "Tokens that can be drafted from", "index.tokens"),
    ("paceline_cache_index_memory_bytes", "Bytes of indexes in this process alone", "index.memory_bytes"),
    (
        "paceline_cache_index_mapped_bytes",
        "Bytes of indexes in files that the processes of a machine share",
        "index.mapped_bytes",
    ),
    (
        "paceline_cache_warm_ratio",
        "Share of the stored segments of followed namespaces that can be drafted from",
        "index.warm_ratio",
    ),
    ("paceline_cache_lag_seconds", "Since the namespace in use was read for which that is longest", "index.lag_s"),
)

_CACHE_COUNTERS: _Table = (
    ("paceline_cache_published_tokens", "Committed tokens that were to be shared", "publisher.published_tokens"),
    ("paceline_cache_written_tokens", "Tokens written to the store", "publisher.written_tokens"),
    ("paceline_cache_written_bytes", "Bytes written to the store for them", "publisher.written_bytes"),
    ("paceline_cache_write_failures", "Writes that found the store unavailable", "publisher.failures"),
    (
        "paceline_cache_breaker_openings",
        "Times that the store was left alone after failed writes",
        "publisher.breaker_opened",
    ),
    ("paceline_cache_invalid_pieces", "Pieces of text that no entry can hold", "publisher.invalid_pieces"),
    (
        "paceline_cache_missing_segments",
        "Segments that a manifest names and the store does not have",
        "index.missing_segments",
    ),
    ("paceline_cache_index_builds", "Indexes built here", "index.builds"),
    ("paceline_cache_index_maps", "Indexes found built by another process", "index.maps"),
    ("paceline_cache_folds", "Parts of logs folded into segments", "folds"),
    ("paceline_cache_resets", "Namespaces read anew: other data, or a gap", "index.resets"),
    ("paceline_cache_damaged", "Stored entries, segments and manifests that cannot be read", "index.damaged"),
    ("paceline_cache_index_evictions", "Namespaces that gave way to others", "index.evictions"),
    (
        "paceline_cache_index_refusals",
        "Namespaces that are not drafted from: no room, or no possible name",
        "index.refusals",
    ),
    ("paceline_cache_index_overflows", "Logs folded too slowly, of which a part was left out", "index.overflows"),
    ("paceline_cache_index_faults", "Indexes that could not be built", "index.build_faults"),
    ("paceline_cache_publisher_faults", "Faults of the publisher: each one is a bug", "publisher.faults"),
)

_PROMOTION_GAUGES: _Table = (
    (
        "paceline_cache_promotion_queued_answers",
        "Answers that wait to be looked through for phrases",
        "queued_texts",
    ),
)

_PROMOTION_COUNTERS: _Table = (
    ("paceline_cache_promotion_offered_phrases", "Phrases offered to the gate", "counters.offered"),
    (
        "paceline_cache_promotion_refused_phrases",
        "Phrases of tenants that had opted out or offered too much",
        "counters.refused_offers",
    ),
    ("paceline_cache_promotion_kept_phrases", "Phrases that got enough supporters", "counters.kept"),
    (
        "paceline_cache_promotion_dropped_phrases",
        "Phrases that lost their support, or look sensitive",
        "counters.dropped",
    ),
    ("paceline_cache_promotion_batches", "Batches of the public pool written", "counters.batches"),
    ("paceline_cache_promotion_refused_batches", "Batches that the store refused", "counters.refused_batches"),
    ("paceline_cache_promotion_damaged", "Stored phrases and batches that cannot be read", "counters.unreadable"),
    (
        "paceline_cache_promotion_foreign_writes",
        "Times that somebody had written into the public pool past the gate",
        "counters.foreign_writes",
    ),
    (
        "paceline_cache_promotion_dropped_answers",
        "Answers not looked through: too many, or their tenant had left",
        "dropped_texts",
    ),
    ("paceline_cache_promotion_failures", "Tries that found the store unavailable or refusing", "failures"),
)

_SOFT_GAUGES: _Table = (
    ("paceline_cache_soft_namespaces", "Namespaces whose counts are exchanged", "namespaces"),
    ("paceline_cache_soft_waiting_contexts", "Contexts of others, read and not yet added", "waiting_contexts"),
    (
        "paceline_cache_soft_warm_ratio",
        "Share of the stored counts that have been read, the least of all namespaces",
        "warm_ratio",
    ),
)

_SOFT_COUNTERS: _Table = (
    ("paceline_cache_soft_merged_contexts", "Contexts of others that were added", "merged_contexts"),
    ("paceline_cache_soft_exported_contexts", "Contexts taken to be written", "exported_contexts"),
    ("paceline_cache_soft_written_bytes", "Bytes written to the store for them", "written_bytes"),
    ("paceline_cache_soft_refused_contexts", "Contexts that the store refused", "refused_contexts"),
    ("paceline_cache_soft_damaged", "Stored counts that cannot be read", "corrupt"),
    ("paceline_cache_soft_resets", "Tables dropped because their data set ended", "resets"),
    ("paceline_cache_soft_failures", "Tries that found the store unavailable or refusing", "failures"),
    ("paceline_cache_soft_faults", "Faults of the exchange itself", "faults"),
)


@dataclass(frozen=True, slots=True)
class _Sources:
    """What the first tables read from."""

    core: RouterCore
    driver: RouterDriver
    connections: Connections
    demand: DraftDemand


class RouterMetrics:
    """What a router counts, read from its core and links at scrape time: counting costs rounds nothing."""

    def __init__(
        self, core: RouterCore, driver: RouterDriver, connections: Connections, cache: SharedCache | None = None
    ) -> None:
        self._core = core
        self._driver = driver
        self._connections = connections
        self._cache = cache
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        """Prometheus text format."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        core = self._core
        sources = _Sources(core, self._driver, self._connections, core.draft_scaling.demand(time.monotonic()))
        yield from _gauges(_GAUGES, sources)
        yield from _counters(_COUNTERS, sources)
        for name, text, path in _COUNTERS_BY_SOURCE:
            yield _labelled(CounterMetricFamily(name, text, labels=["source"]), attrgetter(path)(sources))
        for name, text, path in _HISTOGRAMS:
            yield _histogram(name, text, attrgetter(path)(sources))
        yield from self._planner()
        yield from self._links()
        if self._cache is not None:
            yield from cache_metrics(self._cache.stats())
        if core.soft_sharing is not None:
            yield from soft_metrics(core.soft_sharing.stats())

    def _planner(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "paceline_planner_rounds",
            "Rounds by what was decided about drafts: see `cluster.router.draft_choice.PlannerDecision`",
            labels=["decision"],
        )
        yield _labelled(decisions, self._core.counters.planner_rounds)
        curve = GaugeMetricFamily(
            "paceline_step_time_seconds",
            "What a target forward of so many rows is expected to take, as the planner has measured it",
            labels=["rows"],
        )
        for rows in _CURVE_ROWS:
            curve.add_metric([str(rows)], self._core.step_times.seconds(rows))
        yield curve
        collapsed = GaugeMetricFamily(
            "paceline_spec_decode_acceptance_collapsed",
            "1 while drafts of the source are accepted far more seldom than they used to be",
            labels=["source"],
        )
        yield _labelled(collapsed, self._core.acceptance.collapsed)

    def _links(self) -> Iterator[Metric]:
        traffic = self._connections.traffic()
        messages = CounterMetricFamily(
            "paceline_link_messages", "Messages on links, at the router's end", labels=["direction"]
        )
        yield _labelled(messages, {direction: traffic[direction] for direction in ("sent", "received")})
        sizes = CounterMetricFamily("paceline_link_bytes", "Bytes of these messages", labels=["direction"])
        yield _labelled(sizes, {direction: traffic[f"{direction}_bytes"] for direction in ("sent", "received")})
        yield CounterMetricFamily(
            "paceline_link_disconnects", "Connections to workers that ended", value=traffic["closed"]
        )
        errors = CounterMetricFamily(
            "paceline_link_errors",
            "Messages dropped on links, by the end that dropped them and reason; workers tell theirs every second",
            labels=["end", "reason"],
        )
        for end, drops in (("router", self._connections.drops()), ("worker", self._connections.worker_drops())):
            for reason, count in sorted(drops.items()):
                errors.add_metric([end, reason], count)
        yield errors


def _gauges(table: _Table, source: object) -> Iterator[Metric]:
    for name, text, path in table:
        yield GaugeMetricFamily(name, text, value=attrgetter(path)(source))


def _counters(table: _Table, source: object) -> Iterator[Metric]:
    for name, text, path in table:
        yield CounterMetricFamily(name, text, value=attrgetter(path)(source))


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    """Adds a value for each label."""
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _histogram(name: str, text: str, distribution: Distribution) -> HistogramMetricFamily:
    count, buckets = 0, []
    for bound, found in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        count += found
        buckets.append((floatToGoString(bound), float(count)))  # type: ignore[no-untyped-call]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=distribution.total)


def cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    """The shared cache; what its drafts earn is counted under the source `cache` among the others."""
    yield from _gauges(_CACHE_GAUGES, stats)
    yield from _counters(_CACHE_COUNTERS, stats)
    dropped = CounterMetricFamily(
        "paceline_cache_dropped_tokens",
        "Tokens that were not written: the queue was full, the store refused them, or their time was purged",
        labels=["reason"],
    )
    publisher = stats.publisher
    reasons = {"overflow": publisher.overflow_tokens, "refused": publisher.refused_tokens}
    yield _labelled(dropped, reasons | {"purged": publisher.purged_tokens})
    if stats.promotion is not None:
        # Phrases are counted when their batch is written, and not before.
        yield from _gauges(_PROMOTION_GAUGES, stats.promotion)
        yield from _counters(_PROMOTION_COUNTERS, stats.promotion)


def soft_metrics(stats: SoftExchangeStats) -> Iterator[Metric]:
    """The counts of soft_ngram that routers exchange through the shared cache."""
    yield from _gauges(_SOFT_GAUGES, stats)
    yield from _counters(_SOFT_COUNTERS, stats)
