"""The ways to decode that are measured beside each other: `transformers` generate, and the engine with drafters.

Each has a `name`, `answer` and `now`, the seconds of the clock by which it is measured; what it learns it keeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from actors.drafters.registry import NONE, RETRIEVAL, expand_drafters
from actors.models.quiet import quiet_transformers
from cluster.cli.bench.options import DraftingOptions
from cluster.cli.bench.speed import Answer
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation
from cluster.router.trace import RoundTrace


@dataclass(slots=True)
class GenerateMethod:
    """The unpatched model's `generate`, greedy, one prompt after the other."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    eos_token_ids: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)  # of `generate`: prompt lookup or an assistant model

    def now(self) -> float:
        return time.monotonic()

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0, predictions: Sequence[str] = ()
    ) -> list[Answer]:
        return [self._answer(prompt, max_new_tokens) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        eos = sorted(self.eos_token_ids) or None
        # Without the checkpoint's own penalties and limits: greedy means the same for all methods.
        self.model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
        input_ids = torch.tensor([list(prompt)], device=self.model.device)
        forwards: list[object] = []
        counter = self.model.register_forward_pre_hook(lambda *_: forwards.append(None))
        try:
            with torch.inference_mode(), quiet_transformers():  # assisted decoding warns about its own calls
                output = self.model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=max_new_tokens,
                    **self.options,
                )
        finally:
            counter.remove()
        token_ids = output[0, len(prompt) :].tolist()[:max_new_tokens]
        end = next((index for index, token in enumerate(token_ids) if token in self.eos_token_ids), len(token_ids))
        text = self.tokenizer.decode(token_ids[:end], skip_special_tokens=True)  # the engine's time includes it
        return Answer(token_ids[:end], len(forwards), text=text)


@dataclass(slots=True)
class EngineMethod:
    name: str
    engine: LocalEngine
    options: Mapping[str, Any] = field(default_factory=dict)  # of `LocalEngine.generate`
    gamma: int | None = None  # of the engine's draft model; None: it has none
    traces: list[RoundTrace] | None = None  # takes the trace of every round; None: rounds are not traced
    is_constrained: bool = True  # False: it leaves constraints out

    def now(self) -> float:
        return self.engine.now()

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int = 0,
        predictions: Sequence[str] = (),
        constraint: StructuredOutputs | None = None,
    ) -> list[Generation]:
        """Prompt i is sampled with seed + i. predictions: the probable answers, "" or () for none."""
        return self.engine.generate(
            list(prompts),
            max_new_tokens=max_new_tokens,
            seed=seed,
            predictions=predictions,
            structured_outputs=constraint if self.is_constrained else None,
            on_round=None if self.traces is None else self.traces.append,
            **self.options,
        )


Method = GenerateMethod | EngineMethod


def make_engine(options: DraftingOptions, drafters: tuple[str, ...], longest: int, **more: Any) -> LocalEngine:
    """A fresh engine with these drafters, or without drafts.

    Draft model and head go to engines that draft, corpora to those with drafter `retrieval`. longest: tokens of the
    longest prompt and answer. more: keyword arguments of `LocalEngine`. Raises ModelError or InvalidRequest.
    """
    settings = {"batch_size": 1, "max_draft_tokens": options.max_draft_tokens, **options.settings(), **more}
    if drafters == (NONE,):
        settings |= {"draft_model": NONE, "eagle_head": NONE}
    if RETRIEVAL not in expand_drafters(drafters):
        settings["corpora"] = ()
    tokens = 2 * settings["batch_size"] * (longest + options.max_draft_tokens + 64)
    return LocalEngine(drafters=drafters, kv_cache_tokens=max(256, tokens), **settings)
