"""`paceline drafter`: draft models and heads made for a target."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

import typer

from actors.models.catalog import resolve_model
from actors.models.drafter_build import DrafterRecipe, build_drafter, default_drafter_dir
from actors.models.eagle_recipe import HeadRecipe
from actors.models.seed_prompts import read_prompts
from cluster.cli.progress import progress_bars
from cluster.config import paceline_home

app = typer.Typer(no_args_is_help=True, help="Make draft models and heads.")
_DEFAULT = DrafterRecipe()
_HEAD = HeadRecipe()


class HeadKind(StrEnum):
    eagle3 = "eagle3"


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
    with progress_bars() as progress:
        source = resolve_model(target, home, progress)
        directory = out if out is not None else default_drafter_dir(home, source)
        card = build_drafter(source, directory, recipe, questions, tests, device, progress)
    typer.echo(
        f"agrees with {card.target} on {card.agreement:.1%} of held-out tokens "
        f"({card.agreement_before:.1%} before distillation), {card.seconds:.0f} s",
        err=True,
    )
    for name, agreement in card.evaluation.items():
        typer.echo(f"agrees with {card.target} on {agreement:.1%} of tokens for {name}", err=True)
    typer.echo(directory)


@app.command()
def train(
    kind: HeadKind = typer.Option(HeadKind.eagle3, help="What to train: a head that runs beside the target."),
    target: str = typer.Option("smollm2", help="The model to draft for: name, directory, .gguf file or hub id."),
    out: Path | None = typer.Option(None, help="Directory to write; by default eagle/ in $PACELINE_HOME."),
    vocab: int | None = typer.Option(
        None, help="Tokens that the head can say; by default 6144, or all that a smaller target has."
    ),
    tokens: int = typer.Option(_HEAD.text_tokens, help="Tokens of text that the target writes for training."),
    epochs: int = typer.Option(_HEAD.epochs, help="Passes over that text."),
    unroll: int = typer.Option(_HEAD.unroll, help="Steps that the head is trained to go on from its own outputs."),
    learning_rate: float = typer.Option(_HEAD.learning_rate, help="Of AdamW, at its highest."),
    seed: int = typer.Option(_HEAD.seed, help="The same seed gives the same head on the same machine."),
    prompts: Path | None = typer.Option(None, help="JSON lines with your own prompts, in place of the built-in ones."),
    threads: int = typer.Option(0, min=0, help="CPU threads; 0: all cores."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
) -> None:
    """Train an EAGLE-3 head on text that the target writes, for --eagle-head, and print its directory.

    Interrupted, it goes on from its last checkpoint when called again with the same options.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    questions = read_prompts(prompts) if prompts is not None else None
    recipe = HeadRecipe(
        vocab_size=vocab, text_tokens=tokens, epochs=epochs, unroll=unroll, learning_rate=learning_rate, seed=seed
    )

    import torch

    from actors.models.eagle_train import default_head_dir, train_head

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    home = paceline_home()
    with progress_bars() as progress:
        source = resolve_model(target, home, progress)
        directory = out if out is not None else default_head_dir(home, source)
        card = train_head(source, directory, recipe, questions, device, progress)
    depths = ", ".join(f"{share:.1%}" for share in card.acceptance)
    typer.echo(
        f"held-out acceptance by depth {depths}: {card.tokens_per_round:.2f} tokens a round, {card.seconds:.0f} s",
        err=True,
    )
    typer.echo(directory)
