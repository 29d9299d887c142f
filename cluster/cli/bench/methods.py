"""The ways to decode that are measured beside each other: `transformers` generate, and the engine with drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from actors.drafters.registry import NONE, RETRIEVAL, expand_drafters, needs_draft_model
from actors.models.quiet import quiet_transformers
from actors.options import Quantization
from cluster.cli.bench.speed import Answer
from cluster.offline.engine import LocalEngine, OnRound


class Method(Protocol):
    """Answers prompts greedily, from token ids to token ids and text; whatever it learns it keeps."""

    name: str

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]: ...


class GenerateMethod:
    """The unpatched model's `generate`, one prompt after the other; with prompt lookup if told how many tokens, or with
    an assistant model of the same vocabulary."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        prompt_lookup_tokens: int | None = None,
        assistant: PreTrainedModel | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._prompt_lookup_tokens = prompt_lookup_tokens
        self._assistant = assistant

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        return [self._answer(prompt, max_new_tokens) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        # Neither penalties nor limits of the checkpoint's own: greedy means the same to all methods.
        eos = sorted(self._eos) or None
        self._model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
        forwards = _ForwardCounter(self._model)
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        try:
            # Its assisted decoding warns of how it calls itself.
            with torch.inference_mode(), quiet_transformers():
                output = self._model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=max_new_tokens,
                    prompt_lookup_num_tokens=self._prompt_lookup_tokens,
                    assistant_model=self._assistant,
                )
        finally:
            forwards.remove()
        token_ids = output[0, len(prompt) :].tolist()[:max_new_tokens]
        end = next((index for index, token in enumerate(token_ids) if token in self._eos), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end], skip_special_tokens=True)  # the engine's time includes it
        return Answer(tuple(token_ids[:end]), forwards.count, text=text)


class EngineMethod:
    """A `LocalEngine`, all prompts of a call at once as far as its batch size allows.

    `on_round`, where it is set, hears of every round from then on.
    """

    def __init__(self, name: str, engine: LocalEngine, temperature: float = 0.0, gamma: int | None = None) -> None:
        """gamma: that of its draft model; None: it has none."""
        self.name = name
        self.gamma = gamma
        self.drafter_names = tuple(engine.drafter_names)
        self.on_round: OnRound | None = None
        self._engine = engine
        self._temperature = temperature

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0, predictions: Sequence[str] = ()
    ) -> list[Answer]:
        """Prompt i is sampled with seed + i. predictions: of each prompt's answer, "" for no idea; () for none."""
        generations = self._engine.generate(
            list(prompts),
            max_new_tokens=max_new_tokens,
            temperature=self._temperature,
            seed=seed,
            predictions=predictions,
            on_round=self.on_round,
        )
        return [
            Answer(
                token_ids=tuple(one.token_ids),
                rounds=one.rounds,
                draft_tokens=one.draft_tokens,
                accepted_tokens=dict(one.accepted_tokens),
                text=one.text,
                round_tokens=tuple(one.round_tokens),
                target_rows=one.target_rows,
                seconds=one.seconds,
            )
            for one in generations
        ]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines of a measurement have in common."""

    model: str
    draft_model: str  # of those that draft
    dtype: str
    device: str
    exact: Literal["default", "bitwise"]
    batch_size: int
    max_draft_tokens: int
    gammas: tuple[int, ...] = (4,)  # an engine with a draft model for each
    branch: int = 2
    eagle_head: str = NONE  # of those that draft
    quantization: Quantization = "none"
    corpora: tuple[str, ...] = ()  # of those that draft from corpora
    temperature: float = 0.0


def create_engines(
    settings: EngineSettings, drafters: Sequence[tuple[str, ...]], longest: int, prefix: str = ""
) -> list[EngineMethod]:
    """An engine that does not draft, and one for each other set of drafters, named after it behind `prefix`; where a
    set has a draft model, one for each gamma.

    All are fresh: none has seen a prompt that is about to be measured, nor shares a cache with another. longest: tokens
    of the longest prompt with its answer. Raises ModelError or InvalidRequest.
    """
    methods = []
    for names in ((NONE,), *(names for names in drafters if names != (NONE,))):
        label = f"{prefix}{','.join(names)}"
        for gamma in settings.gammas:
            engine = _create_engine(settings, names, gamma, longest)
            if not needs_draft_model(engine.drafter_names):
                methods.append(EngineMethod(label, engine, settings.temperature))
                break  # it would be the same with any other
            name = f"{label} gamma {gamma}" if len(settings.gammas) > 1 else label
            methods.append(EngineMethod(name, engine, settings.temperature, gamma))
    return methods


def _create_engine(settings: EngineSettings, names: tuple[str, ...], gamma: int, longest: int) -> LocalEngine:
    return LocalEngine(
        settings.model,
        draft_model=NONE if names == (NONE,) else settings.draft_model,
        eagle_head=NONE if names == (NONE,) else settings.eagle_head,
        drafters=names,
        corpora=settings.corpora if RETRIEVAL in expand_drafters(names) else (),
        gamma=gamma,
        branch=settings.branch,
        batch_size=settings.batch_size,
        dtype=settings.dtype,
        quantization=settings.quantization,
        device=settings.device,
        exact=settings.exact,
        max_draft_tokens=settings.max_draft_tokens,
        kv_cache_tokens=max(256, 2 * settings.batch_size * (longest + settings.max_draft_tokens + 64)),
    )


def logit_gap(model: PreTrainedModel, token_ids: Sequence[int]) -> float:
    """How far the model's best next token is above its second best, in logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)], device=model.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


class _ForwardCounter:
    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1

    def remove(self) -> None:
        self._handle.remove()
