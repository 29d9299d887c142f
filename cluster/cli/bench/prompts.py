"""Benchmark prompts: JSON lines, or the questions of Spec-Bench (Xia et al. 2024, arXiv:2401.07851)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.errors import InvalidRequest
from cluster.validation import is_text

NO_TASK = "prompts"  # task of rows that name none

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_CONTENT_KEYS = ("turns", "prompt", "messages", "prompt_token_ids")
_MAX_LINE = 16 * 2**20  # characters
_SHOWN = 60  # characters of a value in an error

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A conversation up to the answer, or token ids; one of the two is empty."""

    name: str  # the row's id, or its line number
    task: str
    messages: tuple[dict[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    prediction: str = ""  # the probable answer, for the drafter of that name


def read_bench_prompts(file: Path | None, spec_bench: Path | None) -> list[BenchPrompt]:
    """Rows of --prompts or --spec-bench, whichever is given. Raises InvalidRequest that names file, line and field."""
    if file is not None and spec_bench is None:
        return read_prompts(file)
    if spec_bench is not None and file is None:
        return read_spec_bench(spec_bench)
    raise InvalidRequest("--prompts", str(file) if file else None, "give either --prompts or --spec-bench")


def read_spec_bench(directory: Path) -> list[BenchPrompt]:
    """The first turn of every question; MT-bench's eight categories are one task. Raises InvalidRequest."""
    return _read_rows(directory / "question.jsonl", "--spec-bench")


def read_prompts(file: Path) -> list[BenchPrompt]:
    """Rows with one of `prompt`, `turns` (of which the first is asked), `messages` or `prompt_token_ids`; optionally
    `task` or `category`, `id` or `question_id`, and a `prediction` of the answer. Other keys are ignored. Raises
    InvalidRequest."""
    return _read_rows(file, "--prompts")


def prompt_of(row: Row, number: int) -> BenchPrompt:
    """The prompt of the row in line `number`. Raises InvalidRequest that names the row's field; "" if it has no known
    one."""
    own = [key for key in _CONTENT_KEYS if key in row]
    if len(own) != 1:
        raise InvalidRequest("", "", f"a row needs exactly one of {', '.join(_CONTENT_KEYS)}")
    name = str(row.get("id", row.get("question_id", number)))
    category = str(row.get("task", row.get("category", "")))
    is_mt_bench = "task" not in row and "turns" in row and category in _MT_BENCH
    task = "mt_bench" if is_mt_bench else category or NO_TASK
    prediction = row.get("prediction") or ""
    for field, text in (("id", name), ("task", category), ("prediction", prediction)):
        if not is_text(text, may_be_empty=True):
            raise InvalidRequest(field, _shown(text), "it must be a text")
    return _with_content(BenchPrompt(name, task, prediction=prediction), own[0], row[own[0]])


def _with_content(prompt: BenchPrompt, key: str, value: Any) -> BenchPrompt:
    if key == "prompt_token_ids":
        if not _is_list_of(value, int) or any(type(token) is not int or token < 0 for token in value):
            raise InvalidRequest(key, _shown(value), "it must hold token ids, at least one")
        return replace(prompt, token_ids=tuple(value))
    if key == "messages":
        if not _is_list_of(value, dict) or not all(_is_message(message) for message in value):
            raise InvalidRequest(key, _shown(value), "it must hold messages with role and content")
        return replace(prompt, messages=tuple({"role": one["role"], "content": one["content"]} for one in value))
    turns = value if key == "turns" else [value]
    if not _is_list_of(turns, str) or not all(map(is_text, turns)):
        raise InvalidRequest(key, _shown(value), "it must hold a text")
    return replace(prompt, messages=({"role": "user", "content": turns[0]},))


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
        lines = [(number, line) for number, line in _lines(file, option) if line.strip()]
        prompts = [_read_row(f"{option} {file}:{number}", number, line) for number, line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, str(file), f"it cannot be read: {error}") from None
    if not prompts:
        raise InvalidRequest(option, str(file), "it must have at least one row")
    name, count = Counter(prompt.name for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise InvalidRequest(f"{option} {file} id", name, "every row needs an id of its own, or none any")
    return prompts


def _lines(file: Path, option: str) -> Iterator[tuple[int, str]]:
    """Lines numbered from 1. They end at line feeds alone: splitlines() also breaks at characters that JSON allows."""
    with file.open(encoding="utf-8-sig") as stream:
        number = 0
        while line := stream.readline(_MAX_LINE + 1):
            number += 1
            if len(line) > _MAX_LINE:
                limit = f"a line may have {_MAX_LINE} characters at most"
                raise InvalidRequest(f"{option} {file}:{number}", line[:_SHOWN], limit)
            yield number, line


def _read_row(where: str, number: int, line: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(where, line[:_SHOWN], f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidRequest(where, line[:_SHOWN], "every line must be a JSON object")
    try:
        return prompt_of(row, number)
    except InvalidRequest as error:
        field, value = (f"{where} {error.field}", error.value) if error.field else (where, line[:_SHOWN])
        raise InvalidRequest(field, value, error.limit) from None


def _shown(value: Any) -> str:
    try:
        return str(value)[:_SHOWN]
    except RecursionError:
        return "deeply nested lists"


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, kind) for part in value)


def _is_message(message: dict[str, Any]) -> bool:
    return is_text(message.get("role")) and is_text(message.get("content"), may_be_empty=True)
