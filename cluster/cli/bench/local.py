"""`paceline bench local`: decoding speed in one process, against `transformers` on the same prompts.

All methods answer a block of prompts before the next block begins, and take turns at going first, so that noise of the
machine falls on all of them. Times are wall times from prompt token ids to answer, prefill included. Of prompts with
several turns the first is answered.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

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
from actors.options import Quantization
from actors.training.drafter_build import resolve_draft_model
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

GENERATE = "generate"
PROMPT_LOOKUP = "generate + prompt lookup"
ASSISTED = "generate + assistant model"
NO_DRAFTS = "paceline: none"

M = TypeVar("M", bound=Method)

_PROMPT_LOOKUP_TOKENS = 10
_WARM_UP_TOKENS = 32
_WARM_UP_TEXTS = ("Count from one to twenty.", "Say it ten times: one two three. One two three. One two three. One")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to measure."""

    prompts: tuple[BenchPrompt, ...]
    model: str = "smollm2"
    draft_model: str = "auto"
    eagle_head: str = "none"
    drafters: tuple[tuple[str, ...], ...] = (("auto",),)  # an engine for each set, beside the one without drafts
    rows_per_task: int | None = None  # None: all
    learn_rows_per_task: int = 0  # other rows that engines with drafters answer beforehand, so that they start warm
    max_new_tokens: int = 128
    dtypes: tuple[str, ...] = ("float32",)
    batch_sizes: tuple[int, ...] = (1,)
    quantization: Quantization = "none"  # of the engines; `transformers` keeps the dtype
    device: str = "auto"
    exact: Literal["default", "bitwise"] = "default"
    branch: int = 2
    max_draft_tokens: int = 16
    baselines: bool = True  # False: `transformers` is left out, and the engine without drafts is the reference


@dataclass(frozen=True, slots=True)
class MethodResult:
    name: str
    drafters: tuple[str, ...] | None  # None: not an engine of ours
    overall: Speed
    tasks: dict[str, Speed]
    equality: Equality | None  # None: it is the reference


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
    """Measure every dtype at every batch size; `on_cell` hears of each as it is done.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used.
    """
    source = resolve_model(plan.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    rows, others = pick_rows(plan.prompts, plan.rows_per_task)
    learn_rows = pick_rows(others, plan.learn_rows_per_task)[0] if plan.learn_rows_per_task else []
    token_ids = {row.name: encode_prompt(row, tokenizer) for row in (*rows, *learn_rows)}
    longest = check_room(token_ids, info, plan.max_new_tokens)
    machine, cells = describe_machine(), []
    for dtype in plan.dtypes:
        reference_model = assistant = None
        if plan.baselines:
            refuse_encoder(source, "--baselines")
            reference_model = load_model(source, dtype, choose_device(plan.device))
            assistant = _load_assistant(plan, source, dtype, progress)
        for batch_size in plan.batch_sizes:
            methods: list[Method] = []
            if reference_model is not None:
                methods.append(GenerateMethod(GENERATE, reference_model, tokenizer, info.eos_token_ids))
                methods.append(
                    GenerateMethod(PROMPT_LOOKUP, reference_model, tokenizer, info.eos_token_ids, _PROMPT_LOOKUP_TOKENS)
                )
                if assistant is not None:
                    methods.append(
                        GenerateMethod(ASSISTED, reference_model, tokenizer, info.eos_token_ids, assistant=assistant)
                    )
            settings = EngineSettings(
                model=plan.model,
                draft_model=plan.draft_model,
                dtype=dtype,
                device=plan.device,
                exact=plan.exact,
                batch_size=batch_size,
                max_draft_tokens=plan.max_draft_tokens,
                branch=plan.branch,
                eagle_head=plan.eagle_head,
                quantization=plan.quantization,
            )
            methods += create_engines(settings, plan.drafters, longest + plan.max_new_tokens, "paceline: ")
            warm_up(methods, tokenizer, batch_size, plan.max_new_tokens)
            _learn(methods, learn_rows, token_ids, plan.max_new_tokens)
            blocks = make_blocks(rows, batch_size)
            stage = f"{dtype}, batch {batch_size}"
            timed = run_blocks(methods, blocks, token_ids, plan.max_new_tokens, stage, progress)
            cells.append(_summarise(dtype, batch_size, methods, timed, token_ids, reference_model))
            on_cell(cells[-1])
            del methods  # their caches and weights make room for the next ones
            gc.collect()
    config = {key: value for key, value in asdict(plan).items() if key != "prompts"}
    config["num_prompts"] = {task: sum(row.task == task for row in rows) for task in tasks_of(rows)}
    config["num_learn_prompts"] = len(learn_rows)
    config["weights"] = info.weights_fingerprint
    return LocalReport(machine, describe_versions(), config, cells)


def _load_assistant(plan: LocalPlan, source: ModelSource, dtype: str, progress: Progress) -> PreTrainedModel | None:
    """The draft model as `generate` takes one; None where there is none, or where it has a vocabulary of its own."""
    draft_source = resolve_draft_model(plan.draft_model, source, paceline_home(), progress)
    if draft_source is None or has_own_vocabulary(draft_source, source):
        return None
    refuse_encoder(draft_source, "--baselines")
    model = load_model(draft_source, dtype, choose_device(plan.device))
    silence_unmapped_tokens(model, draft_source)
    return model


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
    blocks: Sequence[Sequence[BenchPrompt]],
    token_ids: dict[str, list[int]],
    max_new_tokens: int,
    stage: str = "",
    progress: Progress = silent,
) -> list[TimedBlock]:
    """Every method on every block, block by block; the method that goes first changes with each block."""

    def ask(method: Method, block: Sequence[BenchPrompt]) -> list[TimedBlock]:
        prompts = [token_ids[row.name] for row in block]
        started = time.perf_counter()
        answers = method.answer(prompts, max_new_tokens)
        seconds = time.perf_counter() - started
        return [TimedBlock(method.name, block[0].task, tuple(row.name for row in block), seconds, tuple(answers))]

    return interleave(methods, blocks, ask, stage, progress)


def interleave(
    methods: Sequence[M],
    blocks: Sequence[Sequence[BenchPrompt]],
    ask: Callable[[M, Sequence[BenchPrompt]], list[TimedBlock]],
    stage: str = "",
    progress: Progress = silent,
) -> list[TimedBlock]:
    """What `ask` returns for every method and block, block by block; who goes first changes with each block."""
    timed: list[TimedBlock] = []
    for index, block in enumerate(blocks):
        progress(stage, index, len(blocks))
        first = index % len(methods)
        for method in (*methods[first:], *methods[:first]):
            timed += ask(method, block)
    progress(stage, len(blocks), len(blocks))
    return timed


def warm_up(methods: Sequence[Method], tokenizer: Any, batch_size: int, max_new_tokens: int) -> None:
    """Compile, allocate and let step times be learnt, on texts that are no part of the measurement."""
    prompts = [
        encode_prompt(BenchPrompt("warm-up", "warm-up", ({"role": "user", "content": text},)), tokenizer)
        for text in _WARM_UP_TEXTS
    ]
    for method in methods:
        for prompt in prompts:
            method.answer([prompt] * batch_size, min(max_new_tokens, _WARM_UP_TOKENS))


def _learn(
    methods: Sequence[Method], rows: Sequence[BenchPrompt], token_ids: dict[str, list[int]], max_new_tokens: int
) -> None:
    for method in methods:
        if rows and isinstance(method, EngineMethod) and method.drafter_names:
            method.answer([token_ids[row.name] for row in rows], max_new_tokens)


def _summarise(
    dtype: str,
    batch_size: int,
    methods: Sequence[Method],
    blocks: list[TimedBlock],
    token_ids: dict[str, list[int]],
    reference_model: PreTrainedModel | None,
) -> CellResult:
    reference = methods[0].name
    results = []
    for method in methods:
        tasks = list(dict.fromkeys(block.task for block in blocks))
        results.append(
            MethodResult(
                name=method.name,
                drafters=method.drafter_names if isinstance(method, EngineMethod) else None,
                overall=measure_speed(blocks, method.name, reference),
                tasks={task: measure_speed(blocks, method.name, reference, task) for task in tasks},
                equality=(
                    None
                    if method is methods[0]
                    else compare_answers(blocks, method.name, reference, token_ids, reference_model)
                ),
            )
        )
    partial = sum(len(block.prompts) < batch_size for block in blocks if block.method == reference)
    return CellResult(dtype, batch_size, reference, partial, results, blocks)


def compare_answers(
    blocks: Sequence[TimedBlock],
    method: str,
    reference: str,
    token_ids: dict[str, list[int]],
    reference_model: PreTrainedModel | None,
) -> Equality:
    """`token_ids`: of the prompts, by name. With the reference's model, logit gaps are computed where answers part."""
    expected, found = answers_by_prompt(blocks, reference), answers_by_prompt(blocks, method)
    differences = []
    for prompt, answer in expected.items():
        wanted, got = answer.token_ids, found[prompt].token_ids
        position = first_difference(wanted, got)
        if position is None:
            continue
        gap = None
        if reference_model is not None:
            gap = logit_gap(reference_model, [*token_ids[prompt], *wanted[:position]])
        one, other = (tokens[position] if position < len(tokens) else None for tokens in (wanted, got))
        differences.append(Difference(prompt, position, one, other, gap))
    return Equality(len(expected), tuple(differences))


def check_room(token_ids: dict[str, list[int]], info: ModelInfo, max_new_tokens: int) -> int:
    """Tokens of the longest prompt. Raises InvalidRequest for one that the model has no room for with its answer."""
    for name, tokens in token_ids.items():
        if len(tokens) + max_new_tokens > info.max_model_len:
            limit = f"with {max_new_tokens} new ones the model has room for {info.max_model_len}"
            raise InvalidRequest(f"prompt {name}", f"{len(tokens)} tokens", limit)
        side = info.max_side_len
        if side is not None and max(len(tokens), max_new_tokens) > side:
            limit = f"with {max_new_tokens} new ones: the model takes and writes at most {side}"
            raise InvalidRequest(f"prompt {name}", f"{len(tokens)} tokens", limit)
        if not tokens or max(tokens) >= info.vocab_size:
            raise InvalidRequest(f"prompt {name}", f"{len(tokens)} tokens", f"needs 1 or more below {info.vocab_size}")
    return max(len(tokens) for tokens in token_ids.values())
