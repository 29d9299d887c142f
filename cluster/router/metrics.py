"""Metrics of a router: the round, its drafters, links and shared cache. Names follow the rules of
`cluster.gateway.metrics`, which none of them repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from cache_service.counts.soft_exchange import SoftExchangeStats
from cluster.cache.shared_cache import CacheStats, PromotionStats, SharedCache
from cluster.router.connections import Connections
from cluster.router.core import RouterCore
from cluster.router.counters import Distribution
from cluster.router.driver import RouterDriver

_CURVE_ROWS = (1, 4, 16, 64, 256)  # row counts at which the cost curve is shown


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
        core, counters = self._core, self._core.counters
        demand = core.draft_scaling.demand(time.monotonic())
        gauges = {
            "paceline_sequences_running": ("Sequences in rounds", core.num_running),
            "paceline_sequences_waiting": ("Sequences that wait to be admitted", core.num_waiting),
            "paceline_kv_blocks": ("KV blocks of the target", core.total_blocks),
            "paceline_kv_blocks_free": ("KV blocks of the target without a sequence", core.free_blocks),
            "paceline_draft_workers": ("Draft workers connected", len(self._connections.draft_links())),
            "paceline_draft_worker_gain_ratio": (
                "Of tokens a second by one draft worker more, by the planner's estimate: 0.1 is a tenth more",
                demand.gain,
            ),
            "paceline_draft_worker_loss_ratio": ("Of tokens a second with one draft worker fewer", demand.loss),
            "paceline_target_connected": ("1 while the target group answers", int(self._driver.has_target)),
            "paceline_link_calls_in_flight": (
                "Calls to workers that wait for an answer",
                self._connections.num_in_flight,
            ),
        }
        yield from _gauges(gauges)
        counts = {
            "paceline_rounds": ("Rounds committed", counters.rounds),
            "paceline_target_rows": ("Rows computed by the target, prompts included", counters.rows),
            "paceline_target_seconds": ("The target's own time in rounds", counters.verify_s),
            "paceline_head_seconds": ("Time of the EAGLE head beside the target", counters.head_s),
            "paceline_router_seconds": ("Time spent in the router's own code", self._driver.router_seconds),
            "paceline_emitted_tokens": ("Tokens emitted", counters.emitted_tokens),
            "paceline_requests_refused": ("Requests refused because the queue was full", counters.refused),
            "paceline_preemptions": ("Sequences that gave up their KV blocks", counters.preempted),
            "paceline_stale_sequences": ("Sequences the target had lost", counters.stale_sequences),
            "paceline_abandoned_rounds": ("Rounds without an answer of the target", counters.abandoned_rounds),
            "paceline_targets_lost": (
                "Target groups that were lost without having said that they would leave",
                counters.targets_lost,
            ),
            "paceline_drafts_ahead_ready": (
                "Drafts that a worker drafting ahead had ready when it was asked",
                counters.ready_drafts,
            ),
            "paceline_drafts_ahead_missed": (
                "Drafts that a worker drafting ahead had not, or not all of, when it was asked",
                counters.missed_drafts,
            ),
            "paceline_spec_decode_num_proposed_tokens": (
                "Draft nodes that could have been verified; equal ones of several sources count once",
                counters.proposed_nodes,
            ),
            "paceline_spec_decode_wasted_rows": (
                "Draft nodes that the target computed and that were not accepted",
                counters.draft_tokens - counters.accepted_tokens.total(),
            ),
            "paceline_awaited_drafts": ("Answers of draft workers that rounds waited for", counters.awaited_drafts),
            "paceline_late_drafts": ("Of these, those that came too late", counters.late_drafts),
            "paceline_stale_drafts": ("Sequences a draft worker had lost", counters.stale_drafts),
        }
        yield from _counters(counts)
        by_source = {
            "paceline_spec_decode_num_draft_tokens": ("Draft nodes verified, by source", counters.drafted_tokens),
            "paceline_spec_decode_num_accepted_tokens": ("Draft tokens accepted, by source", counters.accepted_tokens),
            "paceline_drafter_errors": ("Failures of a drafter, by source", counters.drafter_errors),
            "paceline_invalid_draft_trees": ("Malformed trees dropped, by source", counters.invalid_trees),
        }
        for name, (text, counter) in by_source.items():
            family = CounterMetricFamily(name, text, labels=["source"])
            for source, count in sorted(counter.items()):
                family.add_metric([source], count)
            yield family
        stages = {
            "paceline_draft_lateness_seconds": (
                "How long a round that had all else waited for the last of its draft workers",
                counters.draft_lateness,
            ),
            "paceline_request_queue_time_seconds": (
                "From a request's arrival at the router to its first round",
                counters.queue_time,
            ),
            "paceline_request_prefill_time_seconds": (
                "From a request's first round to its first token",
                counters.prefill_time,
            ),
        }
        for name, (text, distribution) in stages.items():
            yield _histogram(name, text, distribution)
        yield self._planner_rounds()
        yield self._cost_curve()
        yield self._collapsed()
        yield from self._link_traffic()
        yield self._link_errors()
        if self._cache is not None:
            yield from _cache_metrics(self._cache.stats())
        if core.soft_sharing is not None:
            yield from _soft_metrics(core.soft_sharing.stats())

    def _collapsed(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "paceline_spec_decode_acceptance_collapsed",
            "1 while drafts of the source are accepted far more seldom than they used to be",
            labels=["source"],
        )
        for source, has_collapsed in sorted(self._core.acceptance.collapsed.items()):
            family.add_metric([source], int(has_collapsed))
        return family

    def _planner_rounds(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "paceline_planner_rounds",
            "Rounds by what was decided about drafts: see `cluster.router.draft_choice.PlannerDecision`",
            labels=["decision"],
        )
        for decision, count in sorted(self._core.counters.planner_rounds.items()):
            family.add_metric([decision], count)
        return family

    def _cost_curve(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "paceline_step_time_seconds",
            "What a target forward of so many rows is expected to take, as the planner has measured it",
            labels=["rows"],
        )
        for rows in _CURVE_ROWS:
            family.add_metric([str(rows)], self._core.step_times.seconds(rows))
        return family

    def _link_traffic(self) -> Iterator[Metric]:
        traffic = self._connections.traffic()
        messages = CounterMetricFamily(
            "paceline_link_messages", "Messages on links, at the router's end", labels=["direction"]
        )
        sizes = CounterMetricFamily("paceline_link_bytes", "Bytes of these messages", labels=["direction"])
        for direction in ("sent", "received"):
            messages.add_metric([direction], traffic[direction])
            sizes.add_metric([direction], traffic[f"{direction}_bytes"])
        yield messages
        yield sizes
        yield CounterMetricFamily(
            "paceline_link_disconnects", "Connections to workers that ended", value=traffic["closed"]
        )

    def _link_errors(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "paceline_link_errors",
            "Messages dropped on links, by the end that dropped them and reason; workers tell theirs every second",
            labels=["end", "reason"],
        )
        for end, drops in (("router", self._connections.drops()), ("worker", self._connections.worker_drops())):
            for reason, count in sorted(drops.items()):
                family.add_metric([end, reason], count)
        return family


def _gauges(found: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    """found: what each is, and its value."""
    for name, (text, value) in found.items():
        yield GaugeMetricFamily(name, text, value=value)


def _counters(found: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    for name, (text, count) in found.items():
        yield CounterMetricFamily(name, text, value=count)


def _histogram(name: str, text: str, distribution: Distribution) -> HistogramMetricFamily:
    count, buckets = 0, []
    for bound, found in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        count += found
        buckets.append((floatToGoString(bound), float(count)))  # type: ignore[no-untyped-call]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=distribution.total)


def _cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    """Of the shared cache; what its drafts earn is told of the source `cache` among the others."""
    gauges = {
        "paceline_cache_queued_tokens": ("Committed tokens that wait to be written", stats.queued_tokens),
        "paceline_cache_breaker_open": ("1 while the store is left alone after failed writes", int(stats.breaker_open)),
        "paceline_cache_index_namespaces": ("Namespaces that are followed", stats.index.namespaces),
        "paceline_cache_index_tokens": ("Tokens that can be drafted from", stats.index.tokens),
        "paceline_cache_index_memory_bytes": ("Bytes of indexes in this process alone", stats.index.memory_bytes),
        "paceline_cache_index_mapped_bytes": (
            "Bytes of indexes in files that the processes of a machine share",
            stats.index.mapped_bytes,
        ),
        "paceline_cache_warm_ratio": (
            "Share of the stored segments of followed namespaces that can be drafted from",
            stats.index.warm_ratio,
        ),
        "paceline_cache_lag_seconds": (
            "Since the namespace in use was read for which that is longest",
            stats.index.lag_s,
        ),
    }
    yield from _gauges(gauges)
    counts = {
        "paceline_cache_published_tokens": (
            "Committed tokens that were to be shared",
            stats.publisher.published_tokens,
        ),
        "paceline_cache_written_tokens": ("Tokens written to the store", stats.publisher.written_tokens),
        "paceline_cache_written_bytes": ("Bytes written to the store for them", stats.publisher.written_bytes),
        "paceline_cache_write_failures": ("Writes that found the store unavailable", stats.publisher.failures),
        "paceline_cache_breaker_openings": (
            "Times that the store was left alone after failed writes",
            stats.publisher.breaker_opened,
        ),
        "paceline_cache_invalid_pieces": ("Pieces of text that no entry can hold", stats.publisher.invalid_pieces),
        "paceline_cache_missing_segments": (
            "Segments that a manifest names and the store does not have",
            stats.index.missing_segments,
        ),
        "paceline_cache_index_builds": ("Indexes built here", stats.index.builds),
        "paceline_cache_index_maps": ("Indexes found built by another process", stats.index.maps),
        "paceline_cache_folds": ("Parts of logs folded into segments", stats.folds),
        "paceline_cache_resets": ("Namespaces read anew: other data, or a gap", stats.index.resets),
        "paceline_cache_damaged": ("Stored entries, segments and manifests that cannot be read", stats.index.damaged),
        "paceline_cache_index_evictions": ("Namespaces that gave way to others", stats.index.evictions),
        "paceline_cache_index_refusals": (
            "Namespaces that are not drafted from: no room, or no possible name",
            stats.index.refusals,
        ),
        "paceline_cache_index_overflows": (
            "Logs folded too slowly, of which a part was left out",
            stats.index.overflows,
        ),
        "paceline_cache_index_faults": ("Indexes that could not be built", stats.index.build_faults),
        "paceline_cache_publisher_faults": ("Faults of the publisher: each one is a bug", stats.publisher.faults),
    }
    yield from _counters(counts)
    dropped = CounterMetricFamily(
        "paceline_cache_dropped_tokens",
        "Tokens that were not written: the queue was full, the store refused them, or their time was purged",
        labels=["reason"],
    )
    dropped.add_metric(["overflow"], stats.publisher.overflow_tokens)
    dropped.add_metric(["refused"], stats.publisher.refused_tokens)
    dropped.add_metric(["purged"], stats.publisher.purged_tokens)
    yield dropped
    if stats.promotion is not None:
        yield from _promotion_metrics(stats.promotion)


def _promotion_metrics(stats: PromotionStats) -> Iterator[Metric]:
    """Of the promotion gate. What it counts of phrases is told with each batch, and not before."""
    counters = stats.counters
    yield GaugeMetricFamily(
        "paceline_cache_promotion_queued_answers",
        "Answers that wait to be looked through for phrases",
        value=stats.queued_texts,
    )
    counts = {
        "paceline_cache_promotion_offered_phrases": ("Phrases offered to the gate", counters.offered),
        "paceline_cache_promotion_refused_phrases": (
            "Phrases of tenants that had opted out or offered too much",
            counters.refused_offers,
        ),
        "paceline_cache_promotion_kept_phrases": ("Phrases that got enough supporters", counters.kept),
        "paceline_cache_promotion_dropped_phrases": (
            "Phrases that lost their support, or look sensitive",
            counters.dropped,
        ),
        "paceline_cache_promotion_batches": ("Batches of the public pool written", counters.batches),
        "paceline_cache_promotion_refused_batches": ("Batches that the store refused", counters.refused_batches),
        "paceline_cache_promotion_damaged": ("Stored phrases and batches that cannot be read", counters.unreadable),
        "paceline_cache_promotion_foreign_writes": (
            "Times that somebody had written into the public pool past the gate",
            counters.foreign_writes,
        ),
        "paceline_cache_promotion_dropped_answers": (
            "Answers not looked through: too many, or their tenant had left",
            stats.dropped_texts,
        ),
        "paceline_cache_promotion_failures": ("Tries that found the store unavailable or refusing", stats.failures),
    }
    for name, (text, count) in counts.items():
        yield CounterMetricFamily(name, text, value=count)


def _soft_metrics(stats: SoftExchangeStats) -> Iterator[Metric]:
    """Of the counts of soft_ngram that routers exchange through the shared cache."""
    gauges = {
        "paceline_cache_soft_namespaces": ("Namespaces whose counts are exchanged", stats.namespaces),
        "paceline_cache_soft_waiting_contexts": ("Contexts of others, read and not yet added", stats.waiting_contexts),
        "paceline_cache_soft_warm_ratio": (
            "Share of the stored counts that have been read, the least of all namespaces",
            stats.warm_ratio,
        ),
    }
    yield from _gauges(gauges)
    counts = {
        "paceline_cache_soft_merged_contexts": ("Contexts of others that were added", stats.merged_contexts),
        "paceline_cache_soft_exported_contexts": ("Contexts taken to be written", stats.exported_contexts),
        "paceline_cache_soft_written_bytes": ("Bytes written to the store for them", stats.written_bytes),
        "paceline_cache_soft_refused_contexts": ("Contexts that the store refused", stats.refused_contexts),
        "paceline_cache_soft_damaged": ("Stored counts that cannot be read", stats.corrupt),
        "paceline_cache_soft_resets": ("Tables dropped because their data set ended", stats.resets),
        "paceline_cache_soft_failures": ("Tries that found the store unavailable or refusing", stats.failures),
        "paceline_cache_soft_faults": ("Faults of the exchange itself", stats.faults),
    }
    yield from _counters(counts)
