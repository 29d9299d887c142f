"""The report of `paceline bench local`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from cluster.cli.bench.local import CellResult, LocalPlan, MethodResult
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.prompts import pick_rows
from cluster.cli.bench.speed import NEAR_TIE
from cluster.cli.bench.table import print_table

_MAX_SHOWN_DIFFERENCES = 5


def print_heading(plan: LocalPlan, out: TextIO) -> None:
    """Where it runs, with what, and what is compared."""
    machine, versions = describe_machine(), describe_versions()
    num_rows = len(pick_rows(plan.prompts, plan.rows_per_task)[0])
    print("machine   " + ", ".join(f"{key} {value}" for key, value in machine.items()), file=out)
    print("versions  " + ", ".join(f"{key} {value}" for key, value in versions.items()), file=out)
    learnt = f", engines with drafts have answered {plan.learn_rows_per_task} other rows a task"
    print(
        f"config    model {plan.model}, {describe_drafting(plan.draft_model, plan.eagle_head, plan.branch)}, "
        f"quantization {plan.quantization}, {num_rows} prompts, greedy, "
        f"{plan.max_new_tokens} new tokens at most, exact {plan.exact}, {plan.max_draft_tokens} draft tokens at most"
        + (learnt if plan.learn_rows_per_task else ", engines start cold and learn as they go"),
        file=out,
    )
    print(
        "time      wall time from prompt token ids to answer, prefill included, for every method\n",
        file=out,
        flush=True,
    )


def describe_drafting(draft_model: str, eagle_head: str, branch: int) -> str:
    head = f", EAGLE head {eagle_head}" if eagle_head != "none" else ""
    return f"draft model {draft_model} with branch {branch}{head}"


def print_cell(cell: CellResult, out: TextIO) -> None:
    """Speeds over all prompts, ratios by task, and where answers differ."""
    title = f"{cell.dtype}, batch {cell.batch_size}"
    if cell.batch_size > 1:
        title += ": engines answer a block together, generate its prompts one after the other"
    header = ("method", "tokens/s", "x", "median x", "tokens/round", "drafts accepted", "tokens by source", "identical")
    print_table(title, header, [_overall_row(cell, method) for method in cell.methods], out)
    print_task_ratios(cell.methods, cell.reference, out)
    for method in cell.methods:
        print_differences(method, out)
    if cell.num_partial_blocks:
        print(f"{cell.num_partial_blocks} blocks held fewer than {cell.batch_size} prompts", file=out)
    print(file=out, flush=True)


def print_task_ratios(methods: Sequence[MethodResult], reference: str, out: TextIO) -> None:
    """Nothing where there is only one task."""
    tasks = list(methods[0].tasks)
    if len(tasks) > 1:
        rows = [
            [method.name, *(show_ratio(method.tasks[task].ratio) for task in tasks), show_ratio(method.overall.ratio)]
            for method in methods
        ]
        print_table(f"x of {reference}, by task", ("method", *tasks, "all"), rows, out)


def print_differences(method: MethodResult, out: TextIO) -> None:
    """How many answers differ from the reference's and where the first of them do; nothing where none does."""
    same = method.equality
    if same is None or not same.differences:
        return
    near_ties = ""
    if same.largest_gap is not None:
        near_ties = (
            f", {same.num_near_ties} of them where the two best logits are less than {NEAR_TIE:g} apart, "
            f"largest logit gap {same.largest_gap:.2g}"
        )
    print(f"{method.name}: {len(same.differences)} answers differ{near_ties}", file=out)
    for one in same.differences[:_MAX_SHOWN_DIFFERENCES]:
        gap = "" if one.logit_gap is None else f", logit gap {one.logit_gap:.2g}"
        expected, found = ("end" if token is None else token for token in (one.expected, one.found))
        print(f"  prompt {one.prompt}, token {one.position}: {expected} became {found}{gap}", file=out)


def show_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _overall_row(cell: CellResult, method: MethodResult) -> list[str]:
    speed = method.overall
    sources = sorted(speed.accepted_tokens.items(), key=lambda item: -item[1])
    shares = [f"{source} {count / max(1, speed.num_tokens):.0%}" for source, count in sources]
    same = method.equality
    return [
        method.name,
        f"{speed.tokens_per_second:.1f}",
        show_ratio(speed.ratio),
        show_ratio(speed.median_ratio),
        f"{speed.tokens_per_round:.2f}",
        "-" if speed.accepted_share is None else f"{speed.accepted_share:.0%}",
        ", ".join(shares) or "-",
        "reference" if same is None else f"{same.num_identical}/{same.num_compared}",
    ]
