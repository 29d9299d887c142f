"""What `paceline bench local` and `bench cache` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from actors.drafters.registry import CACHE, SOFT_NGRAM
from cluster.cli.bench.cache import CacheReport, ScenarioResult
from cluster.cli.bench.measure import Comparison, MethodResult
from cluster.cli.bench.speed import Speed
from cluster.cli.table import print_table

_MAX_SHOWN_DIFFERENCES = 5
_MAX_SHOWN_POSITIONS = 8


def print_heading(facts: Mapping[str, Mapping[str, Any]], note: str, out: TextIO) -> None:
    """facts: by the name of their line; those that are empty are left out."""
    for title, values in facts.items():
        shown = [f"{name} {_shown(value)}" for name, value in values.items() if value not in (None, [], "")]
        print(f"{title:<10}{', '.join(shown)}", file=out)
    print(f"{'measured':<10}{note}\n", file=out, flush=True)


def print_local_report(report: Comparison, title: str, out: TextIO) -> None:
    """Speeds over all prompts, ratios by task, acceptance where it was counted, and where answers differ."""
    methods = report.methods
    if len(report.blocks[0].prompts) > 1 and methods[0].drafters is None:
        title += ": engines answer a block together, generate its prompts one after the other"
    header = ["method", "tokens/s", "x", "tokens/round", "drafts accepted", "tokens by source", "identical"]
    print_table(title, header, list(map(_speed_row, methods)), out)
    tasks = list(methods[0].tasks)
    if len(tasks) > 1:
        ratios = [[one.name, *(_ratio(speed.ratio) for speed in (*one.tasks.values(), one.overall))] for one in methods]
        print_table(f"x of {methods[0].name}, by task", ["method", *tasks, "all"], ratios, out)
    _print_positions(methods, out)
    _print_sources(methods, out)
    for method in methods:
        _print_differences(method.name, method, out)
    print(file=out, flush=True)


def print_cache_report(report: CacheReport, out: TextIO) -> None:
    """A table for every set of drafters, x is warm by cold; then the forward times that the figures go by."""
    header = ["requests", "asked", "before", "tokens/round cold", "warm", "x", "tokens/s cold", "warm", "x"]
    header += ["from cache", "soft_ngram", "identical"]
    for drafters in dict.fromkeys(one.drafters for one in report.scenarios):
        results = [one for one in report.scenarios if one.drafters == drafters]
        print_table(f"worth with drafters {','.join(drafters)}", header, list(map(_cache_row, results)), out)
        for result in results:
            _print_remarks(result, out)
    times = ", ".join(f"{rows}: {1000 * seconds:.1f}" for rows, seconds in report.row_seconds)
    print(f"\nms of a forward by its rows, by which rounds were chosen and timed: {times}", file=out, flush=True)


def _speed_row(method: MethodResult) -> list[str]:
    speed = method.overall
    sources = sorted(speed.accepted_tokens.items(), key=lambda item: -item[1])
    shares = [f"{source} {count / max(1, speed.num_tokens):.0%}" for source, count in sources]
    return [
        method.name,
        f"{speed.tokens_per_second:.1f}",
        _ratio(speed.ratio),
        f"{speed.tokens_per_round:.2f}",
        _percent(speed.accepted_share),
        ", ".join(shares) or "-",
        _identical(method),
    ]


def _print_positions(methods: Sequence[MethodResult], out: TextIO) -> None:
    positions = {one.name: one.acceptance.by_position for one in methods if one.acceptance is not None}
    deepest = max(map(len, positions.values()), default=0)
    if deepest == 0:
        return
    shown = min(deepest, _MAX_SHOWN_POSITIONS)
    title = "acceptance by position: share of the rounds that verified a draft token so far ahead and accepted it"
    if deepest > shown:
        title += f" (the first {shown} of {deepest} positions)"
    rows = [
        [name, *(f"{_percent(one.share)} of {one.rounds}" for one in found[:shown]), *["-"] * (shown - len(found))]
        for name, found in positions.items()
        if found
    ]
    print_table(title, ("drafters", *map(str, range(1, shown + 1))), rows, out)


def _print_sources(methods: Sequence[MethodResult], out: TextIO) -> None:
    rows = [
        [method.name, source, str(one.proposed), str(one.verified), str(one.accepted), _percent(one.share)]
        for method in methods
        if method.acceptance is not None
        for source, one in method.acceptance.by_source.items()
    ]
    if rows:
        columns = ("drafters", "source", "proposed", "verified", "accepted", "share")
        print_table("draft tokens by source; share: accepted of verified", columns, rows, out)


def _cache_row(result: ScenarioResult) -> list[str]:
    cold, warm = (one.overall for one in result.comparison.methods[:2])
    shares = [warm.accepted_tokens.get(name, 0) / max(1, warm.num_tokens) for name in (CACHE, SOFT_NGRAM)]
    row = [result.name, str(cold.num_prompts), str(result.num_before)]
    row += [f"{cold.tokens_per_round:.2f}", f"{warm.tokens_per_round:.2f}", _by(warm, cold)]
    row += [f"{cold.tokens_per_second:.1f}", f"{warm.tokens_per_second:.1f}", _ratio(warm.ratio)]
    return [*row, *map(_percent, shares), _identical(result.comparison.methods[1])]


def _print_remarks(result: ScenarioResult, out: TextIO) -> None:
    warm, *replicas = result.comparison.methods[1:]
    for replica in replicas:
        print(
            f"  {result.name}: a replica that has answered those before itself: {replica.overall.tokens_per_round:.2f} "
            f"tokens/round; the fresh one, warm from the cache, has {_by(warm.overall, replica.overall)} of it",
            file=out,
        )
    _print_differences(f"  {result.name}, warm", warm, out)
    if not result.is_settled:
        print(f"  {result.name}: not all that was published had arrived in good time", file=out)


def _print_differences(name: str, method: MethodResult, out: TextIO) -> None:
    """The number of answers that differ from the reference's and the first of them; nothing if none does."""
    differences = method.differences or ()
    if differences:
        print(f"{name}: {len(differences)} answers differ", file=out)
    for one in differences[:_MAX_SHOWN_DIFFERENCES]:
        expected, found = ("end" if token is None else token for token in (one.expected, one.found))
        print(f"  prompt {one.prompt}, token {one.position}: {expected} became {found}", file=out)


def _identical(method: MethodResult) -> str:
    if not method.is_constrained:
        return "-"
    total = method.overall.num_prompts
    return "reference" if method.differences is None else f"{total - len(method.differences)}/{total}"


def _by(one: Speed, other: Speed) -> str:
    """Tokens per round of one by those of the other."""
    return _ratio(one.tokens_per_round / other.tokens_per_round if other.tokens_per_round else None)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
