"""The report of `paceline bench local`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from cluster.cli.bench.acceptance import PositionAcceptance
from cluster.cli.bench.local import CellResult, LocalPlan, MethodResult
from cluster.cli.bench.machine import print_machine
from cluster.cli.bench.prompts import pick_rows
from cluster.cli.bench.speed import NEAR_TIE, Equality
from cluster.cli.table import print_table

_MAX_SHOWN_DIFFERENCES = 5
_MAX_SHOWN_POSITIONS = 8


def print_heading(plan: LocalPlan, out: TextIO) -> None:
    """Machine, versions and settings."""
    print_machine(out)
    engine, num_rows = plan.engine, len(pick_rows(plan.prompts, plan.rows_per_task)[0])
    head = f", EAGLE head {engine.eagle_head}" if engine.eagle_head != "none" else ""
    sampling = "greedy" if engine.temperature == 0 else f"temperature {engine.temperature:g}, seed {plan.seed}"
    learnt = ", engines start cold and learn as they go"
    if plan.learn_rows_per_task:
        learnt = f", engines with drafts have answered {plan.learn_rows_per_task} other rows a task"
    print(
        f"config    model {engine.model}, draft model {engine.draft_model} with branch {engine.branch}{head}, "
        f"gamma {','.join(map(str, plan.gammas))}, quantization {engine.quantization}, {num_rows} prompts, {sampling}, "
        f"{plan.max_new_tokens} new tokens at most, exact {engine.exact}, "
        f"{engine.max_draft_tokens} draft tokens at most{learnt}\n"
        "time      wall time from prompt token ids to answer, prefill included, for every method\n",
        file=out,
        flush=True,
    )


def print_cell(cell: CellResult, out: TextIO) -> None:
    """Speeds over all prompts, ratios by task, acceptance where it was noted, and where answers differ."""
    title, methods = f"{cell.dtype}, batch {cell.batch_size}", cell.methods
    if cell.batch_size > 1 and methods[0].drafters is None:
        title += ": engines answer a block together, generate its prompts one after the other"
    header = ["method", "tokens/s", "x", "median x", "tokens/round", "drafts accepted", "tokens by source", "identical"]
    rows = [_speed_row(method) for method in methods]
    if methods[0].rows_per_token is not None:
        header.insert(5, "rows/token")
        for row, method in zip(rows, methods, strict=True):
            row.insert(5, f"{method.rows_per_token:.2f}")
    print_table(title, header, rows, out)
    tasks = list(methods[0].tasks)
    if len(tasks) > 1:
        speeds = {method.name: [*method.tasks.values(), method.overall] for method in methods}
        ratios = [[name, *(show_ratio(speed.ratio) for speed in speeds[name])] for name in speeds]
        print_table(f"x of {cell.reference}, by task", ["method", *tasks, "all"], ratios, out)
    _print_positions(methods, out)
    _print_sources(methods, out)
    for method in methods:
        if method.equality is not None:
            print_differences(method.name, method.equality, out)
    if cell.num_partial_blocks:
        print(f"{cell.num_partial_blocks} blocks held fewer than {cell.batch_size} prompts", file=out)
    print(file=out, flush=True)


def print_differences(name: str, same: Equality, out: TextIO) -> None:
    """The number of answers that differ from the reference's and the first of them; nothing if none does."""
    if not same.differences:
        return
    near_ties = ""
    if same.largest_gap is not None:
        near_ties = (
            f", {same.num_near_ties} of them where the two best logits are less than {NEAR_TIE:g} apart, "
            f"largest logit gap {same.largest_gap:.2g}"
        )
    print(f"{name}: {len(same.differences)} answers differ{near_ties}", file=out)
    for one in same.differences[:_MAX_SHOWN_DIFFERENCES]:
        gap = "" if one.logit_gap is None else f", logit gap {one.logit_gap:.2g}"
        expected, found = ("end" if token is None else token for token in (one.expected, one.found))
        print(f"  prompt {one.prompt}, token {one.position}: {expected} became {found}{gap}", file=out)


def show_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speed_row(method: MethodResult) -> list[str]:
    speed, same = method.overall, method.equality
    sources = sorted(speed.accepted_tokens.items(), key=lambda item: -item[1])
    shares = [f"{source} {count / max(1, speed.num_tokens):.0%}" for source, count in sources]
    return [
        method.name,
        f"{speed.tokens_per_second:.1f}",
        show_ratio(speed.ratio),
        show_ratio(speed.median_ratio),
        f"{speed.tokens_per_round:.2f}",
        _percent(speed.accepted_share),
        ", ".join(shares) or "-",
        "reference" if same is None else f"{same.num_identical}/{same.num_compared}",
    ]


def _print_positions(methods: Sequence[MethodResult], out: TextIO) -> None:
    positions = {method.name: method.acceptance.by_position for method in methods if method.acceptance is not None}
    deepest = max(map(len, positions.values()), default=0)
    if deepest == 0:
        return
    shown = min(deepest, _MAX_SHOWN_POSITIONS)
    title = "acceptance by position: share of the rounds that verified a draft token so far ahead and accepted it"
    if deepest > shown:
        title += f" (the first {shown} of {deepest} positions)"
    rows = [
        [name, *map(_position_cell, found[:shown]), *["-"] * (shown - len(found))]
        for name, found in positions.items()
        if found
    ]
    print_table(title, ("drafters", *map(str, range(1, shown + 1))), rows, out)


def _position_cell(one: PositionAcceptance) -> str:
    return f"{_percent(one.share)} of {one.rounds}"


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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
