"""Draft models made from their own target: its first layers and a readout over its most used tokens, distilled.

A target's first layers represent tokens and contexts; they lack an output layer. The readout starts as the target's
own output layer behind the linear map that best carries the early hidden state to the last one (the "tuned lens",
Belrose et al. 2023), then layers and readout learn the target's distribution on text that the target wrote
(Hinton et al. 2015). A small output vocabulary makes each draft step cheap (Zhao et al. 2025, FR-Spec). A build takes
minutes; a training uses more text and time, and resumes where it was interrupted.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ModelError
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, choose_device, load_model, load_tokenizer, read_model_info, refuse_encoder
from actors.models.quiet import quiet_transformers
from actors.models.source import ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.training.drafter_card import CARD_FILE, DrafterCard
from actors.training.drafter_trainer import DrafterTrainer
from actors.training.parallel_trainer import ParallelTrainer
from actors.training.recipes import MAX_PARALLEL, DrafterRecipe, check_recipe, output_vocab_size
from actors.training.shipped_drafter import shipped_weights, unpack_drafter
from actors.training.target_writer import TargetWriter, Writing
from actors.training.training_checkpoint import TrainingCheckpoint
from actors.training.training_loop import Report, fast_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class DrafterExists(Exception):
    """The directory already holds a drafter."""


def default_drafter_dir(home: Path, source: ModelSource) -> Path:
    """Directory of the drafter for exactly these weights. If it exists, it is complete."""
    return home / "drafters" / source.directory_name


def ready_drafter(home: Path, target: ModelSource) -> Path | None:
    """The directory of the target's drafter; None where it must be built first. One that comes with the package is
    unpacked, where there is room for it: it is not needed to serve the target. Raises ModelError."""
    directory = default_drafter_dir(home, target)
    if not directory.is_dir() and (packed := shipped_weights(target)) is not None:
        try:
            unpack_drafter(packed, target, directory, keeps=True)
        except ModelError as error:
            logger.warning("the draft model that comes with Paceline could not be unpacked: %s", error)
    return directory if directory.is_dir() else None


def resolve_draft_model(spec: str, target: ModelSource, home: Path, progress: Progress = silent) -> ModelSource | None:
    """The draft model that `spec` means for a target, or None.

    "none" is no draft model, "auto" the drafter shipped or built for the target, if there is one. Other specs are those
    of `resolve_model`. Raises ModelError.
    """
    if spec == "none":
        return None
    if spec != "auto":
        return resolve_model(spec, home, progress)
    directory = ready_drafter(home, target)
    return None if directory is None else resolve_model(str(directory), home, progress)


@dataclass(frozen=True, slots=True)
class BuildRun:
    """Options of one run of a build."""

    resumable: bool = False  # keep checkpoints beside the drafter, and resume from the last one
    steps: int | None = None  # limit of distillation steps in this run, if resumable; None: all
    keeps: bool = False  # keep the drafter if another process has created it meanwhile


def build_drafter(
    source: ModelSource,
    out: Path,
    recipe: DrafterRecipe | None = None,
    *,
    prompts: Sequence[str] | None = None,
    evaluate: Mapping[str, Sequence[str]] | None = None,
    device: str = "auto",
    progress: Report | None = None,
    run: BuildRun = BuildRun(),
) -> DrafterCard:
    """Make a draft model for `source` and put it at `out`, whole or not at all.

    `prompts` replace the built-in ones. `evaluate` names further sets of prompts to measure agreement on.
    `progress` is called with (stage, done, total). Reproducible on one machine with one number of torch threads.
    Checkpoints are read only for the same target, recipe and prompts. Raises ModelError, TrainingPaused where steps
    are left, and DrafterExists for a drafter that `run.keeps`.
    """
    import torch

    started = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    refuse_encoder(source, "a drafter built from its first layers")
    info = read_model_info(source)
    recipe = _checked(recipe or DrafterRecipe(), info)
    device = choose_device(device)
    tokenizer = load_tokenizer(source)
    key = json.dumps([info.weights_fingerprint, asdict(recipe), list(prompts) if prompts is not None else None])
    target = load_model(source, fast_dtype(device), device)
    with directory_lock(out), torch.random.fork_rng():
        if run.keeps and out.is_dir():
            raise DrafterExists(out)
        torch.manual_seed(recipe.seed)
        checkpoint = TrainingCheckpoint(out, key) if run.resumable else None
        writer = TargetWriter(target, tokenizer, info, recipe)
        writing = _target_text(writer, prompts, recipe, checkpoint, report=report)
        evaluations = {name: writer.answer(asked) for name, asked in (evaluate or {}).items()}
        trainer = new_trainer(source, target, writing, recipe, device)
        del target, writer  # frees the target's memory
        trainer.fit_readout(writing.answers, report)
        before = trainer.agreement(writing.held_out)
        trainer.distil(writing.answers, report, checkpoint, run.steps)
        card = card_of(
            trainer,
            writing,
            info,
            agreement_before=before.share,
            evaluation={name: round(trainer.agreement(answers).share, 4) for name, answers in evaluations.items()},
            seconds=time.monotonic() - started,
        )
        save_drafter(trainer, tokenizer, card, out)
        if checkpoint is not None:
            checkpoint.remove()
    return card


def new_trainer(
    source: ModelSource, target: PreTrainedModel, writing: Writing, recipe: DrafterRecipe, device: str
) -> DrafterTrainer:
    """Raises ModelError. recipe: with its vocabulary size."""
    draft = _first_layers(source, target, recipe.layers).to(device)
    assert recipe.vocab_size is not None
    token_ids = frequent_tokens(writing.vocab_mass, recipe.vocab_size)
    kind = ParallelTrainer if recipe.parallel > 1 else DrafterTrainer
    return kind(draft, token_ids, recipe, device)


def card_of(
    trainer: DrafterTrainer,
    writing: Writing,
    info: ModelInfo,
    *,
    agreement_before: float,
    evaluation: dict[str, float],
    seconds: float,
) -> DrafterCard:
    """The card, with the agreement on held-out text. info: of the target."""
    agreement = trainer.agreement(writing.held_out)
    return DrafterCard(
        target=info.name,
        target_fingerprint=info.weights_fingerprint,
        recipe=asdict(trainer.recipe),
        text_tokens=sum(answer.num_answer_tokens for answer in writing.answers),
        agreement=round(agreement.share, 4),
        agreement_before=round(agreement_before, 4),
        coverage=round(agreement.coverage, 4),
        tokens_per_round=round(agreement.tokens_per_round, 3),
        chain_length=trainer.chain_length,
        agreement_by_depth=[round(share, 4) for share in agreement.by_depth],
        evaluation=evaluation,
        seconds=round(seconds, 1),
    )


def _checked(recipe: DrafterRecipe, info: ModelInfo) -> DrafterRecipe:
    """The recipe with its vocabulary size. Raises ModelError."""
    recipe = replace(recipe, vocab_size=output_vocab_size(recipe, info))
    limits = {"layers": (1, info.num_layers), "vocab_size": (1, info.vocab_size)}
    limits |= {"answer_tokens": (1, 10**5), "epochs": (0, 10**4), "parallel": (1, MAX_PARALLEL)}
    check_recipe("drafter", recipe, limits)
    if not 0.0 < recipe.retention <= 1.0:
        raise ModelError(f"drafter retention is {recipe.retention}; it must be above 0 and at most 1")
    if not 0.0 <= recipe.masks_from <= 1.0:
        raise ModelError(f"drafter masks_from is {recipe.masks_from}; it must be between 0 and 1")
    return recipe


def _target_text(
    writer: TargetWriter,
    prompts: Sequence[str] | None,
    recipe: DrafterRecipe,
    checkpoint: TrainingCheckpoint | None,
    *,
    report: Report,
) -> Writing:
    if checkpoint is not None and (saved := checkpoint.read("text")):
        return Writing.from_state(saved)
    held_out, training = writer.split(prompts)
    writing = writer.write(training, recipe.text_tokens, held_out, report)
    if checkpoint is not None:
        checkpoint.write("text", writing.state())
    return writing


def save_drafter(trainer: DrafterTrainer, tokenizer: PreTrainedTokenizerBase, card: DrafterCard, out: Path) -> None:
    """Write the model directory. Call it under `directory_lock`. Raises ModelError."""
    with staged_directory(out) as staging:
        trainer.save(staging)
        with quiet_transformers():
            tokenizer.save_pretrained(staging)
        (staging / CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def frequent_tokens(mass: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most probable token ids, ascending. A small prior favours low ids: tokenizers number by frequency."""
    import torch

    prior = 1.0 / torch.arange(10, 10 + len(mass))
    score = mass / mass.sum() + 1e-3 * prior / prior.sum()
    return score.topk(count).indices.sort().values


def _first_layers(source: ModelSource, target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A float32 copy of the target's first `layers` layers, with an output layer of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(target.config.get_text_config())
    config.num_hidden_layers = layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[:layers])
    with quiet_transformers():
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    wanted = draft.get_decoder().state_dict()
    given = target.get_decoder().state_dict()
    missing = [name for name in wanted if name not in given or given[name].shape != wanted[name].shape]
    if missing:
        raise ModelError(f"model {source.spec!r}: layers of {config.model_type} cannot be cut off ({missing[0]})")
    draft.get_decoder().load_state_dict({name: given[name].float().cpu() for name in wanted})
    head, original = draft.get_output_embeddings(), target.get_output_embeddings()
    head.weight.data.copy_(original.weight.float())
    if head.bias is not None:
        head.bias.data.copy_(original.bias.float())
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()  # no dropout, not even in the distillation
