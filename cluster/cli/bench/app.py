"""`paceline bench`: how fast, measured beside the alternatives."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import InvalidRequest
from actors.models.loader import DTYPES
from cluster.cli.api_key import ApiKeyOption
from cluster.cli.engine import (
    BranchOption,
    DeviceOption,
    DraftModelOption,
    EagleHeadOption,
    Exact,
    ExactOption,
    ModelOption,
    Quantization,
    QuantizationOption,
    split_names,
)
from cluster.cli.progress import progress_bars
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.cli.bench.prompts import BenchPrompt

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="JSONL: prompt, messages, turns or prompt_token_ids, and maybe a task and a prediction; or rows as those "
        "of HumanEval, MBPP, GSM8K, CNN/DM, WMT16 or Alpaca."
    ),
]
SpecBenchOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory with the question.jsonl of Spec-Bench.")
]

app = typer.Typer(no_args_is_help=True, help="Measure speed: of the engine in one process, or of a running server.")


class Speculation(StrEnum):
    on = "on"
    off = "off"
    both = "both"


@app.command()
def local(
    prompts: PromptsOption = None,
    spec_bench: SpecBenchOption = None,
    rows_per_task: int = typer.Option(None, min=1, help="Rows of each task, evenly spaced; by default all."),
    learn_rows: int = typer.Option(
        0, min=0, help="Other rows of each task that engines with drafters answer beforehand: a warm start."
    ),
    max_new_tokens: int = typer.Option(128, min=1),
    dtype: str = typer.Option("float32", help=f"Comma-separated: {', '.join(DTYPES)}."),
    batch_size: str = typer.Option("1", help="Comma-separated, such as 1,8."),
    drafters: list[str] = typer.Option(
        ["auto"], help="Names, comma-separated, as in `paceline generate`; give it again to compare sets."
    ),
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "auto",
    eagle_head: EagleHeadOption = "none",
    branch: BranchOption = 2,
    max_draft_tokens: int = typer.Option(16, min=0, max=256),
    quantization: QuantizationOption = Quantization.none,
    device: DeviceOption = "auto",
    exact: ExactOption = Exact.default,
    threads: int = typer.Option(None, min=1, help="Torch threads, for every method; by default torch's own choice."),
    baselines: bool = typer.Option(True, help="Measure `transformers` too; else against the engine without drafts."),
    json_file: Path = typer.Option(None, "--json", help="Save everything that was measured."),
) -> None:
    """Decoding speed in one process against `transformers` generate, interleaved on the same prompts, greedy."""
    rows = read_bench_prompts(prompts, spec_bench)
    dtypes = split_names(dtype)
    for name in dtypes:
        if name not in DTYPES:
            raise InvalidRequest("--dtype", name, f"it must be one of {', '.join(DTYPES)}")
    sizes = split_names(batch_size)
    if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise InvalidRequest("--batch-size", batch_size, "it must hold integers of at least 1, comma-separated")
    check_writable("--json", json_file)
    import torch

    from cluster.cli.bench.local import LocalPlan, run_local
    from cluster.cli.bench.local_report import print_cell, print_heading

    if threads is not None:
        torch.set_num_threads(threads)
    plan = LocalPlan(
        prompts=tuple(rows),
        model=model,
        draft_model=draft_model,
        eagle_head=eagle_head,
        drafters=tuple(split_names(names) for names in drafters),
        rows_per_task=rows_per_task,
        learn_rows_per_task=learn_rows,
        max_new_tokens=max_new_tokens,
        dtypes=dtypes,
        batch_sizes=tuple(int(size) for size in sizes),
        quantization=quantization.value,
        device=device,
        exact=exact.value,
        branch=branch,
        max_draft_tokens=max_draft_tokens,
        baselines=baselines,
    )
    print_heading(plan, sys.stdout)
    with progress_bars() as progress:
        report = run_local(plan, progress, lambda cell: print_cell(cell, sys.stdout))
    if json_file is not None:
        save_json(json_file, report.as_json())


@app.command()
def serve(
    url: str = typer.Option("http://127.0.0.1:8000", help="Where the server listens."),
    api_key: ApiKeyOption = None,
    prompts: PromptsOption = None,
    spec_bench: SpecBenchOption = None,
    num_prompts: int = typer.Option(100, min=1, help="Requests; with --speculation both, of either kind."),
    request_rate: float = typer.Option(float("inf"), help="Requests a second, Poisson; inf sends all at once."),
    max_concurrency: int = typer.Option(None, min=1, help="Requests under way at a time; by default no limit."),
    max_tokens: int = typer.Option(128, min=1),
    speculation: Speculation = typer.Option(Speculation.on, help="both: blocks with and without take turns."),
    block_size: int = typer.Option(16, min=1, help="Requests in such a block."),
    temperature: float = typer.Option(0.0, min=0.0, max=2.0),
    seed: int = typer.Option(0, help="Of arrivals; request i is sampled with seed + i."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Every answer has --max-tokens tokens."),
    goodput: list[str] = typer.Option(
        [], help="Objective as metric:milliseconds, metric one of ttft, tpot, e2el; give it again for more."
    ),
    num_warmups: int = typer.Option(1, min=0),
    model: str = typer.Option(None, help="By default the first that the server lists."),
    timeout: float = typer.Option(600.0, min=1.0, help="Seconds without a byte after which a request has failed."),
    save_result: Path = typer.Option(None, help="Save the figures as JSON, under the names of `vllm bench serve`."),
    save_detailed: bool = typer.Option(False, "--save-detailed", help="With the figures of every request."),
) -> None:
    """Open-loop load on the streaming HTTP API: throughput, TTFT, TPOT, ITL and E2EL.

    ITL is the gap between two chunks; a chunk holds all tokens of a round, so compare speculation by TPOT.
    """
    if not request_rate > 0:
        raise InvalidRequest("--request-rate", request_rate, "it must be above 0, or inf")
    rows = read_bench_prompts(prompts, spec_bench)
    objectives = dict(_objective(one) for one in goodput)
    check_writable("--save-result", save_result)
    from cluster.cli.bench.serve import ServePlan, run_serve
    from cluster.cli.bench.serve_metrics import format_summary

    plan = ServePlan(
        prompts=tuple(rows),
        url=url,
        api_key=api_key,
        model=model,
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        max_tokens=max_tokens,
        speculation=speculation.value,
        block_size=block_size,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        objectives=objectives,
        num_warmups=num_warmups,
        timeout_s=timeout,
    )
    with progress_bars() as progress:
        report = run_serve(plan, progress)
    for mode, summary in report.summaries.items():
        title = "Serving Benchmark Result"
        if len(report.summaries) > 1:
            title += f", speculation {mode}"
        typer.echo(format_summary(summary, title, max_concurrency, request_rate), nl=False)
    for name, ratio in (
        ("Output token throughput, speculation on / off:", report.ratio),
        ("The same, median over pairs of blocks:", report.median_block_ratio),
        ("Mean TPOT, speculation off / on:", report.tpot_ratio),
    ):
        if len(report.summaries) > 1:
            typer.echo(f"{name:<50} {'-' if ratio is None else format(ratio, '.2f')}")
    if report.num_repeated:
        typer.echo(f"{report.num_repeated} requests repeat a prompt; caches make them faster", err=True)
    if save_result is not None:
        save_json(save_result, report.as_json(plan, detailed=save_detailed))
    if not any(summary.completed for summary in report.summaries.values()):
        raise typer.Exit(1)


@app.command()
def cache(
    prompts: PromptsOption = None,
    spec_bench: SpecBenchOption = None,
    kinds: str = typer.Option("", help="Kinds of requests to measure, comma-separated; by default all."),
    rows: int = typer.Option(4, min=1, help="Requests of each kind that needs no prompts file."),
    rows_per_task: int = typer.Option(2, min=1, help="Rows of each task of the prompts file that are asked."),
    rows_before: int = typer.Option(4, min=1, help="Other rows of each task that have been answered before."),
    max_new_tokens: int = typer.Option(96, min=1),
    dtype: str = typer.Option("float32", help=f"One of {', '.join(DTYPES)}."),
    drafters: list[str] = typer.Option(
        ["auto"], help="Names, comma-separated, as in `paceline generate`; give it again to compare sets."
    ),
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "none",
    max_draft_tokens: int = typer.Option(16, min=0, max=256),
    device: DeviceOption = "auto",
    replica: bool = typer.Option(
        False, "--replica", help="Ask an engine, too, that has answered those before itself: a warm replica."
    ),
    row_times: str = typer.Option(
        "", metavar="ROWS:MS,...", help="What forwards take, such as 1:36,8:42,16:61; by default as measured here."
    ),
    threads: int = typer.Option(None, min=1, help="Torch threads; by default torch's own choice."),
    json_file: Path = typer.Option(None, "--json", help="Save everything that was measured."),
) -> None:
    """What the shared cache is worth on this machine: warm by cold, on requests of several kinds.

    Requests that have nothing to do with each other are taken from --prompts or --spec-bench, and left out without.
    """
    has_prompts = prompts is not None or spec_bench is not None
    bench_prompts = read_bench_prompts(prompts, spec_bench) if has_prompts else []
    if dtype not in DTYPES:
        raise InvalidRequest("--dtype", dtype, f"it must be one of {', '.join(DTYPES)}")
    check_writable("--json", json_file)
    import torch

    from cluster.cli.bench.cache import run_cache
    from cluster.cli.bench.cache_plan import CachePlan
    from cluster.cli.bench.cache_report import print_cache_heading, print_row_times, print_scenario
    from cluster.cli.bench.cache_value import ScenarioResult

    if threads is not None:
        torch.set_num_threads(threads)
    plan = CachePlan(
        prompts=tuple(bench_prompts),
        model=model,
        draft_model=draft_model,
        drafters=tuple(split_names(names) for names in drafters),
        kinds=tuple(split_names(kinds)),
        rows=rows,
        rows_per_task=rows_per_task,
        rows_before_per_task=rows_before,
        max_new_tokens=max_new_tokens,
        max_draft_tokens=max_draft_tokens,
        dtype=dtype,
        device=device,
        replica=replica,
        row_seconds=parse_row_times(row_times),
    )
    print_cache_heading(plan, sys.stdout)
    shown: list[tuple[str, ...]] = []

    def show(result: ScenarioResult) -> None:
        print_scenario(result, result.drafters not in shown, sys.stdout)
        shown.append(result.drafters)

    with progress_bars() as progress:
        report = run_cache(plan, progress, show)
    print_row_times(report, sys.stdout)
    if json_file is not None:
        save_json(json_file, report.as_json())


def read_bench_prompts(file: Path | None, spec_bench: Path | None) -> list[BenchPrompt]:
    """Of --prompts or --spec-bench. Raises InvalidRequest unless exactly one is given and can be read."""
    from cluster.cli.bench.prompts import read_prompts, read_spec_bench

    if file is not None and spec_bench is None:
        return read_prompts(file)
    if spec_bench is not None and file is None:
        return read_spec_bench(spec_bench)
    raise InvalidRequest("--prompts", str(file) if file else None, "give either --prompts or --spec-bench")


def _objective(text: str) -> tuple[str, float]:
    from cluster.cli.bench.serve_metrics import GOODPUT_METRICS

    metric, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if metric not in GOODPUT_METRICS or not value >= 0:
        limit = f"write metric:milliseconds, metric one of {', '.join(GOODPUT_METRICS)}"
        raise InvalidRequest("--goodput", text, limit)
    return metric, value


def check_writable(option: str, file: Path | None) -> None:
    """Before an hour is spent on what cannot be saved. Raises InvalidRequest."""
    if file is None:
        return
    try:
        if file.is_dir() or not file.parent.is_dir():
            raise InvalidRequest(option, str(file), "its directory must exist and it must be a file")
        if not file.exists():
            file.touch()  # permissions do not tell all
            file.unlink()
        elif not os.access(file, os.W_OK):
            raise InvalidRequest(option, str(file), "it cannot be written")
    except OSError as error:
        raise InvalidRequest(option, str(file), f"it cannot be written: {error.strerror}") from None


def save_json(file: Path, data: dict[str, Any]) -> None:
    """With the date."""
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    file.write_text(json.dumps({"date": date, **data}, indent=1) + "\n", encoding="utf-8")
