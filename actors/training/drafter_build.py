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
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, choose_device, load_model, load_tokenizer, read_model_info, refuse_encoder
from actors.models.quiet import quiet_transformers
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.options import Dtype
from actors.training.recipes import DrafterRecipe, check_recipe, output_vocab_size
from actors.training.target_text import Answer
from actors.training.target_writer import TargetWriter, Writing
from actors.training.training_checkpoint import TrainingCheckpoint
from actors.training.training_loop import Report, batches_of, run_steps

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CARD_FILE = "drafter.json"
_READOUT_TOKENS = 12_000  # answer tokens for the least squares: many times the hidden size
_RIDGE = 0.01  # relative to the mean of the diagonal
CHAIN_LENGTH = 4  # draft tokens of a round, for `tokens_per_round` in the card


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What was built and how well it predicts the target. Saved as drafter.json beside the weights."""

    target: str
    target_fingerprint: str
    recipe: dict[str, Any]
    text_tokens: int  # written and trained on
    agreement: float  # share of held-out greedy tokens where drafter and target choose the same
    agreement_before: float  # the same before the distillation
    coverage: float  # share of held-out greedy tokens that are in the output vocabulary
    tokens_per_round: float  # held out, drafted greedily in chains of CHAIN_LENGTH tokens
    evaluation: dict[str, float]  # agreement on other prompts, where some were given
    seconds: float


class DrafterExists(Exception):
    """The directory already holds a drafter."""


def default_drafter_dir(home: Path, source: ModelSource) -> Path:
    """Directory of the drafter for exactly these weights. If it exists, it is complete."""
    return home / "drafters" / source.directory_name


def resolve_draft_model(spec: str, target: ModelSource, home: Path, progress: Progress = silent) -> ModelSource | None:
    """The draft model that `spec` means for a target, or None.

    "none" is no draft model, "auto" the drafter built for the target, if there is one. Other specs are those of
    `resolve_model`. Raises ModelError.
    """
    if spec == "none":
        return None
    if spec != "auto":
        return resolve_model(spec, home, progress)
    directory = default_drafter_dir(home, target)
    return resolve_model(str(directory), home, progress) if directory.is_dir() else None


@dataclass(frozen=True, slots=True)
class BuildRun:
    """How one run of a build goes."""

    resumable: bool = False  # keep checkpoints beside the drafter, and resume from the last one
    steps: int | None = None  # limit of distillation steps in this run, if resumable; None: all
    keeps: bool = False  # keep a drafter that another process has put there meanwhile


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
        draft = _first_layers(source, target, recipe.layers).to(device)
        trainer = _Trainer(draft, frequent_tokens(writing.vocab_mass, output_vocab_size(recipe, info)), recipe, device)
        del target, writer  # frees the target's memory
        trainer.fit_readout(writing.answers, report)
        before = trainer.agreement(writing.held_out)
        trainer.distil(writing.answers, report, checkpoint, run.steps)
        agreement = trainer.agreement(writing.held_out)
        card = DrafterCard(
            target=source.name,
            target_fingerprint=info.weights_fingerprint,
            recipe=asdict(recipe),
            text_tokens=sum(answer.num_answer_tokens for answer in writing.answers),
            agreement=round(agreement.share, 4),
            agreement_before=round(before.share, 4),
            coverage=round(agreement.coverage, 4),
            tokens_per_round=round(agreement.tokens_per_round, 3),
            evaluation={name: round(trainer.agreement(answers).share, 4) for name, answers in evaluations.items()},
            seconds=round(time.monotonic() - started, 1),
        )
        _save(trainer, tokenizer, card, out)
        if checkpoint is not None:
            checkpoint.remove()
    return card


def _checked(recipe: DrafterRecipe, info: ModelInfo) -> DrafterRecipe:
    """The recipe with its vocabulary size. Raises ModelError."""
    recipe = replace(recipe, vocab_size=output_vocab_size(recipe, info))
    limits = {"layers": (1, info.num_layers), "vocab_size": (1, info.vocab_size)}
    check_recipe("drafter", recipe, {**limits, "answer_tokens": (1, 10**5), "epochs": (0, 10**4)})
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


def _save(trainer: _Trainer, tokenizer: PreTrainedTokenizerBase, card: DrafterCard, out: Path) -> None:
    with staged_directory(out) as staging:
        trainer.save(staging)
        with quiet_transformers():
            tokenizer.save_pretrained(staging)
        (staging / CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def check_weights(of: str, weights: Iterable[torch.Tensor], learning_rate: float) -> None:
    """Raises ModelError when weights are not finite, so that a diverged training replaces nothing."""
    if not all(bool(tensor.isfinite().all()) for tensor in weights if tensor.is_floating_point()):
        raise ModelError(f"the training of the {of} has diverged; its learning_rate is {learning_rate}")


def fast_dtype(device: str) -> Dtype:
    """bfloat16 where the hardware multiplies it, else float32. Used for writing text and soft labels only."""
    import torch

    if device != "cpu":
        return "bfloat16"
    native = any(getattr(torch.cpu, test, bool)() for test in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bfloat16" if native else "float32"


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


@dataclass(frozen=True, slots=True)
class _Agreement:
    share: float  # share of tokens at which draft and target choose the same
    coverage: float  # share of tokens in the draft's vocabulary
    tokens_per_round: float


def tokens_per_round(hits: Sequence[Sequence[bool]], length: int) -> float:
    """Tokens a round with chains of `length` greedy drafts. hits: for each answer, which tokens the draft guesses.

    Exact, not an estimate: a chain equals the target's own tokens as far as it is accepted.
    """
    rounds = tokens = 0
    for answer in hits:
        done = 0
        while done < len(answer):
            drafted = answer[done : done + length]
            done += next((index for index, hit in enumerate(drafted) if not hit), len(drafted)) + 1
            rounds += 1
        tokens += len(answer)
    return tokens / rounds if rounds else 1.0


class _Trainer:
    """Fits and distils a draft model and its readout, the output rows of the reduced vocabulary."""

    def __init__(self, draft: PreTrainedModel, token_ids: torch.Tensor, recipe: DrafterRecipe, device: str) -> None:
        import torch

        self._draft = draft
        self._recipe = recipe
        self._device = device
        self._autocast = fast_dtype(device) == "bfloat16"
        self._token_ids = token_ids.to(device)
        head = draft.get_output_embeddings()
        self._rows = head.weight.detach()[self._token_ids].clone()  # the target's output rows
        self._bias = None if head.bias is None else head.bias.detach()[self._token_ids].clone()
        self._column = torch.full((head.weight.shape[0],), -1, device=device)
        self._column[self._token_ids] = torch.arange(len(token_ids), device=device)
        self._readout = torch.nn.Parameter(self._rows.clone())

    def fit_readout(self, answers: Sequence[Answer], report: Report) -> None:
        """Ridge regression from the draft's last hidden state to the target's, followed by the target's output rows."""
        import torch

        size = self._rows.shape[1]
        gram = torch.zeros((size, size), device=self._device)
        cross = torch.zeros((size, size), device=self._device)
        batches = batches_of(_some(answers, _READOUT_TOKENS), 4096)
        with torch.inference_mode():
            for done, batch in enumerate(batches):
                report("fitting the readout", done, len(batches))
                state, wanted, _ = self._states(batch)
                gram += state.T @ state
                cross += state.T @ wanted
            # The ridge pulls towards the identity, because both states are of one residual stream.
            pull = torch.eye(size, device=self._device) * (_RIDGE * gram.diagonal().mean())
            gram += pull
            cross += pull
            lens = torch.linalg.solve(gram, cross).T
            fitted = self._rows @ lens
        report("fitting the readout", len(batches), len(batches))
        self._readout = torch.nn.Parameter(fitted.clone())

    def distil(
        self,
        answers: Sequence[Answer],
        report: Report,
        checkpoint: TrainingCheckpoint | None = None,
        most_steps: int | None = None,
    ) -> None:
        """Minimise the cross entropy with the target's distribution over the reduced vocabulary.

        Layers and readout are trained together. Raises TrainingPaused if steps are left after `most_steps`.
        """
        import torch

        recipe = self._recipe
        embeddings = {id(p) for p in self._draft.get_input_embeddings().parameters()}
        layers = [p for p in self._draft.get_decoder().parameters() if id(p) not in embeddings]
        parameters = [*layers, self._readout]
        self._draft.requires_grad_(False)  # a gradient of the embeddings costs as much as all the others together
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        batches = batches_of(answers, recipe.batch_tokens)
        order = random.Random(recipe.seed)
        schedule: list[list[Answer]] = []
        for _ in range(recipe.epochs):
            order.shuffle(batches)
            schedule += batches
        run_steps(
            schedule, self._loss, optimizer, stage="distilling", report=report, checkpoint=checkpoint, most=most_steps
        )
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _loss(self, answers: Sequence[Answer]) -> torch.Tensor:
        import torch

        with torch.autocast(self._device.partition(":")[0], torch.bfloat16, enabled=self._autocast):
            state, wanted, _ = self._states(answers)
            guess = torch.nn.functional.linear(state, self._readout, self._bias).float()
            with torch.no_grad():
                label = torch.nn.functional.linear(wanted, self._rows, self._bias).float().softmax(-1)
        return torch.nn.functional.cross_entropy(guess, label)

    def agreement(self, answers: Sequence[Answer]) -> _Agreement:
        """How often the draft's greedy choice at a token of the answers is the target's."""
        import torch

        hits: list[list[bool]] = []
        known = 0
        with torch.inference_mode():
            for batch in batches_of(answers, 4096):
                state, _, argmax = self._states(batch)
                guess = self._token_ids[torch.nn.functional.linear(state, self._readout, self._bias).argmax(-1)]
                known += int((self._column[argmax] >= 0).sum())
                counts = [answer.num_answer_tokens for answer in batch]
                hits += [part.tolist() for part in (guess == argmax).split(counts)]
        count = max(1, sum(map(len, hits)))
        return _Agreement(sum(map(sum, hits)) / count, known / count, tokens_per_round(hits, CHAIN_LENGTH))

    def save(self, directory: Path) -> None:
        """A normal model directory in bfloat16, the readout in its rows of the output layer, and the map beside it."""
        import torch
        from safetensors.torch import save_file

        self._draft.get_output_embeddings().weight.data[self._token_ids] = self._readout.detach()
        check_weights("drafter", self._draft.state_dict().values(), self._recipe.learning_rate)
        with quiet_transformers():
            self._draft.to(device="cpu", dtype=torch.bfloat16).save_pretrained(directory)
        save_file({"token_ids": self._token_ids.cpu().to(torch.int32)}, directory / VOCAB_MAP_FILE)

    def _states(self, answers: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The draft's and the target's hidden state before every answer token [n, H], and the target's choice [n]."""
        import torch

        width = max(len(answer.token_ids) for answer in answers) - 1
        ids = torch.zeros((len(answers), width), dtype=torch.int64)
        for row, answer in enumerate(answers):  # a causal model never sees right padding
            ids[row, : len(answer.token_ids) - 1] = answer.token_ids[:-1]
        rows = torch.cat([torch.full((a.num_answer_tokens,), row) for row, a in enumerate(answers)])
        columns = torch.cat([torch.arange(a.num_answer_tokens) + a.num_prompt_tokens - 1 for a in answers])
        state = self._draft.get_decoder()(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        wanted = torch.cat([answer.hidden for answer in answers]).float()
        argmax = torch.cat([answer.argmax for answer in answers])
        return state[rows, columns], wanted.to(self._device), argmax.to(self._device)


def _some(answers: Sequence[Answer], tokens: int) -> list[Answer]:
    """The first answers, as many as it takes to have `tokens` answer tokens together."""
    before = accumulate((answer.num_answer_tokens for answer in answers), initial=0)
    return [answer for answer, count in zip(answers, before, strict=False) if count < tokens]
