"""`paceline compare`: sets of drafters beside each other and beside decoding without drafts, on the same prompts.

Every set has an engine of its own. They answer a block of prompts before the next block begins and take turns at going
first, so that noise of the machine falls on all of them. Of a prompt with several turns all are answered, each after
the conversation before it; each counts as an answer. Times are wall times from prompt token ids to answers, prefill
included. Noting who proposed what is in them too, about 0.1 ms a round of an engine with drafters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from actors.options import Quantization
from cluster.cli.bench.acceptance import Acceptance, AcceptanceCounter
from cluster.cli.bench.local import MethodResult, check_room, compare_answers, encode_prompt, interleave, warm_up
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.methods import EngineMethod, EngineSettings, create_engines
from cluster.cli.bench.prompts import BenchPrompt, make_blocks, pick_rows, tasks_of
from cluster.cli.bench.speed import Answer, TimedBlock, answers_by_prompt, measure_speed
from cluster.config import paceline_home


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """What to compare. A row's prompt is sampled with `seed` plus the row's place among those that are asked."""

    prompts: tuple[BenchPrompt, ...]
    drafters: tuple[tuple[str, ...], ...]  # an engine for each set, beside the one without drafts
    model: str = "smollm2"
    draft_model: str = "auto"
    eagle_head: str = "none"
    corpora: tuple[str, ...] = ()  # for the sets that draft from corpora
    rows_per_task: int | None = None  # None: all
    max_new_tokens: int = 128  # of each turn
    temperature: float = 0.0
    seed: int = 0
    gammas: tuple[int, ...] = (4,)  # an engine with a draft model for each
    branch: int = 2
    max_draft_tokens: int = 16
    batch_size: int = 1
    dtype: str = "float32"
    quantization: Quantization = "none"
    device: str = "auto"
    exact: Literal["default", "bitwise"] = "default"


@dataclass(frozen=True, slots=True)
class ComparedMethod(MethodResult):
    target_rows: int  # computed by the target, prompts included
    rows_per_token: float  # without prompts: those of the rounds that emitted tokens, by the tokens
    acceptance: Acceptance
    gamma: int | None = None  # of its draft model; None: it has none


@dataclass(frozen=True, slots=True)
class CompareReport:
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    config: dict[str, Any]
    reference: str  # the method without drafts
    methods: list[ComparedMethod]  # the reference first
    blocks: list[TimedBlock]  # one for every method, block of prompts and turn

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_compare(plan: ComparePlan, progress: Progress = silent) -> CompareReport:
    """Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used."""
    source = resolve_model(plan.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    rows = pick_rows(plan.prompts, plan.rows_per_task)[0]
    longest = max(_room_for_turns(row, info, tokenizer, plan.max_new_tokens) for row in rows)
    machine = describe_machine()
    settings = EngineSettings(
        model=plan.model,
        draft_model=plan.draft_model,
        dtype=plan.dtype,
        device=plan.device,
        exact=plan.exact,
        batch_size=plan.batch_size,
        max_draft_tokens=plan.max_draft_tokens,
        gammas=plan.gammas,
        branch=plan.branch,
        eagle_head=plan.eagle_head,
        quantization=plan.quantization,
        corpora=plan.corpora,
        temperature=plan.temperature,
    )
    methods = create_engines(settings, plan.drafters, longest)
    warm_up(methods, tokenizer, plan.batch_size, plan.max_new_tokens)
    counters = {method.name: AcceptanceCounter() for method in methods}
    for method in methods:
        method.on_round = counters[method.name].add
    seeds = {row.name: plan.seed + index for index, row in enumerate(rows)}

    def ask(method: EngineMethod, block: Sequence[BenchPrompt]) -> list[TimedBlock]:
        return ask_all_turns(method, block, tokenizer, plan.max_new_tokens, seeds[block[0].name])

    blocks = interleave(methods, make_blocks(rows, plan.batch_size), ask, "comparing", progress)
    config = {key: value for key, value in asdict(plan).items() if key != "prompts"}
    config["num_prompts"] = {task: sum(row.task == task for row in rows) for task in tasks_of(rows)}
    config["model_name"] = info.name
    config["weights"] = info.weights_fingerprint
    reference = methods[0].name
    compared = [_summarise(method, reference, blocks, counters[method.name].result()) for method in methods]
    return CompareReport(machine, describe_versions(), config, reference, compared, blocks)


def ask_all_turns(
    method: EngineMethod, block: Sequence[BenchPrompt], tokenizer: Any, max_new_tokens: int, seed: int
) -> list[TimedBlock]:
    """A timed block for every turn; prompts with fewer turns are missing from the later ones."""
    timed: list[TimedBlock] = []
    rows, turn = list(block), 1
    while rows:
        prompts = [encode_prompt(row, tokenizer) for row in rows]
        started = time.perf_counter()
        answers = method.answer(prompts, max_new_tokens, seed, [row.prediction for row in rows])
        seconds = time.perf_counter() - started
        names = tuple(answer_name(row.name, turn) for row in rows)
        timed.append(TimedBlock(method.name, block[0].task, names, seconds, tuple(answers)))
        rows = [next_turn(row, answer.text) for row, answer in zip(rows, answers, strict=True) if row.later_turns]
        turn += 1
    return timed


def answer_name(prompt: str, turn: int) -> str:
    """What reports call the answer to a prompt's turn; turns count from 1."""
    return prompt if turn == 1 else f"{prompt}, turn {turn}"


def next_turn(prompt: BenchPrompt, answer: str) -> BenchPrompt:
    """The conversation after an answer, with what the user says next."""
    said = ({"role": "assistant", "content": answer.strip()}, {"role": "user", "content": prompt.later_turns[0]})
    return replace(prompt, messages=(*prompt.messages, *said), later_turns=prompt.later_turns[1:], prediction="")


def _room_for_turns(row: BenchPrompt, info: ModelInfo, tokenizer: Any, max_new_tokens: int) -> int:
    """Tokens of a whole conversation if every answer is as long as it may be."""
    new_tokens, whole = row.num_turns * max_new_tokens, row
    while whole.later_turns:
        whole = next_turn(whole, ".")
    return check_room({row.name: encode_prompt(whole, tokenizer)}, info, new_tokens) + new_tokens


def _summarise(
    method: EngineMethod,
    reference: str,
    blocks: Sequence[TimedBlock],
    acceptance: Acceptance,
) -> ComparedMethod:
    tasks = dict.fromkeys(block.task for block in blocks)
    answers = list(answers_by_prompt(blocks, method.name).values())
    num_tokens = _total(answers, lambda answer: len(answer.token_ids))
    emitting_rows = _total(answers, lambda answer: answer.rounds + answer.draft_tokens)
    return ComparedMethod(
        name=method.name,
        drafters=method.drafter_names,
        overall=measure_speed(blocks, method.name, reference),
        tasks={task: measure_speed(blocks, method.name, reference, task) for task in tasks},
        equality=None if method.name == reference else compare_answers(blocks, method.name, reference, {}, None),
        target_rows=_total(answers, lambda answer: answer.target_rows or 0),
        rows_per_token=emitting_rows / num_tokens if num_tokens else 0.0,
        acceptance=acceptance,
        gamma=method.gamma,
    )


def _total(answers: Sequence[Answer], count: Callable[[Answer], int]) -> int:
    return sum(count(answer) for answer in answers)
