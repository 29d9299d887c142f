"""Benchmark prompts: JSON lines, or the questions of Spec-Bench (Xia et al. 2024, arXiv:2401.07851)."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from actors.errors import MISSING, InvalidRequest
from cluster.constraints.structured_outputs import StructuredOutputs

NO_TASK = "prompts"  # task of rows that name none

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_CONTENT_KEYS = ("turns", "prompt", "messages", "prompt_token_ids")
_SHOWN = 60  # characters of a line in an error

_NOT_EMPTY = msgspec.Meta(min_length=1)
_Text = Annotated[str, _NOT_EMPTY]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A conversation up to the answer, or token ids; one of the two is empty."""

    name: str  # the row's id, or its line number
    task: str
    messages: tuple[dict[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    prediction: str = ""  # the probable answer, for the drafter of that name
    constraint: StructuredOutputs | None = None  # of the answer; the same for all rows of a task


class _Message(msgspec.Struct):
    role: _Text
    content: str


class _Row(msgspec.Struct):
    """Other keys are ignored."""

    prompt: _Text | None = None
    turns: Annotated[list[_Text], _NOT_EMPTY] | None = None  # the first is asked
    messages: Annotated[list[_Message], _NOT_EMPTY] | None = None
    prompt_token_ids: Annotated[list[_TokenId], _NOT_EMPTY] | None = None
    id: str | int | None = None
    question_id: str | int | None = None
    task: str | int | None = None
    category: str | int | None = None
    prediction: str | None = None


_decoder = msgspec.json.Decoder(_Row)


def read_bench_prompts(file: Path | None, spec_bench: Path | None) -> list[BenchPrompt]:
    """Rows of --prompts, or of `question.jsonl` in the directory --spec-bench, whichever is given.

    A row has one of `prompt`, `turns`, `messages` or `prompt_token_ids`; optionally `task` or `category`, `id` or
    `question_id`, and a `prediction` of the answer. MT-bench's eight categories are one task. Raises InvalidRequest
    that names file, line and field.
    """
    if file is not None and spec_bench is None:
        return _read_rows(file, "--prompts")
    if spec_bench is not None and file is None:
        return _read_rows(spec_bench / "question.jsonl", "--spec-bench")
    raise InvalidRequest("--prompts", str(file) if file else MISSING, "give either --prompts or --spec-bench")


def user_says(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def tasks_of(prompts: Sequence[BenchPrompt]) -> list[str]:
    """Distinct tasks in order of appearance."""
    return list(dict.fromkeys(prompt.task for prompt in prompts))


def pick_rows(prompts: Sequence[BenchPrompt], per_task: int | None) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
    """(`per_task` prompts of every task, evenly spaced over its rows; the others). None: all of a task."""
    picked: list[BenchPrompt] = []
    left: list[BenchPrompt] = []
    for task in tasks_of(prompts):
        rows = [prompt for prompt in prompts if prompt.task == task]
        count = len(rows) if per_task is None else min(per_task, len(rows))
        chosen = {index * len(rows) // count for index in range(count)}
        for index, row in enumerate(rows):
            (picked if index in chosen else left).append(row)
    return picked, left


def make_blocks(prompts: Sequence[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """Blocks of at most `size` prompts of one task, the tasks in turn, so that a slow minute falls on all tasks."""
    queues = []
    for task in tasks_of(prompts):
        rows = [prompt for prompt in prompts if prompt.task == task]
        queues.append([rows[start : start + size] for start in range(0, len(rows), size)])
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _read_rows(file: Path, option: str) -> list[BenchPrompt]:
    try:
        # Rows end at line feeds alone: splitlines() also breaks at characters that JSON allows.
        lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise InvalidRequest(option, str(file), f"it cannot be read: {error.strerror or error}") from None
    prompts = [
        _read_row(f"{option} {file}:{number}", number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise InvalidRequest(option, str(file), "it must have at least one row")
    name, count = Counter(prompt.name for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise InvalidRequest(f"{option} {file} id", name, "every row needs an id of its own, or none any")
    return prompts


def _read_row(where: str, number: int, line: bytes) -> BenchPrompt:
    shown = line[:_SHOWN].decode(errors="replace")
    try:
        row = _decoder.decode(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(where, shown, f"it must be a row of JSON: {error}") from None
    if sum(getattr(row, key) is not None for key in _CONTENT_KEYS) != 1:
        raise InvalidRequest(where, shown, f"a row needs exactly one of {', '.join(_CONTENT_KEYS)}")
    messages: Any = tuple(map(msgspec.to_builtins, row.messages or ()))
    if text := row.prompt or (row.turns and row.turns[0]):
        messages = user_says(text)
    category = str(_first(row.task, row.category, NO_TASK))
    return BenchPrompt(
        name=str(_first(row.id, row.question_id, number)),
        task="mt_bench" if row.task is None and row.turns and category in _MT_BENCH else category or NO_TASK,
        messages=messages,
        token_ids=tuple(row.prompt_token_ids or ()),
        prediction=row.prediction or "",
    )


def _first(*values: str | int | None) -> str | int | None:
    return next((value for value in values if value is not None), None)
