"""Draft models made from their own target: its first layers, a readout over its most used tokens, a distillation.

A target's first layers know its tokens and contexts; what they lack is a way out. The readout begins as the target's
own output layer behind the linear map that best carries the early hidden state to the last one (the "tuned lens",
Belrose et al. 2023), then layers and readout learn the target's distribution on text that the target wrote
(Hinton et al. 2015). A small output vocabulary makes each draft step cheap (Zhao et al. 2025, FR-Spec). A build takes
minutes; a training is the same with more text and time, and goes on where it was interrupted.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from actors.errors import ModelError
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import choose_device, load_model, load_tokenizer, read_model_info, refuse_encoder
from actors.models.quiet import quiet_transformers
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.training.target_text import Answer
from actors.training.target_writer import TargetWriter, Writing
from actors.training.training_checkpoint import TrainingCheckpoint, TrainingPaused, last_step

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class HasTokens(Protocol):
    """A prompt and its answer in one row, int64 [n]."""

    @property
    def token_ids(self) -> torch.Tensor: ...


_Text = TypeVar("_Text", bound=HasTokens)

CARD_FILE = "drafter.json"
_FINGERPRINT_DIGITS = 8  # in the name of a drafter's directory
_VOCAB_SIZE = 6144
_READOUT_TOKENS = 12_000  # answer tokens that the least squares see: many times the width of a state
_RIDGE = 0.01  # relative to the mean of the diagonal
CHAIN_LENGTH = 4  # draft tokens a round of the chain that a card tells of


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """What a drafter is made of and how long it is trained: amounts, no clock, so that a build can be repeated."""

    layers: int = 2
    vocab_size: int | None = None  # output rows; None: 6144, or all of a smaller target's
    text_tokens: int = 26_000  # answer tokens that the target writes for training, about
    answer_tokens: int = 160  # most of one answer
    write_rows: int = 320  # answers written at a time
    epochs: int = 3
    batch_tokens: int = 1024  # prompt and answer tokens of a batch, padding included
    learning_rate: float = 3e-3
    seed: int = 0


TRAINING_RECIPE = DrafterRecipe(text_tokens=128_000, epochs=6)  # for a training that may take its time


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What was built and how well it guesses. Saved as drafter.json beside the weights."""

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
    """A drafter is at the directory already."""


def default_drafter_dir(home: Path, source: ModelSource) -> Path:
    """Where the drafter of these very weights is looked for; a directory there is complete.

    Other weights of the same name, be it another directory or a model saved anew, have another one.
    """
    fingerprint = source.weights_fingerprint()[:_FINGERPRINT_DIGITS]
    return home / "drafters" / f"{source.name.replace('/', '--')}-{fingerprint}"


def resolve_draft_model(spec: str, target: ModelSource, home: Path, progress: Progress = silent) -> ModelSource | None:
    """The draft model that `spec` means for a target: "auto" is the drafter built for it, if there is one, and "none"
    no draft model; everything else as `resolve_model`. Raises ModelError."""
    if spec == "none":
        return None
    if spec != "auto":
        return resolve_model(spec, home, progress)
    directory = default_drafter_dir(home, target)
    return resolve_model(str(directory), home, progress) if directory.is_dir() else None


def build_drafter(
    source: ModelSource,
    out: Path,
    recipe: DrafterRecipe | None = None,
    prompts: Sequence[str] | None = None,
    evaluate: Mapping[str, Sequence[str]] | None = None,
    device: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
    resumable: bool = False,
    steps: int | None = None,
    keeps: bool = False,
) -> DrafterCard:
    """Make a draft model for `source` and put it at `out`, whole or not at all.

    `prompts` replace the built-in ones. `evaluate` names further sets of prompts to measure agreement on.
    `progress` is called with (stage, done, total). Reproducible on one machine with one number of torch threads.
    resumable: keep checkpoints beside `out`, and go on from the last one of the same target, recipe and prompts; then
    steps: of the distillation at most so many in this run, None: all. keeps: leave what another process has put at
    `out` while this one waited for it. Raises ModelError, TrainingPaused where steps are left, and DrafterExists.
    """
    import torch

    recipe = recipe or DrafterRecipe()
    report = progress or (lambda stage, done, total: None)
    started = time.monotonic()
    refuse_encoder(source, "a drafter built from its first layers")
    info = read_model_info(source)
    vocab_size = min(_VOCAB_SIZE, info.vocab_size) if recipe.vocab_size is None else recipe.vocab_size
    recipe = replace(recipe, vocab_size=vocab_size)
    _check(recipe, info.num_layers, info.vocab_size)
    device = choose_device(device)
    tokenizer = load_tokenizer(source)
    target = load_model(source, fast_dtype(device), device)
    key = json.dumps([info.weights_fingerprint, asdict(recipe), list(prompts) if prompts is not None else None])
    with directory_lock(out), torch.random.fork_rng():
        if keeps and out.is_dir():
            raise DrafterExists(out)
        torch.manual_seed(recipe.seed)
        notes = TrainingCheckpoint(out, key) if resumable else None
        writer = TargetWriter(
            target,
            tokenizer,
            eos_token_ids=info.eos_token_ids,
            max_len=info.max_model_len,
            answer_tokens=recipe.answer_tokens,
            rows=recipe.write_rows,
            seed=recipe.seed,
        )
        if notes is not None and (saved := notes.read("text")):
            writing = Writing.from_state(saved)
        else:
            held_out, training = writer.split(prompts)
            writing = writer.write(training, recipe.text_tokens, held_out, report)
            if notes is not None:
                notes.write("text", writing.state())
        texts, tests = writing.answers, {"held out": writing.held_out}
        for name, asked in (evaluate or {}).items():
            tests[name] = writer.answer(asked)
        token_ids = frequent_tokens(writing.vocab_mass, vocab_size)
        draft = _first_layers(source, target, recipe.layers).to(device)
        trainer = _Trainer(draft=draft, target=target, token_ids=token_ids, recipe=recipe, device=device)
        del target, writer
        trainer.fit_readout(texts, report)
        before = trainer.agreement(tests["held out"])
        trainer.distil(texts, report, notes, steps)
        scores = {name: trainer.agreement(answers) for name, answers in tests.items()}
        agreement = scores.pop("held out")
        card = DrafterCard(
            target=source.name,
            target_fingerprint=info.weights_fingerprint,
            recipe=asdict(recipe),
            text_tokens=sum(answer.num_answer_tokens for answer in texts),
            agreement=round(agreement.share, 4),
            agreement_before=round(before.share, 4),
            coverage=round(agreement.coverage, 4),
            tokens_per_round=round(agreement.tokens_per_round, 3),
            evaluation={name: round(score.share, 4) for name, score in scores.items()},
            seconds=round(time.monotonic() - started, 1),
        )
        with staged_directory(out) as staging:
            trainer.save(staging)
            with quiet_transformers():
                tokenizer.save_pretrained(staging)
            (staging / CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")
        if notes is not None:
            notes.remove()
    return card


def _check(recipe: DrafterRecipe, layers: int, vocab_size: int) -> None:
    limits = {
        "layers": (1, layers),
        "vocab_size": (1, vocab_size),
        "text_tokens": (1, 10**9),
        "answer_tokens": (1, 10**5),
        "write_rows": (1, 10**4),
        "epochs": (0, 10**4),
        "batch_tokens": (1, 10**7),
    }
    for name, (low, high) in limits.items():
        value = getattr(recipe, name)
        if not low <= value <= high:
            raise ModelError(f"drafter {name} is {value}; it must be between {low} and {high}")
    check_learning_rate("drafter", recipe.learning_rate)


def check_learning_rate(of: str, value: float) -> None:
    """Raises ModelError."""
    if not 0 < value < math.inf:
        raise ModelError(f"{of} learning_rate is {value}; it must be above 0, and finite")


def check_weights(of: str, weights: Iterable[torch.Tensor], learning_rate: float) -> None:
    """Raises ModelError where a training has diverged, before its weights take the place of others."""
    if not all(bool(tensor.isfinite().all()) for tensor in weights if tensor.is_floating_point()):
        raise ModelError(f"the training of the {of} has diverged; its learning_rate is {learning_rate}")


def fast_dtype(device: str) -> str:
    """bfloat16 where the hardware multiplies it, else float32: only text is written in it, and soft labels."""
    import torch

    if device != "cpu":
        return "bfloat16"
    native = any(getattr(torch.cpu, test, bool)() for test in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bfloat16" if native else "float32"


def frequent_tokens(mass: torch.Tensor, count: int) -> torch.Tensor:
    """The most probable tokens, ascending; beyond what the text tells, low ids, as tokenizers number by frequency."""
    import torch

    prior = 1.0 / torch.arange(10, 10 + len(mass))
    score = mass / mass.sum() + 1e-3 * prior / prior.sum()
    return score.topk(count).indices.sort().values


def _first_layers(source: ModelSource, target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy of the target, cut off after `layers`, with an output layer of its own. float32."""
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
    return draft.eval()  # no dropout, in the distillation neither


@dataclass(frozen=True, slots=True)
class _Agreement:
    share: float  # share of tokens at which draft and target choose the same
    coverage: float  # share of tokens that the draft can say at all
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
    """The draft model, its readout over the reduced vocabulary, and the target's output rows for the same tokens."""

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel,
        token_ids: torch.Tensor,
        recipe: DrafterRecipe,
        device: str,
    ) -> None:
        import torch

        self._draft = draft
        self._recipe = recipe
        self._device = device
        self._autocast = fast_dtype(device) == "bfloat16"
        self._token_ids = token_ids.to(device)
        head = draft.get_output_embeddings()
        self._rows = head.weight.detach()[self._token_ids].clone()  # the target's
        self._bias = None if head.bias is None else head.bias.detach()[self._token_ids].clone()
        self._column = torch.full((head.weight.shape[0],), -1, device=device)
        self._column[self._token_ids] = torch.arange(len(token_ids), device=device)
        self._readout = torch.nn.Parameter(self._rows.clone())

    def fit_readout(self, answers: Sequence[Answer], report: Callable[[str, int, int], None]) -> None:
        """Ridge regression from the draft's last hidden state to the target's, then out by the target's rows."""
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
            # Pulled towards the identity, for both states live in one residual stream.
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
        report: Callable[[str, int, int], None],
        notes: TrainingCheckpoint | None = None,
        steps: int | None = None,
    ) -> None:
        """Cross entropy with the target's distribution over the reduced vocabulary, layers and readout together.

        The steps that are left, at most `steps` of them. Which batch comes when is a matter of the seed, so a
        checkpoint needs only the step, the weights and the optimiser.
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
        first = 0
        if notes is not None and (saved := notes.read("step")):
            for parameter, value in zip(parameters, saved["parameters"], strict=True):
                parameter.data.copy_(value)
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["step"]
        total = len(schedule)
        end = last_step(first, total, steps)
        for step in range(first, end):
            report("distilling", step, total)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_share(step, total)
            with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
                state, wanted, _ = self._states(schedule[step])
                guess = torch.nn.functional.linear(state, self._readout, self._bias).float()
                with torch.no_grad():
                    label = torch.nn.functional.linear(wanted, self._rows, self._bias).float().softmax(-1)
            loss = torch.nn.functional.cross_entropy(guess, label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if notes is not None and (notes.is_due(step + 1) or step + 1 == end):
                weights = [parameter.detach() for parameter in parameters]
                notes.write("step", {"parameters": weights, "optimizer": optimizer.state_dict(), "step": step + 1})
        if end < total:
            raise TrainingPaused(end, total)
        report("distilling", total, total)
        for parameter in parameters:
            parameter.requires_grad_(False)

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
        for row, answer in enumerate(answers):  # right padding is never looked at by a causal model
            ids[row, : len(answer.token_ids) - 1] = answer.token_ids[:-1]
        rows = torch.cat([torch.full((a.num_answer_tokens,), row) for row, a in enumerate(answers)])
        columns = torch.cat([torch.arange(a.num_answer_tokens) + a.num_prompt_tokens - 1 for a in answers])
        state = self._draft.get_decoder()(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        wanted = torch.cat([answer.hidden for answer in answers]).float()
        argmax = torch.cat([answer.argmax for answer in answers])
        return state[rows, columns], wanted.to(self._device), argmax.to(self._device)


def _some(answers: Sequence[Answer], tokens: int) -> list[Answer]:
    """As many of the first answers as have `tokens` tokens together."""
    before = accumulate((answer.num_answer_tokens for answer in answers), initial=0)
    return [answer for answer, count in zip(answers, before, strict=False) if count < tokens]


def batches_of(answers: Sequence[_Text], max_tokens: int) -> list[list[_Text]]:
    """Answers of similar length together, at most `max_tokens` with padding (or one answer)."""
    batches: list[list[_Text]] = []
    for answer in sorted(answers, key=lambda answer: len(answer.token_ids)):
        if batches and (len(batches[-1]) + 1) * len(answer.token_ids) <= max_tokens:
            batches[-1].append(answer)
        else:
            batches.append([answer])
    return batches


def learning_rate_share(step: int, total: int) -> float:
    """Linear warm-up over 20 steps, then a cosine down to 3 %."""
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / max(1, total))))
