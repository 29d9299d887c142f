"""`paceline generate`: the engine in one process, without Ray."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from actors.errors import InvalidRequest
from cluster.cli.engine import EngineOptions, SamplingOptions, local_engine
from cluster.cli.shared_options import with_options
from cluster.errors import ConfigError
from cluster.generation import GenerationOptions, changed
from cluster.text.documents import PROMPT_KEYS, content_of
from cluster.validation import is_text

if TYPE_CHECKING:
    from cluster.offline.engine import LocalEngine
    from cluster.offline.results import BeamSearchResult, Generation
    from cluster.router.trace import RoundTrace


@with_options
def generate(
    *,
    prompt: str = typer.Option(None, help="One prompt."),
    prompts_file: Path = typer.Option(
        None,
        help='JSONL with {"prompt": ...}, {"messages": ...} or {"prompt_token_ids": ...} a row, and perhaps a '
        '"prediction".',
    ),
    prediction: str = typer.Option("", help="What will probably come out of --prompt, as when known text is edited."),
    sampling: SamplingOptions,
    engine_options: EngineOptions,
    beams: int = typer.Option(1, min=1, max=64, help="Above 1: beam search with so many beams, without drafts."),
    length_penalty: float = typer.Option(
        1.0, min=-10.0, max=10.0, help="Of --beams: scores are divided by the number of tokens to its power."
    ),
    batch_size: int = typer.Option(8, min=1, max=1024),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on past the end of sequence."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a prompt."),
    trace: bool = typer.Option(False, "--trace", help="A line on stderr a round: who proposed what, and times."),
) -> None:
    """Generate text for a prompt or a file of prompts."""
    options = changed(sampling.checked(), {"seed": sampling.seed or 0, "ignore_eos": ignore_eos})
    prompts, predictions = _prompts(prompt, prompts_file, prediction)
    _check_beams(beams, sampling.temperature, length_penalty)
    if beams == 1:
        engine = local_engine(engine_options, batch_size)
        _print_results(_generated(engine, prompts, predictions, options, trace=trace), as_json)
        return
    plain = replace(engine_options, draft_model="none", eagle_head="none", drafter="none", corpus=[], drafter_option=[])
    found = local_engine(plain, batch_size).beam_search(
        prompts,
        num_beams=beams,
        length_penalty=length_penalty,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=ignore_eos,
    )
    _print_results(found, as_json)


def _check_beams(beams: int, temperature: float, length_penalty: float) -> None:
    if beams > 1 and temperature > 0:
        raise InvalidRequest("--temperature", temperature, f"with --beams {beams} it must be 0: beams are not sampled")
    if beams == 1 and length_penalty != 1.0:
        raise InvalidRequest("--length-penalty", length_penalty, "it belongs to beam search: --beams must be above 1")


def _generated(
    engine: LocalEngine, prompts: list[Any], predictions: list[str], options: GenerationOptions, *, trace: bool
) -> list[Generation]:
    """Under a progress bar on a terminal, or with a line a round."""
    shows_bar = sys.stderr.isatty() and not trace
    columns = (TextColumn("{task.description} {task.completed}/{task.total}, {task.fields[tokens]} tokens"),)
    with Progress(*columns, console=Console(stderr=True), disable=not shows_bar, transient=True) as bar:
        task = bar.add_task("generating", total=len(prompts), tokens=0)
        return engine.generate(
            prompts,
            options,
            predictions=predictions,
            on_progress=lambda done, tokens: bar.update(task, completed=done, tokens=tokens),
            on_round=_trace_writer() if trace else None,
        )


def _print_results(results: Sequence[Generation] | Sequence[BeamSearchResult], as_json: bool) -> None:
    for result in results:
        typer.echo(json.dumps(asdict(result), ensure_ascii=False) if as_json else result.text)


def _trace_writer() -> Callable[[RoundTrace], None]:
    from cluster.router.trace import format_trace

    number = itertools.count(1)
    return lambda trace: typer.echo(format_trace(trace, next(number)), err=True)


def _prompts(prompt: str | None, file: Path | None, prediction: str) -> tuple[list[Any], list[str]]:
    """Prompts and, for each, what its answer will probably be or an empty text."""
    if (prompt is None) == (file is None):
        raise ConfigError("give either --prompt or --prompts-file")
    if prompt is not None:
        return [_utf8("--prompt", prompt)], [_utf8("--prediction", prediction)]
    assert file is not None
    if prediction:
        raise InvalidRequest("--prediction", prediction[:60], "with --prompts-file each row has its own")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also breaks inside texts
    except OSError as error:
        raise InvalidRequest("--prompts-file", str(file), f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest("--prompts-file", str(file), f"it must be UTF-8: {error.reason}") from None
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
    try:
        _, value = content_of(row, PROMPT_KEYS)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    prediction = row.get("prediction") or ""
    if not is_text(prediction, may_be_empty=True):
        raise InvalidRequest(f"{where} prediction", str(prediction)[:60], "it must be a text")
    return value, prediction
