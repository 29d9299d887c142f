"""`paceline bench`: speed, measured beside the alternatives."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.errors import InvalidRequest
from cluster.cli.bench.options import CacheOptions, DraftingOptions, LocalOptions, PromptOptions, ServeOptions
from cluster.cli.bench.prompts import BenchPrompt, read_bench_prompts
from cluster.cli.progress import progress_bars
from cluster.cli.row_times import parse_row_times
from cluster.cli.shared_options import with_options

JsonFile = Annotated[Path | None, typer.Option("--json", help="Save everything that was measured.")]

app = typer.Typer(no_args_is_help=True, help="Measure speed: of the engine in one process, or of a running server.")

_PLOT_SUFFIXES = (".png", ".svg")


@app.command()
@with_options
def local(
    *,
    source: PromptOptions,
    options: LocalOptions,
    json_file: JsonFile = None,
    plot: Path = typer.Option(None, help="With --compare: draw speed and acceptance, a .png or .svg file."),
) -> None:
    """Decoding speed in one process against `transformers` generate or, with --compare, against no drafts, interleaved
    on the same prompts."""
    if options.task is None:
        prompts = read_bench_prompts(source.prompts, source.spec_bench)
    else:
        prompts = _prompts_of_task(options, source)
    options.drafter_sets()
    options.gammas()
    _check_writable("--json", json_file)
    _check_plot(plot)
    for option, value in {"--temperature": options.temperature or None, "--plot": plot}.items():
        if value is not None and not options.compare:
            raise InvalidRequest(option, str(value), "give --compare, too")
    from cluster.cli.bench.local import run_local, with_dtype
    from cluster.cli.bench.report import print_heading, print_local_report

    options = with_dtype(options)
    facts = _facts(options, len(prompts))
    print_heading(facts, "wall time from prompt token ids to answer, prefill included, for every method", sys.stdout)
    with progress_bars() as progress:
        report = run_local(prompts, options, progress)
    title = f"{options.dtype}, batch {options.batch_size}"
    print_local_report(report, title, sys.stdout)
    _save_json(json_file, {**facts, **asdict(report)})
    if plot is not None:
        from cluster.cli.bench.plot import draw_comparison

        draw_comparison(report, f"{options.model}, {title}", plot)


def _prompts_of_task(options: LocalOptions, source: PromptOptions) -> list[BenchPrompt]:
    """Raises InvalidRequest for options that do not go with --task."""
    from cluster.cli.bench.tools_task import tool_prompts

    for option, file in {"--prompts": source.prompts, "--spec-bench": source.spec_bench}.items():
        if file is not None:
            raise InvalidRequest(option, str(file), "--task has prompts of its own")
    if not options.compare:
        raise InvalidRequest("--task", options.task, "give --compare, too: `transformers` has no constraints")
    return tool_prompts()


@app.command()
@with_options
def serve(
    *,
    source: PromptOptions,
    options: ServeOptions,
    save_result: Path = typer.Option(None, help="Save the figures as JSON, under the names of `vllm bench serve`."),
) -> None:
    """Open-loop load on the streaming HTTP API: throughput, TTFT, TPOT, ITL and E2EL.

    ITL is the gap between two chunks; a chunk holds all tokens of a round, so compare speculation by TPOT.
    """
    if not options.request_rate > 0:
        raise InvalidRequest("--request-rate", options.request_rate, "it must be above 0, or inf")
    options.objectives()
    prompts = read_bench_prompts(source.prompts, source.spec_bench)
    _check_writable("--save-result", save_result)
    from cluster.cli.bench.serve import run_serve

    with progress_bars() as progress:
        report = run_serve(prompts, options, progress)
    typer.echo(report.as_text(options), nl=False)
    if report.num_repeated:
        typer.echo(f"{report.num_repeated} requests repeat a prompt; caches make them faster", err=True)
    _save_json(save_result, report.as_json(options))
    if not any(summary["completed"] for summary in report.summaries.values()):
        raise typer.Exit(1)


@app.command()
@with_options
def cache(*, source: PromptOptions, options: CacheOptions, json_file: JsonFile = None) -> None:
    """Measure the gain of the shared cache on this machine: warm against cold, on requests of several kinds.

    Unrelated requests are taken from --prompts or --spec-bench, and left out without.
    """
    has_prompts = source.prompts is not None or source.spec_bench is not None
    prompts = read_bench_prompts(source.prompts, source.spec_bench) if has_prompts else []
    options.drafter_sets()
    parse_row_times(options.row_times)
    _check_writable("--json", json_file)
    from cluster.cli.bench.cache import CacheReport, run_cache
    from cluster.cli.bench.report import print_cache_report, print_heading

    facts = _facts(options, len(prompts))
    note = (
        "two fresh engines on the same requests, greedy: cold, without a cache, and warm, with what another engine has "
        "answered before; tokens/s by what forwards take that nothing disturbs"
    )
    print_heading(facts, note, sys.stdout)
    report = CacheReport()
    try:
        with progress_bars() as progress:
            run_cache(prompts, options, report, progress)
    finally:  # what was measured before an interruption counts, too
        if report.scenarios:
            print_cache_report(report, sys.stdout)
            _save_json(json_file, {**facts, **asdict(report)})


def _facts(options: DraftingOptions, num_prompts: int) -> dict[str, dict[str, Any]]:
    """The machine, after torch's threads were set, and what was asked for."""
    options.set_threads()
    from cluster.cli.bench.measure import describe_machine

    return {"machine": describe_machine(), "config": {"num_prompts": num_prompts, **asdict(options)}}


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in _PLOT_SUFFIXES:
        raise InvalidRequest("--plot", str(plot), f"its name must end in {' or '.join(_PLOT_SUFFIXES)}")
    _check_writable("--plot", plot)
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("--plot", str(plot), "it needs matplotlib; install Paceline with the extra [plot]")


def _check_writable(option: str, file: Path | None) -> None:
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


def _save_json(file: Path | None, data: dict[str, Any]) -> None:
    """Write `data` with the date, if there is a file to write to."""
    if file is not None:
        date = datetime.now().strftime("%Y%m%d-%H%M%S")
        file.write_text(json.dumps({"date": date, **data}, indent=1, default=str) + "\n", encoding="utf-8")
