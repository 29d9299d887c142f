"""The ways to decode that are measured beside each other: `transformers` generate, and the engine with drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from actors.drafters.registry import NONE, RETRIEVAL, expand_drafters, needs_draft_model
from actors.models.quiet import quiet_transformers
from actors.options import Quantization
from cluster.cache.shared_cache import SharedCache
from cluster.cli.bench.speed import Answer
from cluster.offline.engine import Generation, LocalEngine, OnRound


class Method(Protocol):
    """Answers prompts, from token ids to token ids and text; whatever it learns it keeps."""

    name: str

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0, predictions: Sequence[str] = ()
    ) -> list[Answer]:
        """Prompt i is sampled with seed + i. predictions: the probable answers, "" or () for none."""
        ...


class GenerateMethod:
    """The unpatched model's `generate`, greedy, one prompt after the other; with prompt lookup if told its number of
    tokens, or with an assistant model of the same vocabulary."""

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
        self._help = {"prompt_lookup_num_tokens": prompt_lookup_tokens, "assistant_model": assistant}

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0, predictions: Sequence[str] = ()
    ) -> list[Answer]:
        return [self._answer(prompt, max_new_tokens) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        eos = sorted(self._eos) or None
        # Without the checkpoint's own penalties and limits: greedy means the same for all methods.
        self._model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        forwards: list[object] = []
        counter = self._model.register_forward_pre_hook(lambda *_: forwards.append(None))
        try:
            with torch.inference_mode(), quiet_transformers():  # assisted decoding warns about its own calls
                output = self._model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=max_new_tokens,
                    **self._help,
                )
        finally:
            counter.remove()
        token_ids = output[0, len(prompt) :].tolist()[:max_new_tokens]
        end = next((index for index, token in enumerate(token_ids) if token in self._eos), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end], skip_special_tokens=True)  # the engine's time includes it
        return Answer(tuple(token_ids[:end]), len(forwards), text=text)


class EngineMethod:
    """A `LocalEngine`. `on_round`, if set, is called after every round."""

    def __init__(self, name: str, engine: LocalEngine, temperature: float = 0.0, gamma: int | None = None) -> None:
        """gamma: of the engine's draft model; None: it has none."""
        self.name = name
        self.gamma = gamma
        self.drafter_names = tuple(engine.drafter_names)
        self.on_round: OnRound | None = None
        self._engine = engine
        self._temperature = temperature

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0, predictions: Sequence[str] = ()
    ) -> list[Answer]:
        generations = self._engine.generate(
            list(prompts),
            max_new_tokens=max_new_tokens,
            temperature=self._temperature,
            seed=seed,
            predictions=predictions,
            on_round=self.on_round,
        )
        return [answer_of(one) for one in generations]


def answer_of(generation: Generation) -> Answer:
    return Answer(
        token_ids=tuple(generation.token_ids),
        rounds=generation.rounds,
        draft_tokens=generation.draft_tokens,
        accepted_tokens=dict(generation.accepted_tokens),
        text=generation.text,
        round_tokens=tuple(generation.round_tokens),
        target_rows=generation.target_rows,
        seconds=generation.seconds,
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that all engines of a measurement share."""

    model: str = "smollm2"
    draft_model: str = "auto"  # of engines that draft
    eagle_head: str = NONE  # of engines that draft
    corpora: tuple[str, ...] = ()  # of engines with drafter `retrieval`
    branch: int = 2
    max_draft_tokens: int = 16
    batch_size: int = 1
    dtype: str = "float32"
    quantization: Quantization = "none"
    device: str = "auto"
    exact: Literal["default", "bitwise"] = "default"
    temperature: float = 0.0

    def engine(
        self,
        drafters: tuple[str, ...],
        longest: int,
        *,
        gamma: int = 4,
        cache: SharedCache | None = None,
        seconds_of_rows: Callable[[int], float] | None = None,
    ) -> LocalEngine:
        """A fresh engine. longest: tokens of the longest prompt and answer. Raises ModelError or InvalidRequest."""
        has_drafts = drafters != (NONE,)
        return LocalEngine(
            self.model,
            draft_model=self.draft_model if has_drafts else NONE,
            eagle_head=self.eagle_head if has_drafts else NONE,
            drafters=drafters,
            corpora=self.corpora if RETRIEVAL in expand_drafters(drafters) else (),
            gamma=gamma,
            branch=self.branch,
            batch_size=self.batch_size,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            exact=self.exact,
            max_draft_tokens=self.max_draft_tokens,
            kv_cache_tokens=max(256, 2 * self.batch_size * (longest + self.max_draft_tokens + 64)),
            cache=cache,
            seconds_of_rows=seconds_of_rows,
        )


def create_engines(
    settings: EngineSettings,
    drafters: Sequence[tuple[str, ...]],
    longest: int,
    prefix: str = "",
    gammas: Sequence[int] = (4,),
) -> list[EngineMethod]:
    """An engine without drafts and one for each other set of drafters, named `prefix` and the set; a set with a draft
    model has one for each gamma. Engines share nothing that they learn. Raises ModelError or InvalidRequest."""
    methods = []
    for names in ((NONE,), *(names for names in drafters if names != (NONE,))):
        label = f"{prefix}{','.join(names)}"
        for gamma in gammas:
            engine = settings.engine(names, longest, gamma=gamma)
            if not needs_draft_model(engine.drafter_names):
                methods.append(EngineMethod(label, engine, settings.temperature))
                break  # gamma changes nothing
            name = f"{label} gamma {gamma}" if len(gammas) > 1 else label
            methods.append(EngineMethod(name, engine, settings.temperature, gamma))
    return methods


def logit_gap(model: PreTrainedModel, token_ids: Sequence[int]) -> float:
    """Difference of the model's two greatest next-token logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)], device=model.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)
