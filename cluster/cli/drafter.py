"""`paceline drafter`: draft models and heads made for a target."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from actors.errors import InvalidRequest
from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.source import ModelSource
from actors.training.drafter_build import (
    BuildRun,
    DrafterExists,
    build_drafter,
    default_drafter_dir,
)
from actors.training.drafter_card import DrafterCard
from actors.training.recipes import (
    MAX_PARALLEL,
    PARALLEL_RECIPE,
    PARALLEL_TRAINING_RECIPE,
    TRAINING_RECIPE,
    DrafterRecipe,
    HeadRecipe,
)
from actors.training.seed_prompts import read_prompts
from actors.training.shipped_drafter import pack_drafter, shipped_weights, unpack_drafter
from cluster.cli.progress import progress_bars, progress_in_file

app = typer.Typer(no_args_is_help=True, help="Make draft models and heads.")
_DEFAULT = DrafterRecipe()
_HEAD = HeadRecipe()

TargetOption = Annotated[
    str, typer.Option(help="The model to draft for: name, directory, .gguf file or Hugging Face id.")
]
VocabOption = Annotated[
    int | None,
    typer.Option(help="Tokens in the drafter's vocabulary; by default 6144, or all that a smaller target has."),
]
PromptsOption = Annotated[
    Path | None, typer.Option(help="JSON lines with your own prompts, in place of the built-in ones.")
]
ThreadsOption = Annotated[int, typer.Option(min=0, max=256, help="CPU threads; 0: all cores.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same result on the same machine.")]


ParallelOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=MAX_PARALLEL,
        help=f"With --kind parallel: tokens that one forward guesses; by default {PARALLEL_RECIPE.parallel}.",
    ),
]


def _defaults(name: str) -> str:
    return f"{getattr(_HEAD, name)} for a head, {getattr(TRAINING_RECIPE, name)} for a model"


@app.command()
def build(
    target: TargetOption = "smollm2",
    kind: Literal["model", "parallel"] | None = typer.Option(
        None,
        help="model: guesses one token a forward, the default; parallel: guesses all tokens of a draft in one (PARD). "
        "Without options, a drafter that comes with Paceline is taken as it is.",
    ),
    out: Path | None = typer.Option(None, help="Directory to write; by default where `paceline serve` looks."),
    layers: int | None = typer.Option(
        None,
        help=f"Layers of the target to begin with; by default {_DEFAULT.layers}, or {PARALLEL_RECIPE.layers} with "
        "--kind parallel.",
    ),
    parallel: ParallelOption = None,
    vocab: VocabOption = None,
    tokens: int = typer.Option(_DEFAULT.text_tokens, help="Tokens of text that the target writes for training."),
    epochs: int = typer.Option(_DEFAULT.epochs, help="Passes over that text."),
    seed: SeedOption = _DEFAULT.seed,
    prompts: PromptsOption = None,
    evaluate: Path | None = typer.Option(
        None, help="JSON lines with prompts to measure agreement on, not to train on."
    ),
    threads: ThreadsOption = 0,
    device: DeviceOption = "auto",
    keep: bool = typer.Option(False, "--keep", help="Leave a drafter that is there already."),
    progress_file: Path | None = typer.Option(None, hidden=True, help="Keep the progress there, in place of bars."),
) -> None:
    """Make a small draft model out of the target itself, in a few minutes on a CPU, and print its directory."""
    questions = read_prompts(prompts) if prompts is not None else None
    tests = {evaluate.stem: read_prompts(evaluate)} if evaluate is not None else {}
    _check_kind_options(kind or "model", parallel=parallel)
    recipe = PARALLEL_RECIPE if kind == "parallel" else _DEFAULT
    recipe = replace(recipe, vocab_size=vocab, text_tokens=tokens, epochs=epochs, seed=seed)
    recipe = replace(recipe, layers=layers or recipe.layers, parallel=parallel or recipe.parallel)
    takes_shipped = kind is None and recipe == _DEFAULT and questions is None and not tests
    _set_threads(threads)
    home = paceline_home()
    with progress_bars() if progress_file is None else progress_in_file(progress_file) as progress:
        source = resolve_model(target, home, progress)
        directory = out if out is not None else default_drafter_dir(home, source)
        packed = shipped_weights(source) if takes_shipped else None
        if packed is not None:
            unpack_drafter(packed, source, directory, keeps=keep)
            typer.echo(directory)
            return
        try:
            card = build_drafter(
                source,
                directory,
                recipe,
                prompts=questions,
                evaluate=tests,
                device=device,
                progress=progress,
                run=BuildRun(keeps=keep),
            )
        except DrafterExists:
            typer.echo(directory)
            return
    typer.echo(
        f"agrees with {card.target} on {card.agreement:.1%} of held-out tokens "
        f"({card.agreement_before:.1%} before distillation), {_rounds(card)}, {card.seconds:.0f} s",
        err=True,
    )
    for name, agreement in card.evaluation.items():
        typer.echo(f"agrees with {card.target} on {agreement:.1%} of tokens for {name}", err=True)
    typer.echo(directory)


@app.command()
def train(
    kind: Literal["eagle3", "model", "parallel"] = typer.Option(
        "eagle3",
        help="eagle3: a head that runs beside the target; model: a draft model; parallel: one that guesses all tokens "
        "of a draft in one forward (PARD).",
    ),
    target: TargetOption = "smollm2",
    out: Path | None = typer.Option(
        None, help="Directory to write; by default eagle/ in $PACELINE_HOME, or where `paceline serve` looks."
    ),
    layers: int | None = typer.Option(
        None,
        help=f"Of a model: layers of the target to begin with; by default {TRAINING_RECIPE.layers}, or "
        f"{PARALLEL_TRAINING_RECIPE.layers} with --kind parallel.",
    ),
    parallel: ParallelOption = None,
    vocab: VocabOption = None,
    tokens: int | None = typer.Option(
        None, help=f"Tokens of text that the target writes for training; by default {_defaults('text_tokens')}."
    ),
    epochs: int | None = typer.Option(None, help=f"Passes over that text; by default {_defaults('epochs')}."),
    unroll: int | None = typer.Option(
        None, help=f"With --kind eagle3: training steps on its own outputs; by default {_HEAD.unroll}."
    ),
    learning_rate: float | None = typer.Option(
        None, min=0.0, help=f"Peak learning rate of AdamW; by default {_defaults('learning_rate')}."
    ),
    seed: SeedOption = _HEAD.seed,
    prompts: PromptsOption = None,
    steps: int | None = typer.Option(
        None, min=1, help="Most training steps of this run; the same command goes on with the rest."
    ),
    threads: ThreadsOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Train an EAGLE-3 head, for --eagle-head, or a draft model on text that the target writes; print its directory.

    Interrupted, it goes on from its last checkpoint when called again with the same options.
    """
    _check_kind_options(kind, unroll=unroll, layers=layers, parallel=parallel)
    questions = read_prompts(prompts) if prompts is not None else None
    recipe: dict[str, Any] = {"vocab_size": vocab, "text_tokens": tokens, "epochs": epochs}
    recipe |= {"learning_rate": learning_rate, "seed": seed, "layers": layers, "unroll": unroll}
    recipe |= {"parallel": parallel}
    recipe = {name: value for name, value in recipe.items() if value is not None}
    _set_threads(threads)

    from actors.training.training_checkpoint import TrainingPaused

    if kind == "eagle3":
        run = _train_head
    else:
        run = partial(_train_model, TRAINING_RECIPE if kind == "model" else PARALLEL_TRAINING_RECIPE)
    try:
        with progress_bars() as progress:
            source = resolve_model(target, paceline_home(), progress)
            directory, figures = run(
                source, out, recipe, questions=questions, device=device, progress=progress, steps=steps
            )
    except TrainingPaused as pause:
        typer.echo(f"{pause.step} of {pause.total} steps are done; the same command goes on from there", err=True)
        return
    typer.echo(f"held-out acceptance {figures}", err=True)
    typer.echo(directory)


@app.command()
def pack(
    directory: Path = typer.Argument(help="A parallel draft model, by `paceline drafter train --kind parallel`."),
    out: Path = typer.Argument(help="File to write: what its target does not have, in int8."),
) -> None:
    """Write a draft model as Paceline ships that of its demo."""
    pack_drafter(directory, out)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def _check_kind_options(
    kind: str, *, unroll: int | None = None, layers: int | None = None, parallel: int | None = None
) -> None:
    """Raises InvalidRequest for an option of another kind."""
    if unroll is not None and kind != "eagle3":
        raise InvalidRequest("--unroll", unroll, "it belongs to --kind eagle3")
    if layers is not None and kind == "eagle3":
        raise InvalidRequest("--layers", layers, "it belongs to --kind model and parallel")
    if parallel is not None and kind != "parallel":
        raise InvalidRequest("--parallel", parallel, "it belongs to --kind parallel")


def _rounds(card: DrafterCard) -> str:
    text = f"{card.tokens_per_round:.2f} tokens a round in chains of {card.chain_length}"
    if card.agreement_by_depth:
        text += f" (by depth: {', '.join(f'{share:.1%}' for share in card.agreement_by_depth)})"
    return text


def _set_threads(threads: int) -> None:
    # OpenMP threads must not spin while they wait. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def _train_head(
    source: ModelSource, out: Path | None, recipe: dict[str, Any], *, questions: list[str] | None, **run: Any
) -> tuple[Path, str]:
    """Returns the directory and the measured acceptance as text."""
    from actors.training.eagle_train import default_head_dir, train_head

    directory = out if out is not None else default_head_dir(paceline_home(), source)
    card = train_head(source, directory, replace(_HEAD, **recipe), questions, **run)
    depths = ", ".join(f"{depth}: {share:.1%}" for depth, share in enumerate(card.acceptance, 1))
    return directory, (
        f"by depth, of guesses with a right text before them: {depths}; "
        f"{card.tokens_per_round:.2f} tokens a round in chains of {len(card.acceptance)}, {card.seconds:.0f} s"
    )


def _train_model(
    default: DrafterRecipe,
    source: ModelSource,
    out: Path | None,
    recipe: dict[str, Any],
    *,
    questions: list[str] | None,
    steps: int | None,
    **options: Any,
) -> tuple[Path, str]:
    """Returns the directory and the measured acceptance as text."""
    directory = out if out is not None else default_drafter_dir(paceline_home(), source)
    how = BuildRun(resumable=True, steps=steps)
    card = build_drafter(source, directory, replace(default, **recipe), prompts=questions, run=how, **options)
    return directory, (
        f"{card.agreement:.1%} ({card.agreement_before:.1%} before distillation): {_rounds(card)}, {card.seconds:.0f} s"
    )
