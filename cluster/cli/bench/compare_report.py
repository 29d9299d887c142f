"""The report of `paceline compare`, for people."""

from __future__ import annotations

from typing import TextIO

from cluster.cli.bench.acceptance import PositionAcceptance
from cluster.cli.bench.compare import ComparedMethod, ComparePlan, CompareReport
from cluster.cli.bench.local_report import describe_drafting, print_differences, print_task_ratios, show_ratio
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.prompts import pick_rows
from cluster.cli.bench.table import print_table

_MAX_SHOWN_POSITIONS = 8


def print_plan(plan: ComparePlan, out: TextIO) -> None:
    """Where it runs, with what, and what is compared."""
    rows = pick_rows(plan.prompts, plan.rows_per_task)[0]
    num_turns = sum(row.num_turns for row in rows)
    sampling = "greedy" if plan.temperature == 0 else f"temperature {plan.temperature:g}, seed {plan.seed}"
    print("machine   " + ", ".join(f"{key} {value}" for key, value in describe_machine().items()), file=out)
    print("versions  " + ", ".join(f"{key} {value}" for key, value in describe_versions().items()), file=out)
    print(
        f"config    model {plan.model}, {describe_drafting(plan.draft_model, plan.eagle_head, plan.branch)}, "
        f"{plan.dtype}, quantization {plan.quantization}, gamma {','.join(map(str, plan.gammas))}, "
        f"batch {plan.batch_size}, "
        f"{len(rows)} prompts with {num_turns} turns, {sampling}, {plan.max_new_tokens} new tokens a turn at most, "
        f"exact {plan.exact}, {plan.max_draft_tokens} draft tokens at most, engines start cold and learn as they go",
        file=out,
    )
    print(
        "time      wall time from prompt token ids to answer, prefill included, for every method\n",
        file=out,
        flush=True,
    )


def print_report(report: CompareReport, out: TextIO) -> None:
    """Speeds, acceptance by position and by source, and where answers differ."""
    methods = report.methods
    header = ("drafters", "tokens/s", "x", "median x", "seconds", "tokens per round", "rows per token", "identical")
    title = "speed; x: of decoding without drafts; rows: computed by the target, without those of prompts"
    print_table(title, header, [_speed_row(method) for method in methods], out)
    print_task_ratios(methods, report.reference, out)
    _print_positions(methods, out)
    rows = [
        [method.name, source, str(one.proposed), str(one.verified), str(one.accepted), _percent(one.share)]
        for method in methods
        for source, one in method.acceptance.by_source.items()
    ]
    if rows:
        columns = ("drafters", "source", "proposed", "verified", "accepted", "share")
        print_table("draft tokens by source; share: accepted of verified", columns, rows, out)
    for method in methods:
        print_differences(method, out)


def _speed_row(method: ComparedMethod) -> list[str]:
    speed, same = method.overall, method.equality
    return [
        method.name,
        f"{speed.tokens_per_second:.1f}",
        show_ratio(speed.ratio),
        show_ratio(speed.median_ratio),
        f"{speed.seconds:.1f}",
        f"{speed.tokens_per_round:.2f}",
        f"{method.rows_per_token:.2f}",
        "reference" if same is None else f"{same.num_identical}/{same.num_compared}",
    ]


def _print_positions(methods: list[ComparedMethod], out: TextIO) -> None:
    deepest = max(len(method.acceptance.by_position) for method in methods)
    if deepest == 0:
        return
    shown = min(deepest, _MAX_SHOWN_POSITIONS)
    title = "acceptance by position: of the rounds that verified a draft token so far ahead, those that accepted it"
    if deepest > shown:
        title += f" (the first {shown} of {deepest} positions)"
    rows = []
    for method in methods:
        positions = method.acceptance.by_position[:shown]
        if positions:
            rows.append([method.name, *map(_position_cell, positions), *["-"] * (shown - len(positions))])
    print_table(title, ("drafters", *map(str, range(1, shown + 1))), rows, out)


def _position_cell(one: PositionAcceptance) -> str:
    return f"{_percent(one.share)} of {one.rounds}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
