"""The ways to decode that `paceline bench local` compares: `transformers` generate, and the engine with drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from cluster.bench.speed import Answer
from cluster.local import LocalEngine


class Method(Protocol):
    """Answers prompts greedily, from token ids to token ids and text; whatever it learns it keeps."""

    name: str

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]: ...


class GenerateMethod:
    """The unpatched model's `generate`, one prompt after the other; with prompt lookup if told how many tokens."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        prompt_lookup_tokens: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._prompt_lookup_tokens = prompt_lookup_tokens

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        return [self._answer(prompt, max_new_tokens) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        # Neither penalties nor limits of the checkpoint's own: greedy means the same to all methods.
        eos = sorted(self._eos) or None
        self._model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
        forwards = _ForwardCounter(self._model)
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        try:
            with torch.inference_mode():
                output = self._model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=max_new_tokens,
                    prompt_lookup_num_tokens=self._prompt_lookup_tokens,
                )
        finally:
            forwards.remove()
        token_ids = output[0, len(prompt) :].tolist()[:max_new_tokens]
        end = next((index for index, token in enumerate(token_ids) if token in self._eos), len(token_ids))
        self._tokenizer.decode(token_ids[:end], skip_special_tokens=True)  # the engine's time includes it
        return Answer(tuple(token_ids[:end]), forwards.count)


class EngineMethod:
    """A `LocalEngine`, all prompts of a call at once as far as its batch size allows."""

    def __init__(self, name: str, engine: LocalEngine) -> None:
        self.name = name
        self.drafter_names = tuple(engine.drafter_names)
        self._engine = engine

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
        generations = self._engine.generate(list(prompts), max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
        return [
            Answer(tuple(one.token_ids), one.rounds, one.draft_tokens, dict(one.accepted_tokens)) for one in generations
        ]


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
