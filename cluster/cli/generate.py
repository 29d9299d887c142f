"""`paceline generate`: the engine in one process, without Ray."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from actors.drafters.registry import DRAFTER_NAMES
from actors.errors import InvalidRequest
from cluster.cli.engine import (
    AcceptanceOption,
    AcceptanceRule,
    BranchOption,
    CorpusOption,
    DeviceOption,
    DrafterOptionOption,
    DraftModelOption,
    Dtype,
    EagleDepthOption,
    EagleHeadOption,
    EagleTopKOption,
    Exact,
    ExactOption,
    GammaOption,
    ModelOption,
    Quantization,
    QuantizationOption,
    ThreadsOption,
    local_engine,
)
from cluster.generation import generation_options
from cluster.validation import is_text

if TYPE_CHECKING:
    from cluster.offline.engine import BeamSearchResult, Generation, LocalEngine
    from cluster.router.trace import RoundTrace


def generate(
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "auto",
    eagle_head: EagleHeadOption = "none",
    drafter: str = typer.Option("auto", help=f"Names, comma-separated: {', '.join(DRAFTER_NAMES)}."),
    corpus: CorpusOption = [],  # noqa: B006 (typer makes a new list of it)
    drafter_option: DrafterOptionOption = [],  # noqa: B006 (typer makes a new list of it)
    prompt: str = typer.Option(None, help="One prompt."),
    prompts_file: Path = typer.Option(
        None,
        help='JSONL with {"prompt": ...}, {"messages": ...} or {"prompt_token_ids": ...} a row, and perhaps a '
        '"prediction".',
    ),
    prediction: str = typer.Option("", help="What will probably come out of --prompt, as when known text is edited."),
    max_new_tokens: int = typer.Option(
        None, help="At least 1; by default 256, or what the model has room for.", show_default=False
    ),
    temperature: float = typer.Option(0.0, help="0 to 2; 0: the likeliest token."),
    top_p: float = typer.Option(1.0, help="Above 0, up to 1; 1: off."),
    top_k: int = typer.Option(0, help="0: off."),
    seed: int = typer.Option(0, help="Prompt i is sampled with seed + i."),
    beams: int = typer.Option(1, min=1, max=64, help="Above 1: beam search with so many beams, without drafts."),
    length_penalty: float = typer.Option(
        1.0, min=-10.0, max=10.0, help="Of --beams: scores are divided by the number of tokens to its power."
    ),
    gamma: GammaOption = 4,
    branch: BranchOption = 2,
    eagle_depth: EagleDepthOption = 7,
    eagle_top_k: EagleTopKOption = 10,
    batch_size: int = typer.Option(8, min=1, max=1024),
    dtype: Dtype = Dtype.float32,
    quantization: QuantizationOption = Quantization.none,
    device: DeviceOption = "auto",
    exact: ExactOption = Exact.default,
    acceptance: AcceptanceOption = AcceptanceRule.coupled,
    threads: ThreadsOption = None,
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on past the end of sequence."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a prompt."),
    trace: bool = typer.Option(False, "--trace", help="A line on stderr a round: who proposed what, and times."),
) -> None:
    """Generate text for a prompt or a file of prompts."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    check_sampling_options(sampling)
    prompts, predictions = _prompts(prompt, prompts_file, prediction)
    _check_beams(beams, temperature, length_penalty)
    drafts = beams == 1
    engine = local_engine(
        model=model,
        draft_model=draft_model if drafts else "none",
        eagle_head=eagle_head if drafts else "none",
        drafter=drafter if drafts else "none",
        gamma=gamma,
        branch=branch,
        eagle_depth=eagle_depth,
        eagle_top_k=eagle_top_k,
        dtype=dtype,
        quantization=quantization,
        device=device,
        exact=exact,
        threads=threads,
        batch_size=batch_size,
        corpora=corpus if drafts else [],
        drafter_options=drafter_option if drafts else [],
        acceptance=acceptance,
    )
    if not drafts:
        found = engine.beam_search(
            prompts,
            num_beams=beams,
            length_penalty=length_penalty,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
        )
        _print_results(found, as_json)
        return
    sampling |= {"ignore_eos": ignore_eos, "predictions": predictions}
    _print_results(_generated(engine, prompts, sampling, trace=trace), as_json)


def _check_beams(beams: int, temperature: float, length_penalty: float) -> None:
    if beams > 1 and temperature > 0:
        raise InvalidRequest("--temperature", temperature, f"with --beams {beams} it must be 0: beams are not sampled")
    if beams == 1 and length_penalty != 1.0:
        raise InvalidRequest("--length-penalty", length_penalty, "it belongs to beam search: --beams must be above 1")


def _generated(engine: LocalEngine, prompts: list[Any], options: dict[str, Any], *, trace: bool) -> list[Generation]:
    """Under a progress bar on a terminal, or with a line a round."""
    shows_bar = sys.stderr.isatty() and not trace
    columns = (TextColumn("{task.description} {task.completed}/{task.total}, {task.fields[tokens]} tokens"),)
    with Progress(*columns, console=Console(stderr=True), disable=not shows_bar, transient=True) as bar:
        task = bar.add_task("generating", total=len(prompts), tokens=0)
        return engine.generate(
            prompts,
            on_progress=lambda done, tokens: bar.update(task, completed=done, tokens=tokens),
            on_round=_trace_writer() if trace else None,
            **options,
        )


def _print_results(results: Sequence[Generation] | Sequence[BeamSearchResult], as_json: bool) -> None:
    for result in results:
        typer.echo(json.dumps(asdict(result), ensure_ascii=False) if as_json else result.text)


def _trace_writer() -> Callable[[RoundTrace], None]:
    from cluster.router.trace import format_trace

    number = itertools.count(1)
    return lambda trace: typer.echo(format_trace(trace, next(number)), err=True)


def check_sampling_options(sampling: dict[str, Any]) -> None:
    """Before a model is loaded. Raises InvalidRequest that names the option."""
    try:
        generation_options(**sampling)
    except InvalidRequest as error:
        raise InvalidRequest(f"--{error.field.replace('_', '-')}", error.value, error.limit) from None


def _prompts(prompt: str | None, file: Path | None, prediction: str) -> tuple[list[Any], list[str]]:
    """Prompts and, for each, what its answer will probably be or an empty text."""
    if (prompt is None) == (file is None):
        raise InvalidRequest("--prompt", prompt, "give either --prompt or --prompts-file")
    if prompt is not None:
        return [_utf8("--prompt", prompt)], [_utf8("--prediction", prediction)]
    assert file is not None
    if prediction:
        raise InvalidRequest("--prediction", prediction[:60], "with --prompts-file each row has its own")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also breaks inside texts
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("--prompts-file", str(file), f"it cannot be read: {error}") from None
    rows = [_read_row(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidRequest("--prompts-file", str(file), "it must have at least one row")
    return [row[0] for row in rows], [row[1] for row in rows]


def _utf8(option: str, given: str) -> str:
    """Python keeps the bytes of a command line that it cannot decode as lone surrogates."""
    try:
        return given.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(option, given[:60], f"it must be UTF-8: {error.reason}") from None


def _read_row(file: Path, number: int, line: str) -> tuple[Any, str]:
    where = f"--prompts-file {file}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(where, line[:60], f"not valid JSON: {error}") from None
    keys = [key for key in ("prompt", "messages", "prompt_token_ids") if isinstance(row, dict) and key in row]
    if len(keys) != 1:
        raise InvalidRequest(where, line[:60], "a row needs exactly one of prompt, messages, prompt_token_ids")
    value = row[keys[0]]
    if keys[0] == "prompt":
        valid = is_text(value)
    elif keys[0] == "messages":
        valid = isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)
    else:
        valid = isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
    if not valid:
        kinds = {"prompt": "a text", "messages": "messages with role and content", "prompt_token_ids": "integers"}
        raise InvalidRequest(f"{where} {keys[0]}", str(value)[:60], f"it must hold {kinds[keys[0]]}, at least one")
    prediction = row.get("prediction") or ""
    if not is_text(prediction, may_be_empty=True):
        raise InvalidRequest(f"{where} prediction", str(prediction)[:60], "it must be a text")
    return value, prediction


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and is_text(message.get("role"), may_be_empty=True)
        and is_text(message.get("content"), may_be_empty=True)
    )
