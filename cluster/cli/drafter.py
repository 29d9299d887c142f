"""`paceline drafter`: draft models and heads made for a target."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from actors.errors import InvalidRequest
from actors.models.catalog import resolve_model
from actors.training.drafter_build import (
    CHAIN_LENGTH,
    TRAINING_RECIPE,
    DrafterExists,
    DrafterRecipe,
    build_drafter,
    default_drafter_dir,
)
from actors.training.eagle_recipe import HeadRecipe
from actors.training.seed_prompts import read_prompts
from cluster.cli.progress import progress_bars, progress_in_file
from cluster.config import paceline_home

app = typer.Typer(no_args_is_help=True, help="Make draft models and heads.")
_DEFAULT = DrafterRecipe()
_HEAD = HeadRecipe()


class Kind(StrEnum):
    eagle3 = "eagle3"
    model = "model"


@app.callback()
def _group() -> None:
    pass


@app.command()
def build(
    target: str = typer.Option("smollm2", help="The model to draft for: name, directory, .gguf file or hub id."),
    out: Path | None = typer.Option(None, help="Directory to write; by default where `paceline serve` looks."),
    layers: int = typer.Option(_DEFAULT.layers, help="Layers of the target to begin with."),
    vocab: int | None = typer.Option(
        None, help="Tokens that the drafter can say; by default 6144, or all that a smaller target has."
    ),
    tokens: int = typer.Option(_DEFAULT.text_tokens, help="Tokens of text that the target writes for training."),
    epochs: int = typer.Option(_DEFAULT.epochs, help="Passes over that text."),
    seed: int = typer.Option(_DEFAULT.seed, help="The same seed gives the same drafter on the same machine."),
    prompts: Path | None = typer.Option(None, help="JSON lines with your own prompts, in place of the built-in ones."),
    evaluate: Path | None = typer.Option(
        None, help="JSON lines with prompts to measure agreement on, not to train on."
    ),
    threads: int = typer.Option(0, min=0, help="CPU threads; 0: all cores."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    keep: bool = typer.Option(False, "--keep", help="Leave a drafter that is there already."),
    progress_file: Path | None = typer.Option(None, hidden=True, help="Keep the progress there, in place of bars."),
) -> None:
    """Make a small draft model out of the target itself, in a few minutes on a CPU, and print its directory."""
    # Threads that wait for work must not keep the core from the one that has it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    questions = read_prompts(prompts) if prompts is not None else None
    tests = {evaluate.stem: read_prompts(evaluate)} if evaluate is not None else {}
    recipe = DrafterRecipe(layers=layers, vocab_size=vocab, text_tokens=tokens, epochs=epochs, seed=seed)

    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    home = paceline_home()
    with progress_bars() if progress_file is None else progress_in_file(progress_file) as progress:
        source = resolve_model(target, home, progress)
        directory = out if out is not None else default_drafter_dir(home, source)
        try:
            card = build_drafter(source, directory, recipe, questions, tests, device, progress, keeps=keep)
        except DrafterExists:
            typer.echo(directory)
            return
    typer.echo(
        f"agrees with {card.target} on {card.agreement:.1%} of held-out tokens "
        f"({card.agreement_before:.1%} before distillation), {card.tokens_per_round:.2f} tokens a round in chains of "
        f"{CHAIN_LENGTH}, {card.seconds:.0f} s",
        err=True,
    )
    for name, agreement in card.evaluation.items():
        typer.echo(f"agrees with {card.target} on {agreement:.1%} of tokens for {name}", err=True)
    typer.echo(directory)


@app.command()
def train(
    kind: Kind = typer.Option(Kind.eagle3, help="eagle3: a head that runs beside the target; model: a draft model."),
    target: str = typer.Option("smollm2", help="The model to draft for: name, directory, .gguf file or hub id."),
    out: Path | None = typer.Option(
        None, help="Directory to write; by default eagle/ in $PACELINE_HOME, or where `paceline serve` looks."
    ),
    layers: int | None = typer.Option(
        None, help=f"Of --kind model: layers of the target to begin with; by default {TRAINING_RECIPE.layers}."
    ),
    vocab: int | None = typer.Option(
        None, help="Tokens that it can say; by default 6144, or all that a smaller target has."
    ),
    tokens: int | None = typer.Option(
        None,
        help="Tokens of text that the target writes for training; "
        f"by default {_HEAD.text_tokens} for a head, {TRAINING_RECIPE.text_tokens} for a model.",
    ),
    epochs: int | None = typer.Option(
        None, help=f"Passes over that text; by default {_HEAD.epochs} for a head, {TRAINING_RECIPE.epochs} for a model."
    ),
    unroll: int | None = typer.Option(
        None, help=f"Of --kind eagle3: steps that it learns to go on from its own outputs; by default {_HEAD.unroll}."
    ),
    learning_rate: float | None = typer.Option(
        None,
        min=0.0,
        help="Of AdamW, at its highest; "
        f"by default {_HEAD.learning_rate} for a head, {TRAINING_RECIPE.learning_rate} for a model.",
    ),
    seed: int = typer.Option(_HEAD.seed, help="The same seed gives the same result on the same machine."),
    prompts: Path | None = typer.Option(None, help="JSON lines with your own prompts, in place of the built-in ones."),
    steps: int | None = typer.Option(
        None, min=1, help="Most training steps of this run; the same command goes on with the rest."
    ),
    threads: int = typer.Option(0, min=0, help="CPU threads; 0: all cores."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
) -> None:
    """Train an EAGLE-3 head, for --eagle-head, or a draft model on text that the target writes; print its directory.

    Interrupted, it goes on from its last checkpoint when called again with the same options.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if kind is Kind.model and unroll is not None:
        raise InvalidRequest("--unroll", unroll, f"it belongs to --kind {Kind.eagle3}")
    if kind is Kind.eagle3 and layers is not None:
        raise InvalidRequest("--layers", layers, f"it belongs to --kind {Kind.model}")
    questions = read_prompts(prompts) if prompts is not None else None
    wanted: dict[str, Any] = {"vocab_size": vocab, "text_tokens": tokens, "epochs": epochs}
    wanted |= {"learning_rate": learning_rate, "seed": seed, "layers": layers, "unroll": unroll}
    given = {name: value for name, value in wanted.items() if value is not None}

    import torch

    from actors.training.training_checkpoint import TrainingPaused

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    home = paceline_home()
    try:
        with progress_bars() as progress:
            source = resolve_model(target, home, progress)
            if kind is Kind.eagle3:
                from actors.training.eagle_train import default_head_dir, train_head

                directory = out if out is not None else default_head_dir(home, source)
                head = train_head(source, directory, replace(_HEAD, **given), questions, device, progress, steps)
                shares = head.acceptance
                depths = ", ".join(f"{depth}: {share:.1%}" for depth, share in enumerate(shares, 1))
                figures = (
                    f"by depth, of guesses with a right text before them: {depths}; "
                    f"{head.tokens_per_round:.2f} tokens a round in chains of {len(shares)}, {head.seconds:.0f} s"
                )
            else:
                directory = out if out is not None else default_drafter_dir(home, source)
                recipe = replace(TRAINING_RECIPE, **given)
                model = build_drafter(
                    source, directory, recipe, questions, None, device, progress, resumable=True, steps=steps
                )
                figures = (
                    f"{model.agreement:.1%} ({model.agreement_before:.1%} before distillation): "
                    f"{model.tokens_per_round:.2f} tokens a round in chains of {CHAIN_LENGTH}, {model.seconds:.0f} s"
                )
    except TrainingPaused as pause:
        typer.echo(f"{pause.step} of {pause.total} steps are done; the same command goes on from there", err=True)
        return
    typer.echo(f"held-out acceptance {figures}", err=True)
    typer.echo(directory)
