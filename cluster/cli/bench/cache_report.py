"""The report of `paceline bench cache`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from actors.drafters.registry import CACHE, SOFT_NGRAM
from cluster.cli.bench.cache import CachePlan, CacheReport, ScenarioResult
from cluster.cli.bench.local_report import show_ratio
from cluster.cli.bench.machine import print_machine

_MAX_SHOWN_DIFFERENCES = 5
_COLUMNS = (
    ("requests", 12), ("asked", 5), ("before", 6), ("tokens/round cold", 17), ("warm", 5), ("x", 5),
    ("tokens/s cold", 13), ("warm", 6), ("x", 5), ("from cache", 10), ("soft_ngram", 10), ("identical", 9),
)  # fmt: skip


def print_cache_heading(plan: CachePlan, out: TextIO) -> None:
    """Machine, versions and settings."""
    print_machine(out)
    engine = plan.engine
    print(
        f"config    model {engine.model}, draft model {engine.draft_model}, "
        f"{engine.dtype}, batch 1, greedy, {plan.max_new_tokens} new tokens at most, "
        f"{engine.max_draft_tokens} draft tokens at most",
        file=out,
    )
    print(
        "compared  two fresh engines on the same requests: cold, without a cache, and warm, with what another engine "
        "has answered before; tokens/s by what forwards take that nothing disturbs\n",
        file=out,
        flush=True,
    )


def print_scenario(result: ScenarioResult, is_first: bool, out: TextIO) -> None:
    """A row of the table; x is warm by cold. is_first: the first of its set of drafters, so the header comes before."""
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


def print_row_times(report: CacheReport, out: TextIO) -> None:
    """The forward times that the figures go by."""
    times = ", ".join(f"{rows}: {1000 * seconds:.1f}" for rows, seconds in report.config["row_seconds"])
    print(f"\nms of a forward by its rows, by which rounds were chosen and timed: {times}", file=out)
    out.flush()


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
