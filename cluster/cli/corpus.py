"""`paceline corpus`: indexes of text that the drafter `retrieval` drafts from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import typer

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import load_tokenizer, read_model_info
from cache_service.automata.corpus_index import CorpusIndex, open_index
from cache_service.errors import CorpusError
from cluster.cli.engine import SamplingOptions
from cluster.cli.progress import progress_bars
from cluster.errors import ConfigError
from cluster.generation import GenerationOptions
from cluster.offline.corpus import build_corpus
from cluster.text.documents import PROMPT_KEYS, Tokens, file_size, read_documents, read_rows

app = typer.Typer(no_args_is_help=True, help="Index text to draft from.")


@app.command()
def build(
    files: list[Path] = typer.Argument(
        None,
        help="Text files, a document each; or JSON lines (.jsonl) with text, prompt, messages, prompt_token_ids or "
        "token_ids, a document a row.",
        show_default=False,
    ),
    out: Path = typer.Option(..., help="Directory to write; an index that is there is replaced."),
    target: str = typer.Option(
        "smollm2", help="The model to draft for: name, directory, .gguf file or Hugging Face id."
    ),
    from_responses: Path = typer.Option(
        None,
        help="JSON lines with prompt, messages or prompt_token_ids: the target answers them, and prompts with "
        "answers are indexed.",
    ),
    max_new_tokens: int = typer.Option(256, help="Tokens of an answer."),
    temperature: float = typer.Option(0.0, help="Sampling temperature of answers, 0 to 2; 0: the likeliest token."),
    top_p: float = typer.Option(1.0, help="Nucleus sampling of answers, above 0, up to 1; 1: off."),
    seed: int = typer.Option(0, help="Answer i is sampled with seed + i."),
    batch_size: int = typer.Option(8, min=1, max=1024, help="Prompts answered together."),
    device: str = typer.Option("auto", help="Where answers are computed: auto, cpu, cuda, cuda:N."),
) -> None:
    """Index documents, in the target's tokens, and print the directory. No match crosses a document's border."""
    if not files and from_responses is None:
        raise ConfigError("give files to index, or --from-responses")
    for file in files or []:
        file_size(file)  # raises for what cannot be read; the model may take a while to prepare
    options = SamplingOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed).checked()
    prompts = [value for _, _, value in read_rows(from_responses, PROMPT_KEYS)] if from_responses is not None else []
    if from_responses is not None and not prompts:
        raise ConfigError(f"--from-responses {from_responses}: it must have at least one row")
    begin = time.monotonic()
    with progress_bars() as progress:
        source = resolve_model(target, paceline_home(), progress)
        info = read_model_info(source)
        documents = read_documents(files or [], load_tokenizer(source), info.vocab_size, progress)
        if prompts:
            engine_options = {"batch_size": batch_size, "device": device, "progress": progress}
            documents = chain(documents, _responses(target, prompts, options, engine_options))
        index = build_corpus(documents, info, out, progress)
    typer.echo(f"{_described(index)}, {time.monotonic() - begin:.0f} s", err=True)
    typer.echo(out)


@app.command()
def info(directory: Path = typer.Argument(help="Directory that `paceline corpus build` has written.")) -> None:
    """Check an index and print what it holds, one line."""
    try:
        index = open_index(directory)
    except CorpusError as error:
        raise ConfigError(str(error)) from None
    typer.echo(f"{_described(index)}; target {index.header.target}, tokenizer {index.header.tokenizer_fingerprint}")


def _described(index: CorpusIndex) -> str:
    header, size = index.header, index.automaton.memory_bytes
    return (
        f"{header.num_documents} documents, {header.num_tokens} tokens, {size / 2**20:.1f} MiB "
        f"({size / header.num_tokens:.1f} bytes a token)"
    )


def _responses(
    target: str, prompts: list[object], options: GenerationOptions, engine_options: dict[str, Any]
) -> Iterator[tuple[Tokens, bool]]:
    """The target's answers: one document for each prompt with its answer."""
    import numpy as np

    from cluster.offline.engine import LocalEngine

    engine, progress = LocalEngine(target, **engine_options), engine_options["progress"]
    generations = engine.generate(
        prompts,  # type: ignore[arg-type]  # rows have been checked
        options,
        on_progress=lambda done, tokens: progress("answering", done, len(prompts)),
    )
    for generation in generations:
        yield np.array([*generation.prompt_token_ids, *generation.token_ids], np.int32), True
