"""The report of `paceline bench cache`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import numpy as np

from actors.drafters.registry import CACHE, SOFT_NGRAM
from cluster.cli.bench.cache import CacheReport, IndexCost
from cluster.cli.bench.cache_plan import CachePlan
from cluster.cli.bench.cache_value import ScenarioResult
from cluster.cli.bench.local_report import show_ratio
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.table import print_table

_MAX_SHOWN_DIFFERENCES = 5
_COLUMNS = (
    ("requests", 12), ("asked", 5), ("before", 6), ("tokens/round cold", 17), ("warm", 5), ("x", 5),
    ("tokens/s cold", 13), ("warm", 6), ("x", 5), ("from cache", 10), ("soft_ngram", 10), ("identical", 9),
)  # fmt: skip


def print_cache_heading(plan: CachePlan, out: TextIO) -> None:
    """Where it runs, with what, and what is compared."""
    machine, versions = describe_machine(), describe_versions()
    print("machine   " + ", ".join(f"{key} {value}" for key, value in machine.items()), file=out)
    print("versions  " + ", ".join(f"{key} {value}" for key, value in versions.items()), file=out)
    print(
        f"config    model {plan.model}, draft model {plan.draft_model}, "
        f"{plan.dtype}, batch 1, greedy, {plan.max_new_tokens} new tokens at most, "
        f"{plan.max_draft_tokens} draft tokens at most",
        file=out,
    )
    print(
        "compared  two fresh engines on the same requests: cold, without a cache, and warm, with what another engine "
        "has answered before; tokens/s by what forwards take that nothing disturbs\n",
        file=out,
        flush=True,
    )


def print_scenario(result: ScenarioResult, is_first: bool, out: TextIO) -> None:
    """What the cache is worth for one kind of requests; x is warm by cold. is_first: of its set of drafters."""
    if is_first:
        print(f"worth with drafters {','.join(result.drafters)}", file=out)
        print(_line([name for name, _ in _COLUMNS]), file=out)
    print(_line(_row(result)), file=out)
    if result.replica is not None:
        print(
            f"  a replica that has answered those before itself: {result.replica.tokens_per_round:.2f} tokens/round; "
            f"the fresh one, warm from the cache, has {show_ratio(result.fresh_share)} of it",
            file=out,
        )
    for one in result.equality.differences[:_MAX_SHOWN_DIFFERENCES]:
        expected, found = ("end" if token is None else token for token in (one.expected, one.found))
        print(f"  prompt {one.prompt}, token {one.position}: {expected} cold, {found} warm", file=out)
    if not result.is_settled:
        print("  not all that was published had arrived in good time", file=out)
    out.flush()


def print_costs(report: CacheReport, out: TextIO) -> None:
    """What it costs, and what the figures before go by."""
    times = ", ".join(f"{rows}: {1000 * seconds:.1f}" for rows, seconds in report.config["row_seconds"])
    print(f"\nms of a forward by its rows, by which rounds were chosen and timed: {times}\n", file=out)
    if report.index_cost is not None:
        _print_index(report.index_cost, out)
    if report.round_costs:
        rows = [
            [cost.state, str(cost.rounds), *(f"{us:.0f}" for us in (cost.median_us, cost.p99_us, cost.greatest_us))]
            for cost in report.round_costs
        ]
        header = ("the cache's server", "rounds", "median us", "p99 us", "greatest us")
        print_table(f"the router's own part of a round, batch {report.config['batch_size']}", header, rows, out)
        print(f"p99 with the server stopped by p99 with it running: {show_ratio(report.stopped_p99_ratio)}", file=out)
    out.flush()


def _print_index(cost: IndexCost, out: TextIO) -> None:
    rows = []
    for name, start in (("that builds", cost.builds), ("that maps", cost.maps)):
        rows.append(
            [
                f"warm start of a process {name}",
                f"{start.seconds:.2f} s for {start.tokens:,} tokens, {start.wire_bytes / max(1, start.tokens):.2f} "
                f"bytes/token on the wire, {start.stats.mapped_bytes / max(1, start.stats.tokens):.1f} mapped",
            ]
        )
    rows.append(
        [
            f"drafting a round for {cost.drafting_sequences} sequences",
            f"median {cost.drafting_median_us:.0f} us, p99 {cost.drafting_p99_us:.0f} us",
        ]
    )
    fresh = cost.freshness
    rows.append(
        [
            f"published to draftable at {fresh.tokens_per_second:,.0f} tokens/s",
            f"median {np.median(fresh.delays):.3f} s, p99 {np.quantile(fresh.delays, 0.99):.3f} s, "
            f"{fresh.cpu_share:.0%} of a core, {fresh.dropped_tokens} tokens dropped",
        ]
    )
    print_table("the local index", ("what", "cost"), rows, out)
    print(file=out)


def _line(cells: Sequence[str]) -> str:
    """The first to the left, the others to the right."""
    widths = [width for _, width in _COLUMNS]
    return "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])


def _row(result: ScenarioResult) -> list[str]:
    cold, warm = result.cold, result.warm
    from_cache, from_counts = (
        warm.accepted_tokens.get(name, 0) / max(1, warm.num_tokens) for name in (CACHE, SOFT_NGRAM)
    )
    return [
        result.name,
        str(cold.num_prompts),
        str(result.num_before),
        f"{cold.tokens_per_round:.2f}",
        f"{warm.tokens_per_round:.2f}",
        show_ratio(result.tokens_per_round_ratio),
        f"{cold.tokens_per_second:.1f}",
        f"{warm.tokens_per_second:.1f}",
        show_ratio(warm.ratio),
        f"{from_cache:.0%}",
        f"{from_counts:.0%}",
        f"{result.equality.num_identical}/{result.equality.num_compared}",
    ]
