"""The dashboards of Paceline, written to k8s/observability/dashboards by `make dashboards`.

Expressions name only metrics of `cluster.metrics`; a test compares them with a live /metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster.observability.grafana import Dashboard, Panel, Query, Row, dashboard_json

DIRECTORY = Path(__file__).parents[2] / "k8s" / "observability" / "dashboards"

_WINDOW = "[$__rate_interval]"
_TOKENS, _ROUNDS, _ROWS = "suffix: tokens/s", "suffix: rounds/s", "suffix: rows/s"


def _of(name: str, labels: str = "") -> str:
    """The series of a metric, of the chosen scrape jobs."""
    return f'{name}{{job=~"$job"{", " + labels if labels else ""}}}'


def _once(series: str) -> str:
    """Every page has the metrics of all gateways and routers: where several are scraped, each series counts once."""
    return f"max without (instance, pod) ({series})"


def _rate(name: str, by: str = "", labels: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({_once(f'rate({_of(name, labels)}{_WINDOW})')})"


def _total(name: str, labels: str = "") -> str:
    return f"sum({_once(_of(name, labels))})"


def _quantiles(name: str) -> tuple[Query, ...]:
    buckets = _rate(f"{name}_bucket", "le")
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"p{round(100 * share)}") for share in (0.5, 0.95, 0.99)
    )


def _ratio(part: str, whole: str) -> str:
    """part / whole, and nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"


_TTFT = "paceline_time_to_first_token_seconds"
_ITL = "paceline_inter_token_latency_seconds"
_E2E = "paceline_e2e_request_latency_seconds"

OVERVIEW = Dashboard(
    "paceline-overview",
    "Paceline / Overview",
    "What clients get: load, latency, errors, and whether the parts are there.",
    (
        Row(
            "Parts",
            (
                Panel(
                    "Target groups",
                    "Connected to a router. At 0, streams pause and nothing is ready.",
                    "short",
                    (Query(_total("paceline_target_connected"), "groups"),),
                    kind="stat",
                    columns=6,
                ),
                Panel(
                    "Draft workers",
                    "Connected to the router. Without them requests are answered all the same, only slower.",
                    "short",
                    (Query(f"max({_of('paceline_draft_workers')})", "workers"),),
                    kind="stat",
                    columns=6,
                ),
                Panel(
                    "Tokens per round",
                    "Emitted by one target forward, of all sequences: what speculation and batching yield together.",
                    "short",
                    (Query(_ratio(_rate("paceline_emitted_tokens_total"), _rate("paceline_rounds_total")), "tokens"),),
                    kind="stat",
                    columns=6,
                ),
                Panel(
                    "Cache in use",
                    "0 while the store of the shared cache is left alone after failures: a cost of speed only.",
                    "short",
                    (Query(f"1 - max({_of('paceline_cache_breaker_open')})", "store answers"),),
                    kind="stat",
                    columns=6,
                ),
            ),
        ),
        Row(
            "Load",
            (
                Panel(
                    "Requests",
                    "Finished and failed ones a second. cancelled: the client went away.",
                    "reqps",
                    (
                        Query(_rate("paceline_request_success_total", "finished_reason"), "{{finished_reason}}"),
                        Query(_rate("paceline_request_failure_total", "reason"), "failed: {{reason}}"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Requests in flight",
                    "Waiting ones have no token yet. If they grow while running ones do not, the target is full.",
                    "short",
                    (
                        Query(_total("paceline_num_requests_running"), "running"),
                        Query(_total("paceline_num_requests_waiting"), "waiting"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens taken and tokens generated, a second.",
                    _TOKENS,
                    (
                        Query(_rate("paceline_generation_tokens_total"), "generated"),
                        Query(_rate("paceline_prompt_tokens_total"), "of prompts"),
                    ),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel("Time to first token", "Queue and prefill included.", "s", _quantiles(_TTFT)),
                Panel("Time between tokens", "A round's time is shared by its tokens.", "s", _quantiles(_ITL)),
                Panel("Time of a request", "From its arrival to its last token.", "s", _quantiles(_E2E)),
            ),
        ),
        Row(
            "What is turned away",
            (
                Panel(
                    "Refused because the queue was full",
                    "Clients got 429 / RESOURCE_EXHAUSTED. More target groups, or a longer queue (router.max_waiting).",
                    "reqps",
                    (Query(_rate("paceline_requests_refused_total"), "refused"),),
                ),
                Panel(
                    "Refused by key or limit",
                    "Of tenants; unknown keys in numbers may be somebody guessing.",
                    "reqps",
                    (Query(_rate("paceline_tenant_refusals_total", "reason"), "{{reason}}"),),
                    stacked=True,
                    empty="none so far",
                ),
                Panel(
                    "Streams carried on elsewhere",
                    "Their router was lost, and another one went on from the next token.",
                    "reqps",
                    (Query(_rate("paceline_request_resumed_total"), "resumed"),),
                ),
            ),
        ),
    ),
)

SPECULATION = Dashboard(
    "paceline-speculation",
    "Paceline / Speculation",
    "Whether drafts pay: who proposes, what is accepted, what is wasted, and what the planner does about it.",
    (
        Row(
            "Yield",
            (
                Panel(
                    "Tokens per round and sequence",
                    "1 is plain decoding. Rounds without sequences that emit count little.",
                    "short",
                    (
                        Query(
                            _ratio(
                                _rate("paceline_emitted_tokens_total"),
                                f"({_rate('paceline_emitted_tokens_total')}"
                                f" - {_rate('paceline_spec_decode_num_accepted_tokens_total')})",
                            ),
                            "tokens",
                        ),
                    ),
                ),
                Panel(
                    "Accepted tokens by source",
                    "Draft tokens that came true, a second.",
                    _TOKENS,
                    (Query(_rate("paceline_spec_decode_num_accepted_tokens_total", "source"), "{{source}}"),),
                    stacked=True,
                ),
                Panel(
                    "Acceptance by source",
                    "Share of its verified draft tokens. It hardly falls with load; what the planner does then, does.",
                    "percentunit",
                    (
                        Query(
                            _ratio(
                                _rate("paceline_spec_decode_num_accepted_tokens_total", "source"),
                                _rate("paceline_spec_decode_num_draft_tokens_total", "source"),
                            ),
                            "{{source}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Planner",
            (
                Panel(
                    "Rounds by decision",
                    "no_row_pays at full load is right: drafts are the first load to be shed.",
                    _ROUNDS,
                    (Query(_rate("paceline_planner_rounds_total", "decision"), "{{decision}}"),),
                    stacked=True,
                ),
                Panel(
                    "Draft rows",
                    "Proposed, verified and wasted ones a second. Wasted rows are the price of the accepted ones.",
                    _ROWS,
                    (
                        Query(_rate("paceline_spec_decode_num_proposed_tokens_total"), "proposed"),
                        Query(_rate("paceline_spec_decode_num_draft_tokens_total"), "verified"),
                        Query(_rate("paceline_spec_decode_wasted_rows_total"), "wasted"),
                    ),
                ),
                Panel(
                    "Cost curve of the target",
                    "What a forward of so many rows takes, as measured while serving. Flat: drafts are nearly free.",
                    "s",
                    (Query(f"avg by (rows) ({_of('paceline_step_time_seconds')})", "{{rows}} rows"),),
                    logarithmic=True,
                ),
            ),
        ),
        Row(
            "Drafts of workers",
            (
                Panel(
                    "Lateness of drafts",
                    "How long rounds that had all else waited for draft workers. More workers help if it grows.",
                    "s",
                    _quantiles("paceline_draft_lateness_seconds"),
                ),
                Panel(
                    "Answers too late",
                    "Share of those that rounds waited for: beyond draft.deadline_ms, the round went on without.",
                    "percentunit",
                    (
                        Query(
                            _ratio(_rate("paceline_late_drafts_total"), _rate("paceline_awaited_drafts_total")), "late"
                        ),
                    ),
                ),
                Panel(
                    "Drafted ahead",
                    "Share of asked drafts that a worker had ready because it had drafted for the outcome.",
                    "percentunit",
                    (
                        Query(
                            _ratio(
                                _rate("paceline_drafts_ahead_ready_total"),
                                f"({_rate('paceline_drafts_ahead_ready_total')}"
                                f" + {_rate('paceline_drafts_ahead_missed_total')})",
                            ),
                            "ready",
                        ),
                    ),
                    empty="no drafts ahead",
                ),
            ),
        ),
        Row(
            "What goes wrong",
            (
                Panel(
                    "Acceptance collapsed",
                    "1 while a source is accepted far more seldom than it used to be: a wrong or stale draft model?",
                    "short",
                    (
                        Query(
                            f"max by (source) ({_of('paceline_spec_decode_acceptance_collapsed')})",
                            "{{source}}",
                        ),
                    ),
                ),
                Panel(
                    "Failures of drafters",
                    "They cost their own drafts only; the router's log has the reason of the first.",
                    "cps",
                    (
                        Query(_rate("paceline_drafter_errors_total", "source"), "{{source}} failed"),
                        Query(_rate("paceline_invalid_draft_trees_total", "source"), "{{source}} malformed"),
                    ),
                    empty="none so far",
                ),
                Panel(
                    "Sequences sent anew",
                    "A worker had lost them, after a restart or for want of room.",
                    "cps",
                    (
                        Query(_rate("paceline_stale_drafts_total"), "to draft workers"),
                        Query(_rate("paceline_stale_sequences_total"), "to the target"),
                    ),
                ),
            ),
        ),
    ),
)

CACHE = Dashboard(
    "paceline-cache",
    "Paceline / Shared cache",
    "What routers learn from each other through Redis. Whatever breaks here costs speed and never an answer.",
    (
        Row(
            "Yield",
            (
                Panel(
                    "Accepted tokens from the cache",
                    "Draft tokens of the source `cache` that came true, a second.",
                    _TOKENS,
                    (Query(_rate("paceline_spec_decode_num_accepted_tokens_total", labels='source="cache"'), "cache"),),
                ),
                Panel(
                    "Warm",
                    "Share of what is stored that is drafted from here; it falls after a restart and climbs back.",
                    "percentunit",
                    (
                        Query(f"min({_of('paceline_cache_warm_ratio')})", "text"),
                        Query(f"min({_of('paceline_cache_soft_warm_ratio')})", "counts of soft_ngram"),
                    ),
                ),
                Panel(
                    "Lag",
                    "Since the namespace was last read for which that is longest.",
                    "s",
                    (Query(f"max({_of('paceline_cache_lag_seconds')})", "lag"),),
                ),
            ),
        ),
        Row(
            "Writing",
            (
                Panel(
                    "Tokens",
                    "Taken to be shared, written, and dropped: by a full queue, the store, or a purge.",
                    _TOKENS,
                    (
                        Query(_rate("paceline_cache_published_tokens_total"), "taken"),
                        Query(_rate("paceline_cache_written_tokens_total"), "written"),
                        Query(_rate("paceline_cache_dropped_tokens_total", "reason"), "dropped: {{reason}}"),
                    ),
                ),
                Panel(
                    "Queue",
                    "Tokens that wait to be written; beyond cache.max_queued_tokens the oldest go.",
                    "short",
                    (Query(_total("paceline_cache_queued_tokens"), "queued"),),
                ),
                Panel(
                    "Bytes written",
                    "To the store, a second.",
                    "Bps",
                    (
                        Query(_rate("paceline_cache_written_bytes_total"), "text"),
                        Query(_rate("paceline_cache_soft_written_bytes_total"), "counts of soft_ngram"),
                    ),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Index",
            (
                Panel(
                    "Tokens that can be drafted from",
                    "Of all followed namespaces, a process; cache.index_tokens limits them.",
                    "short",
                    (Query(f"max({_of('paceline_cache_index_tokens')})", "tokens"),),
                ),
                Panel(
                    "Memory",
                    "Of one process alone, and of files that the processes of a machine share.",
                    "bytes",
                    (
                        Query(f"max({_of('paceline_cache_index_memory_bytes')})", "own"),
                        Query(f"max({_of('paceline_cache_index_mapped_bytes')})", "shared"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Upkeep",
                    "Parts of logs folded, indexes built or found built, namespaces that gave way.",
                    "cps",
                    (
                        Query(_rate("paceline_cache_folds_total"), "folded"),
                        Query(_rate("paceline_cache_index_builds_total"), "built"),
                        Query(_rate("paceline_cache_index_maps_total"), "found built"),
                        Query(_rate("paceline_cache_index_evictions_total"), "gave way"),
                    ),
                ),
            ),
        ),
        Row(
            "Health",
            (
                Panel(
                    "Store left alone",
                    "1 while the breaker is open after failed writes.",
                    "short",
                    (Query(f"max({_of('paceline_cache_breaker_open')})", "breaker open"),),
                ),
                Panel(
                    "Failures",
                    "Tries that found the store unavailable, and times that the breaker opened.",
                    "cps",
                    (
                        Query(_rate("paceline_cache_write_failures_total"), "writes"),
                        Query(_rate("paceline_cache_soft_failures_total"), "counts of soft_ngram"),
                        Query(_rate("paceline_cache_breaker_openings_total"), "breaker opened"),
                    ),
                ),
                Panel(
                    "Damage",
                    "What cannot be read is left out. More than none: who else writes into that Redis?",
                    "cps",
                    (
                        Query(_rate("paceline_cache_damaged_total"), "unreadable"),
                        Query(_rate("paceline_cache_missing_segments_total"), "missing segments"),
                        Query(_rate("paceline_cache_index_faults_total"), "indexes not built"),
                        Query(_rate("paceline_cache_soft_damaged_total"), "unreadable counts"),
                    ),
                ),
            ),
        ),
    ),
)

POOLS = Dashboard(
    "paceline-pools",
    "Paceline / Target and draft pools",
    "How busy the target groups and the draft workers are: what they are scaled by.",
    (
        Row(
            "Target groups",
            (
                Panel(
                    "Busy share",
                    "Of the time, that targets compute: 1 a group is the most there is.",
                    "percentunit",
                    (Query(_rate("paceline_target_seconds_total"), "target"),),
                ),
                Panel(
                    "Queueing delay",
                    "From a request's arrival at the router to its first round. Target groups are scaled by it.",
                    "s",
                    _quantiles("paceline_request_queue_time_seconds"),
                ),
                Panel(
                    "Prefill",
                    "From a request's first round to its first token.",
                    "s",
                    _quantiles("paceline_request_prefill_time_seconds"),
                ),
                Panel(
                    "Sequences",
                    "In rounds, and waiting to be admitted.",
                    "short",
                    (
                        Query(_total("paceline_sequences_running"), "running"),
                        Query(_total("paceline_sequences_waiting"), "waiting"),
                    ),
                    stacked=True,
                ),
                Panel(
                    "KV blocks in use",
                    "Share of the targets' blocks; at 1 sequences give theirs up and are computed again.",
                    "percentunit",
                    (
                        Query(
                            _ratio(
                                f"({_total('paceline_kv_blocks')} - {_total('paceline_kv_blocks_free')})",
                                _total("paceline_kv_blocks"),
                            ),
                            "in use",
                        ),
                    ),
                ),
                Panel(
                    "Rows",
                    "Computed by targets a second, prompts included.",
                    _ROWS,
                    (Query(_rate("paceline_target_rows_total"), "rows"),),
                ),
            ),
        ),
        Row(
            "Draft workers",
            (
                Panel(
                    "Connected",
                    "Workers that a router can ask.",
                    "short",
                    (Query(f"max({_of('paceline_draft_workers')})", "workers"),),
                ),
                Panel(
                    "Wait for drafts",
                    "Share of the time that rounds waited for draft workers.",
                    "percentunit",
                    (Query(_rate("paceline_draft_lateness_seconds_sum"), "waiting"),),
                ),
                Panel(
                    "Rounds that asked",
                    "A second. Where waiting does not pay, workers are asked now and then only.",
                    _ROUNDS,
                    (Query(_rate("paceline_draft_lateness_seconds_count"), "asked"),),
                ),
                Panel(
                    "Worth of a worker",
                    "In tokens a second, by the planner's estimate. Where workers are too busy or too late, one more"
                    " comes if it brings autoscaling.draft_min_gain.",
                    "percentunit",
                    (
                        Query(f"max({_of('paceline_draft_worker_gain_ratio')})", "gain by one more"),
                        Query(f"max({_of('paceline_draft_worker_loss_ratio')})", "loss with one fewer"),
                    ),
                ),
            ),
        ),
        Row(
            "Router and links",
            (
                Panel(
                    "Router's own time",
                    "Of a round, outside of the target: at most a millisecond or so at batch 8.",
                    "s",
                    (Query(_ratio(_rate("paceline_router_seconds_total"), _rate("paceline_rounds_total")), "router"),),
                ),
                Panel(
                    "Bytes on links",
                    "At the router's end, a second.",
                    "Bps",
                    (Query(_rate("paceline_link_bytes_total", "direction"), "{{direction}}"),),
                ),
                Panel(
                    "Link errors",
                    "Messages dropped and calls without an answer; connections that ended.",
                    "cps",
                    (
                        Query(_rate("paceline_link_errors_total", "end, reason"), "{{end}}: {{reason}}"),
                        Query(_rate("paceline_link_disconnects_total"), "disconnected"),
                    ),
                ),
                Panel(
                    "Setbacks",
                    "Rounds without an answer, targets lost, sequences that gave up their blocks.",
                    "cps",
                    (
                        Query(_rate("paceline_abandoned_rounds_total"), "abandoned rounds"),
                        Query(_rate("paceline_targets_lost_total"), "targets lost"),
                        Query(_rate("paceline_preemptions_total"), "preemptions"),
                    ),
                ),
                Panel(
                    "Calls in flight",
                    "To workers. More than the workers there are: somebody does not answer.",
                    "short",
                    (Query(_total("paceline_link_calls_in_flight"), "calls"),),
                ),
                Panel(
                    "EAGLE head",
                    "Share of the time that the head beside the target takes.",
                    "percentunit",
                    (Query(_rate("paceline_head_seconds_total"), "head"),),
                ),
            ),
        ),
    ),
)

DASHBOARDS = {"overview": OVERVIEW, "speculation": SPECULATION, "cache": CACHE, "pools": POOLS}


def rendered() -> dict[str, str]:
    """The dashboards' files: text by name."""
    return {
        f"{name}.json": json.dumps(dashboard_json(dashboard), indent=2) + "\n" for name, dashboard in DASHBOARDS.items()
    }


def main(arguments: list[str]) -> None:
    """Writes the files into the directory that is named, or where they are kept."""
    directory = Path(arguments[0]) if arguments else DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
