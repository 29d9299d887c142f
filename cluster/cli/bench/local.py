"""`paceline bench local`: decoding speed in one process, against `transformers` or against the engine without drafts.

All methods answer a block of prompts before the next block begins, and take turns at going first, so that noise of the
machine falls on all of them. Times are wall times from prompt token ids to answers, prefill included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import (
    choose_device,
    load_model,
    load_tokenizer,
    read_model_info,
    refuse_encoder,
    silence_unmapped_tokens,
)
from actors.models.source import ModelSource
from actors.models.token_text import has_own_vocabulary
from actors.training.drafter_build import resolve_draft_model
from cluster.cli.bench.measure import encode_prompt, encode_prompts, run_blocks, summarise
from cluster.cli.bench.methods import GenerateMethod, Method, create_engines
from cluster.cli.bench.prompts import BenchPrompt, pick_rows, user_says
from cluster.cli.bench.speed import MethodResult, TimedBlock
from cluster.config import paceline_home

_PROMPT_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 32
_WARM_UP_TEXTS = ("Count from one to twenty.", "Say it ten times: one two three. One two three. One two three. One")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to measure."""

    prompts: tuple[BenchPrompt, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of `LocalEngine` that all engines share
    drafters: tuple[tuple[str, ...], ...] = (("auto",),)  # an engine for each set, beside the one without drafts
    gammas: tuple[int, ...] = (4,)  # an engine with a draft model for each
    rows_per_task: int | None = None  # None: all
    learn_rows_per_task: int = 0  # other rows that engines with drafters answer first, so that they start warm
    max_new_tokens: int = 128
    dtypes: tuple[str, ...] = ("float32",)
    batch_sizes: tuple[int, ...] = (1,)
    compare: bool = False  # the engine without drafts is the reference, `transformers` is left out, acceptance is noted
    temperature: float = 0.0
    seed: int = 0  # prompt i is sampled with seed + i


@dataclass(frozen=True, slots=True)
class CellResult:
    """One dtype at one batch size."""

    dtype: str
    batch_size: int
    methods: list[MethodResult]  # the first is the reference
    blocks: list[TimedBlock]


def run_local(
    plan: LocalPlan, progress: Progress = silent, on_cell: Callable[[CellResult], None] = lambda cell: None
) -> list[CellResult]:
    """Measure every dtype at every batch size; `on_cell` is called with each as it is done.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used.
    """
    source = resolve_model(plan.engine["model"], paceline_home(), progress)
    tokenizer = load_tokenizer(source)
    rows, others = pick_rows(plan.prompts, plan.rows_per_task)
    learn_rows = pick_rows(others, plan.learn_rows_per_task)[0] if plan.learn_rows_per_task else []
    token_ids = encode_prompts([*rows, *learn_rows], read_model_info(source), tokenizer, plan.max_new_tokens)
    longest = max(map(len, token_ids.values())) + plan.max_new_tokens
    cells = []
    for dtype in plan.dtypes:
        baselines = [] if plan.compare else _baselines(plan.engine, source, dtype, progress)
        for batch_size in plan.batch_sizes:
            engines = create_engines(
                {**plan.engine, "dtype": dtype, "batch_size": batch_size},
                plan.drafters,
                longest,
                prefix="" if plan.compare else "paceline: ",
                gammas=plan.gammas,
                temperature=plan.temperature,
            )
            methods: list[Method] = [*baselines, *engines]
            _warm_up(methods, tokenizer, batch_size, plan.max_new_tokens)
            for engine in engines:
                if learn_rows and engine.engine.drafter_names:
                    engine.answer([token_ids[row.name] for row in learn_rows], plan.max_new_tokens)
                engine.traces = [] if plan.compare else None
            blocks = run_blocks(
                methods,
                rows,
                token_ids,
                plan.max_new_tokens,
                batch_size=batch_size,
                seed=plan.seed,
                progress=partial(progress, "measuring"),
            )
            cells.append(CellResult(dtype, batch_size, summarise(methods, blocks), blocks))
            on_cell(cells[-1])
            del methods, engines, engine  # their caches and weights make room for the next ones
            gc.collect()
    return cells


def _baselines(settings: Mapping[str, Any], source: ModelSource, dtype: str, progress: Progress) -> list[Method]:
    """The ways in which `generate` of `transformers` decodes; assisted decoding only with a draft model that has the
    target's vocabulary."""
    refuse_encoder(source, "--baselines")
    device = choose_device(settings.get("device", "auto"))
    model, tokenizer = load_model(source, dtype, device), load_tokenizer(source)
    eos = read_model_info(source).eos_token_ids
    helps: dict[str, dict[str, Any]] = {"": {}, " + prompt lookup": {"prompt_lookup_num_tokens": _PROMPT_LOOKUP_TOKENS}}
    draft_source = resolve_draft_model(settings.get("draft_model", "auto"), source, paceline_home(), progress)
    if draft_source is not None and not has_own_vocabulary(draft_source, source):
        refuse_encoder(draft_source, "--baselines")
        assistant = load_model(draft_source, dtype, device)
        silence_unmapped_tokens(assistant, draft_source)
        helps[" + assistant model"] = {"assistant_model": assistant}
    return [
        GenerateMethod(f"generate{name}", model=model, tokenizer=tokenizer, eos_token_ids=eos, options=help)
        for name, help in helps.items()
    ]


def _warm_up(methods: Sequence[Method], tokenizer: Any, batch_size: int, max_new_tokens: int) -> None:
    """Compile, allocate and learn step times on texts that are not measured."""
    for method in methods:
        for text in _WARM_UP_TEXTS:
            prompt = encode_prompt(BenchPrompt("warm-up", "", user_says(text)), tokenizer)
            method.answer([prompt] * batch_size, min(max_new_tokens, _WARM_UP_TOKENS))
