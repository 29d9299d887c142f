"""`paceline bench`: speed, measured beside the alternatives."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.drafters.registry import RETRIEVAL, expand_drafters
from actors.errors import InvalidRequest
from actors.models.loader import DTYPES
from cluster.cli.api_key import ApiKeyOption
from cluster.cli.bench.prompts import read_bench_prompts
from cluster.cli.engine import (
    MAX_GAMMA,
    BranchOption,
    CorpusOption,
    DeviceOption,
    DraftModelOption,
    EagleHeadOption,
    Exact,
    ExactOption,
    ModelOption,
    Quantization,
    QuantizationOption,
    ThreadsOption,
    split_names,
)
from cluster.cli.progress import progress_bars
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.cli.bench.cache import CachePlan
    from cluster.cli.bench.local import LocalPlan

PromptsOption = Annotated[
    Path | None,
    typer.Option(help="JSONL: prompt, messages, turns or prompt_token_ids, and maybe a task and a prediction."),
]
SpecBenchOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory with the question.jsonl of Spec-Bench.")
]
DraftersOption = Annotated[
    list[str],
    typer.Option("--drafters", "--drafter", help="Names, comma-separated, as in `paceline generate`; may be repeated."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Save everything that was measured.")]
MaxDraftTokensOption = Annotated[int, typer.Option(min=0, max=256)]

app = typer.Typer(no_args_is_help=True, help="Measure speed: of the engine in one process, or of a running server.")

_PLOT_SUFFIXES = (".png", ".svg")


class Speculation(StrEnum):
    on = "on"
    off = "off"
    both = "both"


@app.command()
def local(
    prompts: PromptsOption = None,
    spec_bench: SpecBenchOption = None,
    compare: bool = typer.Option(
        False,
        "--compare",
        "--no-baselines",
        help="Measure against decoding without drafts instead of `transformers`, and show acceptance by position.",
    ),
    rows_per_task: int = typer.Option(None, min=1, help="Rows of each task, evenly spaced; by default all."),
    learn_rows: int = typer.Option(
        0, min=0, help="Other rows of each task that engines with drafters answer beforehand: a warm start."
    ),
    max_new_tokens: int = typer.Option(128, min=1),
    dtype: str = typer.Option("float32", help=f"Comma-separated: {', '.join(DTYPES)}."),
    batch_size: str = typer.Option("1", help="Comma-separated, such as 1,8."),
    drafters: DraftersOption = ["auto"],  # noqa: B006 (typer makes a new list of it)
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "auto",
    eagle_head: EagleHeadOption = "none",
    corpus: CorpusOption = [],  # noqa: B006
    gamma: str = typer.Option("4", help="Tokens ahead that the draft model guesses; comma-separated, such as 2,4,8."),
    branch: BranchOption = 2,
    max_draft_tokens: MaxDraftTokensOption = 16,
    temperature: float = typer.Option(0.0, min=0.0, max=2.0, help="With --compare; 0: the likeliest token."),
    seed: int = typer.Option(0, min=0, help="Prompt i is sampled with seed + i."),
    quantization: QuantizationOption = Quantization.none,
    device: DeviceOption = "auto",
    exact: ExactOption = Exact.default,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    plot: Path = typer.Option(None, help="With --compare: draw speed and acceptance, a .png or .svg file."),
) -> None:
    """Decoding speed in one process against `transformers` generate or, with --compare, against no drafts, interleaved
    on the same prompts."""
    rows = read_bench_prompts(prompts, spec_bench)
    sets = _drafter_sets(drafters)
    for directory in corpus:
        if not directory.is_dir():
            raise InvalidRequest("--corpus", str(directory), "there is no such directory")
        if not any(RETRIEVAL in expand_drafters(names) for names in sets):
            raise InvalidRequest("--corpus", str(directory), f"--drafters must include {RETRIEVAL} to use it")
    dtypes = tuple(_checked_dtype(name) for name in split_names(dtype))
    batch_sizes, gammas = _integers("--batch-size", batch_size, 1024), _integers("--gamma", gamma, MAX_GAMMA)
    check_writable("--json", json_file)
    if plot is not None:
        _check_plot(plot, num_cells=len(dtypes) * len(batch_sizes))
    for option, value in {"--temperature": temperature or None, "--plot": plot}.items():
        if value is not None and not compare:
            raise InvalidRequest(option, str(value), "give --compare, too")
    from cluster.cli.bench.local import LocalPlan, run_local
    from cluster.cli.bench.report import print_cell, print_heading

    plan = LocalPlan(
        prompts=tuple(rows),
        engine={
            "model": model,
            "draft_model": draft_model,
            "eagle_head": eagle_head,
            "corpora": tuple(map(str, corpus)),
            "branch": branch,
            "max_draft_tokens": max_draft_tokens,
            "quantization": quantization.value,
            "device": device,
            "exact": exact.value,
        },
        drafters=sets,
        gammas=gammas,
        rows_per_task=rows_per_task,
        learn_rows_per_task=learn_rows,
        max_new_tokens=max_new_tokens,
        dtypes=dtypes,
        batch_sizes=batch_sizes,
        compare=compare,
        temperature=temperature,
        seed=seed,
    )
    facts = _facts(plan, threads)
    print_heading(facts, "wall time from prompt token ids to answer, prefill included, for every method", sys.stdout)
    with progress_bars() as progress:
        cells = run_local(plan, progress, lambda cell: print_cell(cell, sys.stdout))
    if json_file is not None:
        save_json(json_file, {**facts, "cells": [asdict(cell) for cell in cells]})
    if plot is not None:
        from cluster.cli.bench.plot import draw_comparison

        draw_comparison(cells[0], model, plot)


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
    goodput: list[str] = typer.Option([], help="Objective as ttft|tpot|e2el:milliseconds; may be repeated."),
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
    objectives = dict(map(_objective, goodput))
    check_writable("--save-result", save_result)
    from cluster.cli.bench.serve import ServePlan, run_serve

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
    typer.echo(report.as_text(plan), nl=False)
    if report.num_repeated:
        typer.echo(f"{report.num_repeated} requests repeat a prompt; caches make them faster", err=True)
    if save_result is not None:
        save_json(save_result, report.as_json(plan, detailed=save_detailed))
    if not any(summary["completed"] for summary in report.summaries.values()):
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
    drafters: DraftersOption = ["auto"],  # noqa: B006
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "none",
    max_draft_tokens: MaxDraftTokensOption = 16,
    device: DeviceOption = "auto",
    replica: bool = typer.Option(
        False, "--replica", help="Also ask an engine that has answered before itself: a warm replica."
    ),
    row_times: str = typer.Option(
        "", metavar="ROWS:MS,...", help="Forward times, such as 1:36,8:42,16:61; by default as measured here."
    ),
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """What the shared cache is worth on this machine: warm by cold, on requests of several kinds.

    Unrelated requests are taken from --prompts or --spec-bench, and left out without.
    """
    has_prompts = prompts is not None or spec_bench is not None
    bench_prompts = read_bench_prompts(prompts, spec_bench) if has_prompts else []
    check_writable("--json", json_file)
    row_seconds = parse_row_times(row_times)
    dtype, sets = _checked_dtype(dtype), _drafter_sets(drafters)
    from cluster.cli.bench.cache import CachePlan, run_cache
    from cluster.cli.bench.report import print_cache_report, print_heading

    plan = CachePlan(
        prompts=tuple(bench_prompts),
        engine={
            "model": model,
            "draft_model": draft_model,
            "max_draft_tokens": max_draft_tokens,
            "dtype": dtype,
            "device": device,
        },
        drafters=sets,
        kinds=split_names(kinds),
        rows=rows,
        rows_per_task=rows_per_task,
        rows_before_per_task=rows_before,
        max_new_tokens=max_new_tokens,
        replica=replica,
        row_seconds=row_seconds,
    )
    facts = _facts(plan, threads)
    note = (
        "two fresh engines on the same requests, greedy: cold, without a cache, and warm, with what another engine has "
    )
    note += "answered before; tokens/s by what forwards take that nothing disturbs"
    print_heading(facts, note, sys.stdout)
    with progress_bars() as progress:
        report = run_cache(plan, progress)
    print_cache_report(report, sys.stdout)
    if json_file is not None:
        save_json(json_file, {**facts, **asdict(report)})


def _facts(plan: LocalPlan | CachePlan, threads: int | None) -> dict[str, dict[str, Any]]:
    """The machine, after torch's threads were set, and what was asked for, without the prompts."""
    import torch

    from cluster.cli.bench.measure import describe_machine

    if threads is not None:
        torch.set_num_threads(threads)
    settings = {key: value for key, value in asdict(plan).items() if key not in ("prompts", "engine")}
    return {"machine": describe_machine(), "config": {**plan.engine, "num_prompts": len(plan.prompts), **settings}}


def _drafter_sets(texts: list[str]) -> tuple[tuple[str, ...], ...]:
    """Distinct sets, in order. Raises InvalidRequest."""
    sets = [split_names(text) for text in texts]
    for names, text in zip(sets, texts, strict=True):
        if not names:
            raise InvalidRequest("--drafters", text, "it must hold at least one name")
        expand_drafters(names, field="--drafters")
    return tuple(dict.fromkeys(sets))


def _checked_dtype(name: str) -> str:
    if name not in DTYPES:
        raise InvalidRequest("--dtype", name, f"it must be one of {', '.join(DTYPES)}")
    return name


def _integers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Distinct integers from 1 to `most`, comma-separated, in order. Raises InvalidRequest."""
    parts = split_names(text)
    # int() refuses thousands of digits.
    if not parts or not all(part.isdecimal() and len(part) <= 9 and 1 <= int(part) <= most for part in parts):
        raise InvalidRequest(option, text, f"it must hold integers from 1 to {most}, comma-separated")
    return tuple(dict.fromkeys(map(int, parts)))


def _check_plot(plot: Path, num_cells: int) -> None:
    if plot.suffix.lower() not in _PLOT_SUFFIXES:
        raise InvalidRequest("--plot", str(plot), f"its name must end in {' or '.join(_PLOT_SUFFIXES)}")
    if num_cells > 1:
        raise InvalidRequest("--plot", str(plot), "one picture shows one --dtype and one --batch-size")
    check_writable("--plot", plot)
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("--plot", str(plot), "it needs matplotlib; install Paceline with the extra [plot]")


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
    """Check before an hour of measuring. Raises InvalidRequest."""
    if file is None:
        return
    try:
        is_new = not file.exists()
        file.open("a").close()  # permissions do not tell all
        if is_new:
            file.unlink()
    except OSError as error:
        raise InvalidRequest(option, str(file), f"it cannot be written: {error.strerror}") from None


def save_json(file: Path, data: dict[str, Any]) -> None:
    """Write `data` with the date."""
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    file.write_text(json.dumps({"date": date, **data}, indent=1) + "\n", encoding="utf-8")
