"""`paceline bench local`: decoding speed in one process, against `transformers` or against the engine without drafts.

All methods answer a block of prompts before the next block begins, and take turns at going first, so that noise of the
machine falls on all of them. Times are wall times from prompt token ids to answers, prefill included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from actors.errors import InvalidRequest
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import (
    ModelInfo,
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
from cluster.cli.bench.acceptance import Acceptance, AcceptanceCounter
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.methods import EngineMethod, EngineSettings, GenerateMethod, Method, create_engines, logit_gap
from cluster.cli.bench.prompts import BenchPrompt, make_blocks, pick_rows, tasks_of
from cluster.cli.bench.speed import (
    Difference,
    Equality,
    Speed,
    TimedBlock,
    answers_by_prompt,
    first_difference,
    measure_speed,
)
from cluster.config import paceline_home

_PROMPT_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 32
_WARM_UP_TEXTS = ("Count from one to twenty.", "Say it ten times: one two three. One two three. One two three. One")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to measure."""

    prompts: tuple[BenchPrompt, ...]
    engine: EngineSettings = field(default_factory=EngineSettings)  # dtype and batch size are those of each cell
    drafters: tuple[tuple[str, ...], ...] = (("auto",),)  # an engine for each set, beside the one without drafts
    gammas: tuple[int, ...] = (4,)  # an engine with a draft model for each
    rows_per_task: int | None = None  # None: all
    learn_rows_per_task: int = 0  # other rows that engines with drafters answer first, so that they start warm
    max_new_tokens: int = 128
    dtypes: tuple[str, ...] = ("float32",)
    batch_sizes: tuple[int, ...] = (1,)
    compare: bool = False  # the engine without drafts is the reference, `transformers` is left out, acceptance is noted
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MethodResult:
    name: str
    drafters: tuple[str, ...] | None  # None: not a Paceline engine
    overall: Speed
    tasks: dict[str, Speed]
    equality: Equality | None  # None: it is the reference
    gamma: int | None = None  # of its draft model
    rows_per_token: float | None = None  # computed by the target, prompts excluded; None here and below: not compared
    acceptance: Acceptance | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """One dtype at one batch size."""

    dtype: str
    batch_size: int
    reference: str
    num_partial_blocks: int  # blocks with fewer prompts than the batch has room for
    methods: list[MethodResult]
    blocks: list[TimedBlock]


@dataclass(frozen=True, slots=True)
class LocalReport:
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    config: dict[str, Any]
    cells: list[CellResult]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_local(
    plan: LocalPlan, progress: Progress = silent, on_cell: Callable[[CellResult], None] = lambda cell: None
) -> LocalReport:
    """Measure every dtype at every batch size; `on_cell` is called with each as it is done.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used.
    """
    source = resolve_model(plan.engine.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    rows, others = pick_rows(plan.prompts, plan.rows_per_task)
    learn_rows = pick_rows(others, plan.learn_rows_per_task)[0] if plan.learn_rows_per_task else []
    token_ids = {row.name: encode_prompt(row, tokenizer) for row in (*rows, *learn_rows)}
    longest = check_room(token_ids, info, plan.max_new_tokens) + plan.max_new_tokens
    machine, cells = describe_machine(), []
    for dtype in plan.dtypes:
        model, baselines = (None, []) if plan.compare else _baselines(plan.engine, source, dtype, progress)
        for batch_size in plan.batch_sizes:
            settings = replace(plan.engine, dtype=dtype, batch_size=batch_size)
            prefix = "" if plan.compare else "paceline: "
            engines = create_engines(settings, plan.drafters, longest, prefix=prefix, gammas=plan.gammas)
            methods: list[Method] = [*baselines, *engines]
            warm_up(methods, tokenizer, batch_size, plan.max_new_tokens)
            for engine in engines:
                if learn_rows and engine.drafter_names:
                    engine.answer([token_ids[row.name] for row in learn_rows], plan.max_new_tokens)
            counters = {engine.name: AcceptanceCounter() for engine in engines} if plan.compare else {}
            for engine in engines:
                engine.on_round = counters[engine.name].add if plan.compare else None
            blocks = run_blocks(methods, rows, token_ids, plan, batch_size, progress)
            acceptance = {name: counter.result() for name, counter in counters.items()}
            results = [_summarise(one, methods[0].name, blocks, acceptance, token_ids, model) for one in methods]
            partial = sum(len(block.prompts) < batch_size for block in blocks if block.method == methods[0].name)
            cells.append(CellResult(dtype, batch_size, methods[0].name, partial, results, blocks))
            on_cell(cells[-1])
            del methods, engines, engine  # their caches and weights make room for the next ones
            gc.collect()
    config = {key: value for key, value in asdict(plan).items() if key not in ("prompts", "engine")}
    config |= {**asdict(plan.engine), "model_name": info.name, "weights": info.weights_fingerprint}
    config["num_prompts"] = {task: sum(row.task == task for row in rows) for task in tasks_of(rows)}
    config["num_learn_prompts"] = len(learn_rows)
    return LocalReport(machine, describe_versions(), config, cells)


def _baselines(
    settings: EngineSettings, source: ModelSource, dtype: str, progress: Progress
) -> tuple[PreTrainedModel, list[Method]]:
    """The target as `transformers` loads it, and the ways in which its `generate` decodes; assisted decoding only with
    a draft model that has the target's vocabulary."""
    refuse_encoder(source, "--baselines")
    device = choose_device(settings.device)
    model = load_model(source, dtype, device)
    tokenizer, eos = load_tokenizer(source), read_model_info(source).eos_token_ids
    methods: list[Method] = [
        GenerateMethod("generate", model, tokenizer, eos),
        GenerateMethod("generate + prompt lookup", model, tokenizer, eos, prompt_lookup_tokens=_PROMPT_LOOKUP_TOKENS),
    ]
    draft_source = resolve_draft_model(settings.draft_model, source, paceline_home(), progress)
    if draft_source is not None and not has_own_vocabulary(draft_source, source):
        refuse_encoder(draft_source, "--baselines")
        assistant = load_model(draft_source, dtype, device)
        silence_unmapped_tokens(assistant, draft_source)
        methods.append(GenerateMethod("generate + assistant model", model, tokenizer, eos, assistant=assistant))
    return model, methods


def encode_prompt(prompt: BenchPrompt, tokenizer: Any) -> list[int]:
    """Token ids through the model's chat template; plain text where it has none. Raises InvalidRequest."""
    if prompt.token_ids:
        return list(prompt.token_ids)
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in encoded]
    if len(prompt.messages) > 1:
        limit = "the model has no chat template, so a prompt can be one message only"
        raise InvalidRequest(f"prompt {prompt.name}", f"{len(prompt.messages)} messages", limit)
    return [int(token) for token in tokenizer.encode(prompt.messages[0]["content"])]


def run_blocks(
    methods: Sequence[Method],
    rows: Sequence[BenchPrompt],
    token_ids: dict[str, list[int]],
    plan: LocalPlan,
    batch_size: int = 1,
    progress: Progress = silent,
) -> list[TimedBlock]:
    """Every method on every block of rows; the method that goes first changes with each block. Row i is sampled with
    the plan's seed plus i."""
    seeds = {row.name: plan.seed + index for index, row in enumerate(rows)}
    blocks, timed = make_blocks(rows, batch_size), []
    for index, block in enumerate(blocks):
        progress("measuring", index, len(blocks))
        names, prompts = tuple(row.name for row in block), [token_ids[row.name] for row in block]
        predictions = [row.prediction for row in block]
        first = index % len(methods)
        for method in (*methods[first:], *methods[:first]):
            started = time.perf_counter()
            answers = method.answer(prompts, plan.max_new_tokens, seeds[names[0]], predictions)
            seconds = time.perf_counter() - started
            timed.append(TimedBlock(method.name, block[0].task, names, seconds, tuple(answers)))
    progress("measuring", len(blocks), len(blocks))
    return timed


def warm_up(methods: Sequence[Method], tokenizer: Any, batch_size: int, max_new_tokens: int) -> None:
    """Compile, allocate and learn step times on texts that are not measured."""
    for method in methods:
        for text in _WARM_UP_TEXTS:
            prompt = encode_prompt(BenchPrompt("warm-up", "", ({"role": "user", "content": text},)), tokenizer)
            method.answer([prompt] * batch_size, min(max_new_tokens, _WARM_UP_TOKENS))


def _summarise(
    method: Method,
    reference: str,
    blocks: Sequence[TimedBlock],
    acceptance: dict[str, Acceptance],
    token_ids: dict[str, list[int]],
    model: PreTrainedModel | None,
) -> MethodResult:
    tasks = dict.fromkeys(block.task for block in blocks)
    engine, rows_per_token = method if isinstance(method, EngineMethod) else None, None
    if method.name in acceptance:
        answers = answers_by_prompt(blocks, method.name).values()
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        rows_per_token = sum(answer.rounds + answer.draft_tokens for answer in answers) / max(1, num_tokens)
    is_reference = method.name == reference
    return MethodResult(
        name=method.name,
        drafters=engine.drafter_names if engine else None,
        overall=measure_speed(blocks, method.name, reference),
        tasks={task: measure_speed(blocks, method.name, reference, task) for task in tasks},
        equality=None if is_reference else compare_answers(blocks, method.name, reference, token_ids, model),
        gamma=engine.gamma if engine else None,
        rows_per_token=rows_per_token,
        acceptance=acceptance.get(method.name),
    )


def compare_answers(
    blocks: Sequence[TimedBlock],
    method: str,
    reference: str,
    token_ids: dict[str, list[int]] | None = None,
    model: PreTrainedModel | None = None,
) -> Equality:
    """Where answers leave the reference's; with the reference's model and the prompts' token ids by name, the model's
    logit gap there."""
    expected, found = answers_by_prompt(blocks, reference), answers_by_prompt(blocks, method)
    differences = []
    for prompt, answer in expected.items():
        wanted, got = answer.token_ids, found[prompt].token_ids
        position = first_difference(wanted, got)
        if position is None:
            continue
        gap = None
        if model is not None and token_ids is not None:
            gap = logit_gap(model, [*token_ids[prompt], *wanted[:position]])
        one, other = (tokens[position] if position < len(tokens) else None for tokens in (wanted, got))
        differences.append(Difference(prompt, position, one, other, gap))
    return Equality(len(expected), tuple(differences))


def check_room(token_ids: dict[str, list[int]], info: ModelInfo, max_new_tokens: int) -> int:
    """Tokens of the longest prompt. Raises InvalidRequest for one that does not fit with its answer."""
    for name, tokens in token_ids.items():
        limit = ""
        if len(tokens) + max_new_tokens > info.max_model_len:
            limit = f"with {max_new_tokens} new ones the model has room for {info.max_model_len}"
        elif info.max_side_len is not None and max(len(tokens), max_new_tokens) > info.max_side_len:
            limit = f"with {max_new_tokens} new ones: the model takes and writes at most {info.max_side_len}"
        elif not tokens or max(tokens) >= info.vocab_size:
            limit = f"needs 1 or more below {info.vocab_size}"
        if limit:
            raise InvalidRequest(f"prompt {name}", f"{len(tokens)} tokens", limit)
    return max(map(len, token_ids.values()))
