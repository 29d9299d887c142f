"""Trains an EAGLE-3 head for a target on text that the target writes itself.

EAGLE-3's "training-time test" (Li et al. 2025, arXiv:2503.01840): the head is unrolled for some steps on its own
outputs, as it will be when it drafts, and at every step learns the target's distribution over the draft vocabulary,
soft labels, later steps with less weight. Nothing asks its outputs to look like the target's features.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from actors.eagle.eagle_head import EagleHead
from actors.engine.feature_tap import FeatureTap
from actors.errors import ModelError
from actors.models.loader import choose_device, load_model, load_tokenizer, read_model_info, refuse_encoder
from actors.models.source import ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.training.drafter_build import (
    batches_of,
    check_learning_rate,
    check_weights,
    fast_dtype,
    frequent_tokens,
    learning_rate_share,
)
from actors.training.eagle_recipe import HeadRecipe
from actors.training.target_writer import TargetWriter
from actors.training.training_checkpoint import TrainingCheckpoint, TrainingPaused, last_step

HEAD_CARD_FILE = "eagle.json"
_VOCAB_SIZE = 6144
_LATER_STEP_WEIGHT = 0.8
_MASKED = -1e9

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What was trained and how well it guesses. Saved as eagle.json beside the weights."""

    target: str
    target_fingerprint: str
    recipe: dict[str, Any]
    text_tokens: int
    steps: int
    acceptance: list[float]  # held out, by depth: share of greedy tokens that a chain's next guess hits
    tokens_per_round: float  # that a greedy chain as long as `acceptance` would give
    coverage: float  # share of held-out greedy tokens that are in the draft vocabulary
    seconds: float  # duration of the last run


def default_head_dir(home: Path, source: ModelSource) -> Path:
    return home / "eagle" / f"{source.name.replace('/', '--')}-{source.weights_fingerprint()[:8]}"


def train_head(
    source: ModelSource,
    out: Path,
    recipe: HeadRecipe | None = None,
    prompts: Sequence[str] | None = None,
    device: str = "auto",
    progress: Report | None = None,
    steps: int | None = None,
) -> HeadCard:
    """Train an EAGLE-3 head for `source` and put it at `out` in the published format, whole or not at all.

    A training that was interrupted goes on from its last checkpoint, beside `out`, when called with the same target,
    recipe and prompts. `prompts` replace the built-in ones; progress is called with (stage, done, total). steps: at
    most so many in this run, None: all. Raises ModelError, and TrainingPaused where steps are left.
    """
    recipe = recipe or HeadRecipe()
    report = progress or (lambda stage, done, total: None)
    started = time.monotonic()
    refuse_encoder(source, "an EAGLE head")
    info = read_model_info(source)
    vocab_size = min(_VOCAB_SIZE, info.vocab_size) if recipe.vocab_size is None else recipe.vocab_size
    _check(recipe, vocab_size, info.vocab_size)
    device = choose_device(device)
    target = load_model(source, fast_dtype(device), device)
    layers = target.config.get_text_config().num_hidden_layers
    if layers < 3:
        raise ModelError(f"model {source.spec!r} has {layers} layers; EAGLE-3 reads the inputs of three")
    key = json.dumps([info.weights_fingerprint, asdict(recipe), list(prompts) if prompts is not None else None])
    with directory_lock(out), torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        notes = TrainingCheckpoint(out, key)
        text = notes.read("text")
        if text is None:
            text = _write_text(
                source,
                target,
                eos_token_ids=info.eos_token_ids,
                recipe=recipe,
                prompts=prompts,
                vocab_size=vocab_size,
                report=report,
            )
            notes.write("text", text)
        trainer = _Trainer(target, text["draft_ids"].to(device), recipe, device)
        trainer.train(_answers(text, "training"), notes, report, steps)
        acceptance, coverage = trainer.acceptance(_answers(text, "held_out"))
        card = HeadCard(
            target=source.name,
            target_fingerprint=info.weights_fingerprint,
            recipe=asdict(recipe),
            text_tokens=sum(text["training_counts"].tolist()),
            steps=trainer.step,
            acceptance=[round(share, 4) for share in acceptance],
            tokens_per_round=round(1.0 + sum(math.prod(acceptance[: i + 1]) for i in range(len(acceptance))), 3),
            coverage=round(coverage, 4),
            seconds=round(time.monotonic() - started, 1),
        )
        with staged_directory(out) as staging:
            trainer.save(staging)
            (staging / HEAD_CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")
        notes.remove()
    return card


def _check(recipe: HeadRecipe, vocab_size: int, target_vocab_size: int) -> None:
    limits = {
        "vocab_size": (vocab_size, 1, target_vocab_size),
        "text_tokens": (recipe.text_tokens, 1, 10**9),
        "answer_tokens": (recipe.answer_tokens, 2, 10**5),
        "write_rows": (recipe.write_rows, 1, 10**4),
        "epochs": (recipe.epochs, 1, 10**4),
        "unroll": (recipe.unroll, 1, 32),
        "batch_tokens": (recipe.batch_tokens, 1, 10**7),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ModelError(f"head {name} is {value}; it must be between {low} and {high}")
    check_learning_rate("head", recipe.learning_rate)


def _write_text(
    source: ModelSource,
    target: PreTrainedModel,
    eos_token_ids: tuple[int, ...],
    recipe: HeadRecipe,
    prompts: Sequence[str] | None,
    vocab_size: int,
    report: Report,
) -> dict[str, Tensor]:
    """Training and held-out answers, flat, and the tokens that get a column."""
    max_len = read_model_info(source).max_model_len
    tokenizer = load_tokenizer(source)
    writer = TargetWriter(
        target,
        tokenizer,
        eos_token_ids=eos_token_ids,
        max_len=max_len,
        answer_tokens=recipe.answer_tokens,
        rows=recipe.write_rows,
        seed=recipe.seed,
    )
    asked, others = writer.split(prompts)
    writing = writer.write(others, recipe.text_tokens, asked, report)
    text = {"draft_ids": frequent_tokens(writing.vocab_mass, vocab_size)}
    for name, answers in (("training", writing.answers), ("held_out", writing.held_out)):
        text[f"{name}_tokens"] = torch.cat([answer.token_ids for answer in answers])
        text[f"{name}_lengths"] = torch.tensor([len(answer.token_ids) for answer in answers])
        text[f"{name}_counts"] = torch.tensor([answer.num_answer_tokens for answer in answers])
    return text


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt and the target's answer."""

    token_ids: Tensor  # int64 [n]
    num_prompt_tokens: int


def _answers(text: dict[str, Tensor], name: str) -> list[_Text]:
    parts = text[f"{name}_tokens"].split(text[f"{name}_lengths"].tolist())
    counts = text[f"{name}_counts"].tolist()
    return [_Text(part, len(part) - count) for part, count in zip(parts, counts, strict=True)]


class _UnrolledKeys:
    """Keys and values of the steps so far, in the place of a cache: each step's rows see them all."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def unrolled_mask(length: int, step: int, device: str = "cpu") -> Tensor:
    """What row t of step `step` sees, additive float32 [1, 1, length, (step + 1) * length].

    Its text is known up to t - step; behind that lie one row of each later step, as in a draft: of step j the row of
    position t - step + j. Rows that would begin before the text see themselves only.
    """
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None, :]
    sight = [columns <= rows - step]
    sight += [(columns == rows - step + j) & (rows >= step) for j in range(1, step + 1)]
    if step:
        sight[-1] = columns == rows
    mask = torch.full((length, (step + 1) * length), _MASKED, device=device)
    return mask.masked_fill(torch.cat(sight, dim=1), 0.0)[None, None]


class _Trainer:
    def __init__(self, target: PreTrainedModel, draft_ids: Tensor, recipe: HeadRecipe, device: str) -> None:
        config = target.config.get_text_config()
        self._target = target
        self._recipe = recipe
        self._device = device
        self._draft_ids = draft_ids
        self._column = torch.full((config.vocab_size,), -1, device=device)
        self._column[draft_ids] = torch.arange(len(draft_ids), device=device)
        heads = config.num_attention_heads
        self._shape = {
            "hidden_size": config.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or 10_000.0),
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(draft_ids),
            "max_position_embeddings": config.max_position_embeddings,
        }
        head_config = LlamaConfig.from_dict(dict(self._shape))
        head_config._attn_implementation = "sdpa"
        self.head = EagleHead(head_config, "eagle3", config.num_hidden_layers, len(draft_ids)).to(device)
        assert self.head.lm_head is not None
        output = target.get_output_embeddings()
        self.head.lm_head.weight.data.copy_(output.weight[draft_ids].float())
        self._tap = FeatureTap(target, self.head.feature_layers)
        self.step = 0

    def train(
        self, texts: Sequence[_Text], notes: TrainingCheckpoint, report: Report, steps: int | None = None
    ) -> None:
        """The steps that are left, at most `steps` of them. Which batch comes when is a matter of the seed, so a
        checkpoint needs only the step, the weights and the optimiser."""
        recipe = self._recipe
        parameters = list(self.head.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        batches = batches_of(texts, recipe.batch_tokens)
        total = len(batches) * recipe.epochs
        if saved := notes.read("step"):
            self.head.load_state_dict(saved["head"])
            optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]
        order: list[int] = []
        end = last_step(self.step, total, steps)
        while self.step < end:
            epoch, index = divmod(self.step, len(batches))
            if not order or index == 0:
                order = random.Random(recipe.seed + epoch).sample(range(len(batches)), len(batches))
            report("training the head", self.step, total)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * learning_rate_share(self.step, total)
            loss = self.loss(batches[order[index]])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            self.step += 1
            if notes.is_due(self.step) or self.step == end:
                state = {"head": self.head.state_dict(), "optimizer": optimizer.state_dict(), "step": self.step}
                notes.write("step", state)
        if end < total:
            raise TrainingPaused(end, total)
        report("training the head", total, total)

    def loss(self, texts: Sequence[_Text]) -> Tensor:
        """Soft cross-entropy over the draft vocabulary, the steps weighted 1, 0.8, 0.64, ..."""
        guesses, labels, best, counts = self._unroll(texts)
        counts &= self._column[best] >= 0  # else the labels tell of what the target does not want
        total = sum(guess.sum() for guess in guesses) * 0.0  # has a gradient even where no row counts
        for step, guess in enumerate(guesses):
            rows = _without_first(counts, step)
            if bool(rows.any()):
                loss = torch.nn.functional.cross_entropy(guess[rows], labels[rows].softmax(-1))
                total = total + _LATER_STEP_WEIGHT**step * loss
        return total

    def acceptance(self, texts: Sequence[_Text]) -> tuple[list[float], float]:
        """By depth the share of the target's greedy tokens that the head's best guess hits, given that all before it
        did; and the share that its vocabulary has."""
        right = [0] * self._recipe.unroll
        tried = [0] * self._recipe.unroll
        known = count = 0
        with torch.inference_mode():
            for batch in batches_of(texts, 4096):
                guesses, _, best, counts = self._unroll(batch)
                known += int((self._column[best] >= 0)[counts].sum())
                count += int(counts.sum())
                for step, guess in enumerate(guesses):
                    rows = _without_first(counts, step)
                    tried[step] += int(rows.sum())
                    right[step] += int((self._draft_ids[guess.argmax(-1)] == best)[rows].sum())
        return [hits / max(1, tries) for hits, tries in zip(right, tried, strict=True)], known / max(1, count)

    def save(self, directory: Path) -> None:
        """The published format: config.json and safetensors in bfloat16, d2t and t2d with the vocabulary."""
        from safetensors.torch import save_file

        tensors = {
            name.replace("layer.", "midlayer.", 1) if name.startswith("layer.") else name: value.detach()
            for name, value in self.head.state_dict().items()
        }
        tensors = {name: value.to(device="cpu", dtype=torch.bfloat16).contiguous() for name, value in tensors.items()}
        check_weights("head", tensors.values(), self._recipe.learning_rate)
        ids = self._draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(self._shape["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
        save_file(tensors, directory / "model.safetensors")
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **self._shape}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _unroll(self, texts: Sequence[_Text]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Logits of every step [B, T, Vd]; the target's for the same guesses, [B, T, Vd]; its choices, int64 [B, T];
        which rows count, bool [B, T]. Row t, which knows the tokens up to t + 1, guesses token t + 2."""
        width = max(len(text.token_ids) for text in texts)
        ids = torch.zeros((len(texts), width), dtype=torch.int64)
        counts = torch.zeros((len(texts), width - 1), dtype=torch.bool)
        for row, text in enumerate(texts):  # right padding is never looked at by causal rows
            ids[row, : len(text.token_ids)] = text.token_ids
            counts[row, max(0, text.num_prompt_tokens - 2) : len(text.token_ids) - 1] = True
        ids, counts = ids.to(self._device), counts.to(self._device)
        output_layer = self._target.get_output_embeddings()
        with torch.no_grad():
            self._tap.open()
            last = self._target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            features = self._tap.take(ids.numel()).reshape(len(texts), width, -1)[:, :-1].float().clone()
            logits = output_layer(last[:, 1:])
            labels, best = logits[..., self._draft_ids].float(), logits.argmax(-1)
            del logits
            embeddings = self._target.get_input_embeddings()(ids[:, 1:]).float().clone()
        positions = torch.arange(width - 1, device=self._device)[None].expand(len(texts), -1)
        keys = _UnrolledKeys()
        guesses = []
        is_fast = fast_dtype(self._device) == "bfloat16"
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16, enabled=is_fast):
            hidden = self.head.fc(features)
            for step in range(self._recipe.unroll):
                mask = unrolled_mask(width - 1, step, self._device).to(hidden.dtype)
                hidden = self.head(embeddings, hidden, positions, attention_mask=mask, past_key_values=keys)
                guesses.append(self.head.logits(hidden, output_layer).float())
                # What it said of position t stands in for the feature of position t + 1.
                hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return guesses, labels, best, counts


def _without_first(counts: Tensor, step: int) -> Tensor:
    """At a later step the first rows have no earlier output to go on from."""
    rows = counts.clone()
    rows[:, :step] = False
    return rows
