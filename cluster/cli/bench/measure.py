"""Has methods answer the same prompts in turn, and sums up what they did."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from actors.errors import InvalidRequest
from actors.models.loader import ModelInfo
from cluster.cli.bench.acceptance import Acceptance, count_acceptance
from cluster.cli.bench.methods import EngineMethod, Method
from cluster.cli.bench.prompts import BenchPrompt, make_blocks
from cluster.cli.bench.speed import Answer, Difference, Speed, TimedBlock, find_differences, measure_speed
from cluster.generation import LengthLimits, check_token_ids
from cluster.offline.results import Generation
from cluster.validation import counted


@dataclass(frozen=True, slots=True)
class MethodResult:
    name: str
    overall: Speed
    tasks: dict[str, Speed]
    # To the reference's answers; None: it is the reference, or was not constrained as the reference was.
    differences: tuple[Difference, ...] | None = None
    is_constrained: bool = True  # as the reference is
    drafters: tuple[str, ...] | None = None  # None: not a Paceline engine
    gamma: int | None = None  # of its draft model
    acceptance: Acceptance | None = None  # None: not counted


@dataclass(frozen=True, slots=True)
class Comparison:
    methods: list[MethodResult]  # the first is the reference
    blocks: list[TimedBlock]


def describe_machine() -> dict[str, str | int]:
    """What speed depends on besides models and options."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def encode_prompts(
    rows: Iterable[BenchPrompt], info: ModelInfo, tokenizer: Any, max_new_tokens: int
) -> dict[str, list[int]]:
    """Token ids by name of the row. Raises InvalidRequest for one that the model has no room for."""
    found = {row.name: encode_prompt(row, tokenizer) for row in rows}
    for name, token_ids in found.items():
        check_token_ids(f"prompt {name}", token_ids, info.vocab_size)
        limits = LengthLimits(
            max_model_len=info.max_model_len,
            max_side_len=info.max_side_len,
            prompt_field=f"prompt {name}",
            max_tokens_field=f"--max-new-tokens for prompt {name}",
        )
        limits.num_new_tokens(max_new_tokens, max_new_tokens, len(token_ids))
    return found


def encode_prompt(prompt: BenchPrompt, tokenizer: Any) -> list[int]:
    """Token ids through the model's chat template; plain text where it has none. Raises InvalidRequest."""
    if prompt.token_ids:
        return list(prompt.token_ids)
    messages = list(prompt.messages)
    if tokenizer.chat_template:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    if len(messages) > 1:
        limit = "the model has no chat template, so a prompt can be one message only"
        raise InvalidRequest(f"prompt {prompt.name}", counted(len(messages), "message"), limit)
    return list(tokenizer.encode(messages[0]["content"]))


def compare_methods(
    methods: Sequence[Method],
    rows: Sequence[BenchPrompt],
    token_ids: Mapping[str, list[int]],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None],
) -> Comparison:
    """Every method on every block of rows; the method that goes first changes with each block. Row i is sampled with
    `seed` plus i. The first method is the reference."""
    seeds = {row.name: seed + index for index, row in enumerate(rows)}
    blocks, timed = make_blocks(rows, batch_size), []
    for index, block in enumerate(blocks):
        progress(index, len(blocks))
        names, prompts = tuple(row.name for row in block), [token_ids[row.name] for row in block]
        predictions = [row.prediction for row in block]
        first = index % len(methods)
        for method in (*methods[first:], *methods[:first]):
            started = method.now()
            asked = prompts, max_new_tokens, seeds[names[0]], predictions
            constraint = block[0].constraint
            if constraint is None or not isinstance(method, EngineMethod):  # the others have no constraints
                answers: Sequence[Answer | Generation] = method.answer(*asked)
            else:
                answers = method.answer(*asked, constraint)
            seconds = method.now() - started
            timed.append(TimedBlock(method.name, block[0].task, names, seconds=seconds, answers=tuple(answers)))
    progress(len(blocks), len(blocks))
    return Comparison([_result(method, methods[0].name, timed) for method in methods], timed)


def _result(method: Method, reference: str, blocks: Sequence[TimedBlock]) -> MethodResult:
    engine = method if isinstance(method, EngineMethod) else None
    tasks = dict.fromkeys(block.task for block in blocks)
    is_same_task = method.name != reference and (engine is None or engine.is_constrained)
    return MethodResult(
        name=method.name,
        overall=measure_speed(blocks, method.name, reference),
        tasks={task: measure_speed(blocks, method.name, reference, task) for task in tasks},
        differences=find_differences(blocks, method.name, reference) if is_same_task else None,
        is_constrained=engine is None or engine.is_constrained,
        drafters=None if engine is None else engine.engine.drafter_names,
        gamma=None if engine is None else engine.gamma,
        acceptance=None if engine is None or engine.traces is None else count_acceptance(engine.traces),
    )
