"""Trains an EAGLE-3 head for a target on text that the target writes itself.

EAGLE-3's "training-time test" (Li et al. 2025, arXiv:2503.01840): the head is unrolled for some steps on its own
outputs, as in drafting, and learns the target's distribution over the draft vocabulary at every step. Later steps have
less weight. The loss does not compare its outputs with the target's features.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from actors.eagle.eagle_head import EagleHead
from actors.eagle.head_layout import HeadLayout
from actors.engine.feature_tap import FeatureTap
from actors.errors import ModelError
from actors.models.loader import choose_device, load_model, load_tokenizer, read_model_info, refuse_encoder
from actors.models.source import ModelSource
from actors.models.staging import directory_lock, staged_directory
from actors.training.drafter_build import frequent_tokens
from actors.training.recipes import HeadRecipe, check_recipe, output_vocab_size
from actors.training.target_text import Answer
from actors.training.target_writer import TargetWriter
from actors.training.training_checkpoint import TrainingCheckpoint
from actors.training.training_loop import Report, batches_of, check_weights, fast_dtype, run_steps

HEAD_CARD_FILE = "eagle.json"
_LATER_STEP_WEIGHT = 0.8
_MASKED = -1e9


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What was trained and how well it predicts the target. Saved as eagle.json beside the weights."""

    target: str
    target_fingerprint: str
    recipe: dict[str, Any]
    text_tokens: int
    steps: int
    acceptance: list[float]  # held out, by depth: share of greedy tokens that the chain predicts
    tokens_per_round: float  # that a greedy chain as long as `acceptance` would give
    coverage: float  # share of held-out greedy tokens that are in the draft vocabulary
    seconds: float  # duration of the last run


def default_head_dir(home: Path, source: ModelSource) -> Path:
    return home / "eagle" / source.directory_name


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

    `prompts` replace the built-in ones. `progress` is called with (stage, done, total). steps: limit for this run,
    None: all. An interrupted training resumes from its checkpoint beside `out` when called with the same target, recipe
    and prompts. Raises ModelError, and TrainingPaused if steps are left.
    """
    recipe = recipe or HeadRecipe()
    report = progress or (lambda stage, done, total: None)
    started = time.monotonic()
    refuse_encoder(source, "an EAGLE head")
    info = read_model_info(source)
    vocab_size = output_vocab_size(recipe, info)
    limits = {"vocab_size": (1, info.vocab_size), "answer_tokens": (2, 10**5), "epochs": (1, 10**4), "unroll": (1, 32)}
    check_recipe("head", replace(recipe, vocab_size=vocab_size), limits)
    device = choose_device(device)
    target = load_model(source, fast_dtype(device), device)
    layers = target.config.get_text_config().num_hidden_layers
    if layers < 3:
        raise ModelError(f"model {source.spec!r} has {layers} layers; EAGLE-3 reads the inputs of three")
    key = json.dumps([info.weights_fingerprint, asdict(recipe), list(prompts) if prompts is not None else None])
    with directory_lock(out), torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        checkpoint = TrainingCheckpoint(out, key)
        text = checkpoint.read("answers")
        if text is None:
            writer = TargetWriter(target, load_tokenizer(source), info, recipe)
            asked, others = writer.split(prompts)
            writing = writer.write(others, recipe.text_tokens, asked, report)
            text = {"draft_ids": frequent_tokens(writing.vocab_mass, vocab_size)}
            text |= {"training": _state(writing.answers), "held out": _state(writing.held_out)}
            checkpoint.write("answers", text)
        training, held_out = ([_Text(*one) for one in text[name]] for name in ("training", "held out"))
        trainer = _Trainer(target, text["draft_ids"].to(device), recipe, device)
        num_steps = trainer.train(training, checkpoint, report, steps)
        acceptance, coverage = trainer.acceptance(held_out)
        card = HeadCard(
            target=source.name,
            target_fingerprint=info.weights_fingerprint,
            recipe=asdict(recipe),
            text_tokens=sum(len(one.token_ids) - one.num_prompt_tokens for one in training),
            steps=num_steps,
            acceptance=[round(share, 4) for share in acceptance],
            tokens_per_round=round(1.0 + sum(accumulate(acceptance, mul)), 3),
            coverage=round(coverage, 4),
            seconds=round(time.monotonic() - started, 1),
        )
        with staged_directory(out) as staging:
            trainer.save(staging)
            (staging / HEAD_CARD_FILE).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")
        checkpoint.remove()
    return card


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt and the target's answer."""

    token_ids: Tensor  # int64 [n]
    num_prompt_tokens: int


def _state(answers: Sequence[Answer]) -> list[tuple[Tensor, int]]:
    return [(answer.token_ids, answer.num_prompt_tokens) for answer in answers]


class _UnrolledKeys:
    """In place of a cache: keys and values of all steps so far."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def unrolled_mask(length: int, step: int, device: str = "cpu") -> Tensor:
    """Attention mask of one unrolled step, additive float32 [1, 1, length, (step + 1) * length].

    Row t sees the text up to t - step and, of each step j up to its own, the row of position t - step + j, as in
    drafting. Rows that would start before the text see only themselves.
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
        self.head = EagleHead(HeadLayout.eagle3(head_config, config.num_hidden_layers, len(draft_ids))).to(device)
        assert self.head.lm_head is not None
        output = target.get_output_embeddings()
        self.head.lm_head.weight.data.copy_(output.weight[draft_ids].float())
        self._tap = FeatureTap(target, self.head.feature_layers)

    def train(
        self, texts: Sequence[_Text], checkpoint: TrainingCheckpoint, report: Report, most_steps: int | None = None
    ) -> int:
        """Returns the number of steps of the whole training. Raises TrainingPaused if `most_steps` leaves some."""
        recipe = self._recipe
        parameters = list(self.head.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        batches = batches_of(texts, recipe.batch_tokens)
        schedule: list[list[_Text]] = []
        for epoch in range(recipe.epochs):
            schedule += random.Random(recipe.seed + epoch).sample(batches, len(batches))
        run_steps(
            schedule,
            lambda texts, _: self.loss(texts),
            optimizer,
            stage="training the head",
            report=report,
            checkpoint=checkpoint,
            most=most_steps,
        )
        return len(schedule)

    def loss(self, texts: Sequence[_Text]) -> Tensor:
        """Soft cross-entropy over the draft vocabulary, the steps weighted 1, 0.8, 0.64, ..."""
        guesses, labels, best, counts = self._unroll(texts)
        counts &= self._column[best] >= 0  # elsewhere the draft vocabulary lacks the target's choice
        total = sum(guess.sum() for guess in guesses) * 0.0  # has a gradient even if no row counts
        for step, guess in enumerate(guesses):
            rows = _without_first(counts, step)
            if bool(rows.any()):
                loss = torch.nn.functional.cross_entropy(guess[rows], labels[rows].softmax(-1))
                total = total + _LATER_STEP_WEIGHT**step * loss
        return total

    def acceptance(self, texts: Sequence[_Text]) -> tuple[list[float], float]:
        """For each depth, the share of greedy tokens that the head predicts if the text before is right; and the share
        of tokens in its vocabulary."""
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
            name.replace("layers.0.", "midlayer.", 1): value.detach() for name, value in self.head.state_dict().items()
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
        """Logits of every step [B, T, Vd], the target's logits for the same tokens [B, T, Vd], its choices (int64
        [B, T]), and which rows count (bool [B, T]). Row t sees the tokens up to t + 1 and predicts token t + 2."""
        width = max(len(text.token_ids) for text in texts)
        ids = torch.zeros((len(texts), width), dtype=torch.int64)
        counts = torch.zeros((len(texts), width - 1), dtype=torch.bool)
        for row, text in enumerate(texts):  # causal rows never see right padding
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
            hidden = self.head.fused(features)
            for step in range(self._recipe.unroll):
                mask = unrolled_mask(width - 1, step, self._device).to(hidden.dtype)
                hidden = self.head(embeddings, hidden, positions, attention_mask=mask, past_key_values=keys)
                guesses.append(self.head.logits(hidden, output_layer).float())
                # The output at position t replaces the feature of position t + 1.
                hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return guesses, labels, best, counts


def _without_first(counts: Tensor, step: int) -> Tensor:
    """In step `step`, the first rows have no output of the previous step."""
    rows = counts.clone()
    rows[:, :step] = False
    return rows
