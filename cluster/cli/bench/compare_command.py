"""`paceline compare`: which drafters pay, on prompts of one's own or those of Spec-Bench."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import typer

from actors.drafters.registry import RETRIEVAL, expand_drafters
from actors.errors import InvalidRequest
from cluster.cli.bench.app import (
    PromptsOption,
    SpecBenchOption,
    check_writable,
    read_bench_prompts,
    save_json,
)
from cluster.cli.engine import (
    MAX_GAMMA,
    BranchOption,
    CorpusOption,
    DeviceOption,
    DraftModelOption,
    Dtype,
    EagleHeadOption,
    Exact,
    ExactOption,
    ModelOption,
    Quantization,
    QuantizationOption,
    ThreadsOption,
    split_names,
)
from cluster.cli.generate import check_sampling_options
from cluster.cli.progress import progress_bars

_PLOT_SUFFIXES = (".png", ".svg")


def compare(
    prompts: PromptsOption = None,
    spec_bench: SpecBenchOption = None,
    drafter: list[str] = typer.Option(
        ["auto"], help="Names, comma-separated, as in `paceline generate`; give it again to compare sets."
    ),
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "auto",
    eagle_head: EagleHeadOption = "none",
    corpus: CorpusOption = [],  # noqa: B006 (typer makes a new list of it)
    rows_per_task: int = typer.Option(None, min=1, help="Rows of each task, evenly spaced; by default all."),
    max_new_tokens: int = typer.Option(128, help="Of an answer, at least 1."),
    temperature: float = typer.Option(0.0, help="0 to 2; 0: the likeliest token."),
    seed: int = typer.Option(0, help="Prompt i is sampled with seed + i."),
    gamma: str = typer.Option(
        "4", help="Tokens ahead that the draft model guesses a round; several, such as 2,4,8, are compared."
    ),
    branch: BranchOption = 2,
    max_draft_tokens: int = typer.Option(16, min=0, max=256),
    batch_size: int = typer.Option(1, min=1, max=1024),
    dtype: Dtype = typer.Option(Dtype.float32),
    quantization: QuantizationOption = Quantization.none,
    device: DeviceOption = "auto",
    exact: ExactOption = Exact.default,
    threads: ThreadsOption = None,
    json_file: Path = typer.Option(None, "--json", help="Save everything that was measured."),
    plot: Path = typer.Option(None, help="Draw speed and acceptance by position: a .png or .svg file."),
) -> None:
    """Compare sets of drafters with each other and with decoding without drafts, interleaved on the same prompts."""
    check_sampling_options({"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})
    sets = _drafter_sets(drafter)
    _check_corpora(corpus, sets)
    gammas = _gammas(gamma)
    rows = read_bench_prompts(prompts, spec_bench)
    check_writable("--json", json_file)
    _check_plot("--plot", plot)
    import torch

    from cluster.cli.bench.compare import ComparePlan, run_compare
    from cluster.cli.bench.compare_report import print_plan, print_report

    if threads is not None:
        torch.set_num_threads(threads)
    plan = ComparePlan(
        prompts=tuple(rows),
        drafters=sets,
        model=model,
        draft_model=draft_model,
        eagle_head=eagle_head,
        corpora=tuple(map(str, corpus)),
        rows_per_task=rows_per_task,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        gammas=gammas,
        branch=branch,
        max_draft_tokens=max_draft_tokens,
        batch_size=batch_size,
        dtype=dtype.value,
        quantization=quantization.value,
        device=device,
        exact=exact.value,
    )
    print_plan(plan, sys.stdout)
    with progress_bars() as progress:
        report = run_compare(plan, progress)
    print_report(report, sys.stdout)
    if json_file is not None:
        save_json(json_file, report.as_json())
    if plot is not None:
        from cluster.cli.bench.compare_plot import draw_comparison

        draw_comparison(report, plot)


def _drafter_sets(texts: list[str]) -> tuple[tuple[str, ...], ...]:
    """Distinct sets, as they were written. Raises InvalidRequest."""
    sets = []
    for text in texts:
        names = split_names(text)
        if not names:
            raise InvalidRequest("--drafter", text, "it must hold at least one name")
        expand_drafters(names, field="--drafter")
        sets.append(names)
    return tuple(dict.fromkeys(sets))


def _gammas(text: str) -> tuple[int, ...]:
    """Distinct values, as they were written. Raises InvalidRequest."""
    parts = split_names(text)
    if not parts or not all(_is_gamma(part) for part in parts):
        raise InvalidRequest("--gamma", text, f"it must hold integers from 1 to {MAX_GAMMA}, comma-separated")
    return tuple(dict.fromkeys(map(int, parts)))


def _is_gamma(text: str) -> bool:
    # Python reads no number of thousands of digits.
    return text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MAX_GAMMA


def _check_corpora(corpora: list[Path], sets: tuple[tuple[str, ...], ...]) -> None:
    for directory in corpora:
        if not directory.is_dir():
            raise InvalidRequest("--corpus", str(directory), "there is no such directory")
        if not any(RETRIEVAL in expand_drafters(names) for names in sets):
            raise InvalidRequest("--corpus", str(directory), f"a --drafter must include {RETRIEVAL} to use it")


def _check_plot(option: str, plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in _PLOT_SUFFIXES:
        raise InvalidRequest(option, str(plot), f"its name must end in {' or '.join(_PLOT_SUFFIXES)}")
    check_writable(option, plot)
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest(option, str(plot), "it needs matplotlib; install Paceline with the extra [plot]")
