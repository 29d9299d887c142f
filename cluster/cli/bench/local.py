"""`paceline bench local`: decoding speed in one process, against `transformers` or against the engine without drafts.

All methods answer a block of prompts before the next block begins, and take turns at going first, so that noise of the
machine falls on all of them. Times are wall times from prompt token ids to answers, prefill included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.drafters.registry import GRAMMAR, NONE, needs_draft_model
from actors.engine.cpu_kernels.kernel_choice import fastest_dtype
from actors.home import paceline_home
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.dtypes import choose_dtype
from actors.models.loader import (
    choose_device,
    load_config,
    load_model,
    load_tokenizer,
    read_model_info,
    refuse_encoder,
    silence_unmapped_tokens,
)
from actors.models.source import ModelSource
from actors.models.token_text import has_own_vocabulary
from actors.training.drafter_build import resolve_draft_model
from cluster.cli.bench.measure import Comparison, compare_methods, encode_prompt, encode_prompts
from cluster.cli.bench.methods import EngineMethod, GenerateMethod, Method, make_engine
from cluster.cli.bench.options import LocalOptions
from cluster.cli.bench.prompts import BenchPrompt, make_blocks, pick_rows, user_says

_PROMPT_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 32
_WARM_UP_TEXTS = ("Count from one to twenty.", "Say it ten times: one two three. One two three. One two three. One")


def run_local(prompts: Sequence[BenchPrompt], options: LocalOptions, progress: Progress = silent) -> Comparison:
    """Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used."""
    source = resolve_model(options.model, paceline_home(), progress)
    tokenizer = load_tokenizer(source)
    rows, others = pick_rows(prompts, options.rows_per_task)
    learn_rows, _ = pick_rows(others, options.learn_rows)
    token_ids = encode_prompts([*rows, *learn_rows], read_model_info(source), tokenizer, options.max_new_tokens)
    longest = max(map(len, token_ids.values())) + options.max_new_tokens
    engines = create_engines(options, longest)
    if options.task is not None:
        engines += _other_ways(options, engines[-1], longest)
    methods: list[Method] = [*([] if options.compare else _baselines(options, source, progress)), *engines]
    for method in methods:  # compile, allocate and learn step times on texts that are not measured
        for text in _WARM_UP_TEXTS:
            prompt = encode_prompt(BenchPrompt("warm-up", "", user_says(text)), tokenizer)
            method.answer([prompt] * options.batch_size, min(options.max_new_tokens, _WARM_UP_TOKENS))
    for engine in engines:
        if learn_rows and engine.engine.drafter_names:
            for block in make_blocks(learn_rows, len(learn_rows)):
                asked = [token_ids[row.name] for row in block]
                engine.answer(asked, options.max_new_tokens, constraint=block[0].constraint)
        engine.traces = [] if options.compare else None
    return compare_methods(
        methods,
        rows,
        token_ids,
        options.max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=partial(progress, "measuring"),
    )


def with_dtype(options: LocalOptions) -> LocalOptions:
    """The options with what `auto` means for the model. Raises ModelError."""
    config = load_config(resolve_model(options.model, paceline_home()))
    fastest = fastest_dtype if options.exact == "default" else None
    return replace(options, dtype=choose_dtype(options.dtype, config, choose_device(options.device), fastest))


def create_engines(options: LocalOptions, longest: int) -> list[EngineMethod]:
    """An engine without drafts and one for each other set of drafters; a set with a draft model has one for each gamma.
    longest: tokens of the longest prompt and answer. Engines share nothing that they learn. Raises ModelError or
    InvalidRequest."""
    methods, gammas = [], options.gammas()
    prefix, sampling = "" if options.compare else "paceline: ", {"temperature": options.temperature}
    for names in dict.fromkeys([(NONE,), *options.drafter_sets()]):
        label = f"{prefix}{','.join(names)}"
        for gamma in gammas:
            engine = make_engine(options, names, longest, gamma=gamma, batch_size=options.batch_size)
            if not needs_draft_model(engine.drafter_names):
                methods.append(EngineMethod(label, engine, sampling))
                break  # gamma changes nothing
            name = f"{label} gamma {gamma}" if len(gammas) > 1 else label
            methods.append(EngineMethod(name, engine, sampling, gamma))
    return methods


def _other_ways(options: LocalOptions, drafting: EngineMethod, longest: int) -> list[EngineMethod]:
    """The baselines of constrained drafting: the same drafters without `grammar`, and unconstrained."""
    names = drafting.engine.drafter_names
    others = tuple(name for name in names if name != GRAMMAR)
    gamma, size = options.gammas()[0], options.batch_size
    return [
        EngineMethod(
            f"{drafting.name}, {what}",
            make_engine(options, drafters, longest, gamma=gamma, batch_size=size),
            drafting.options,
            drafting.gamma,
            is_constrained=is_constrained,
        )
        for what, drafters, is_constrained in ((f"without {GRAMMAR}", others, True), ("unconstrained", names, False))
        if drafters
    ]


def _baselines(options: LocalOptions, source: ModelSource, progress: Progress) -> list[Method]:
    """The ways in which `generate` of `transformers` decodes; assisted decoding only with a draft model that has the
    target's vocabulary."""
    refuse_encoder(source, "`transformers` generate (left out with --compare)")
    device = choose_device(options.device)
    model, tokenizer = load_model(source, options.dtype, device), load_tokenizer(source)
    eos = read_model_info(source).eos_token_ids
    helps: dict[str, dict[str, Any]] = {"": {}, " + prompt lookup": {"prompt_lookup_num_tokens": _PROMPT_LOOKUP_TOKENS}}
    draft_source = resolve_draft_model(options.draft_model, source, paceline_home(), progress)
    if draft_source is not None and not has_own_vocabulary(draft_source, source):
        refuse_encoder(draft_source, "an assistant model")
        assistant = load_model(draft_source, options.dtype, device)
        silence_unmapped_tokens(assistant, draft_source)
        helps[" + assistant model"] = {"assistant_model": assistant}
    return [
        GenerateMethod(f"generate{name}", model=model, tokenizer=tokenizer, eos_token_ids=eos, options=help)
        for name, help in helps.items()
    ]
