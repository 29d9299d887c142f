"""Benchmark prompts: any JSONL file, or the questions of Spec-Bench (Xia et al. 2024, arXiv:2401.07851)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.errors import InvalidRequest

SPEC_BENCH_FILE = "question.jsonl"
NO_TASK = "prompts"  # the task of rows that name none

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_CONTENT_KEYS = ("turns", "prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One conversation up to the answer, or token ids as they are; one of the two is empty."""

    name: str  # its id in the file, else its line number
    task: str
    messages: tuple[dict[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    later_turns: tuple[str, ...] = ()  # what the user says next, each after the answer to what came before
    category: str = ""  # as the file calls the task; empty where it names none
    prediction: str = ""  # what the first answer will probably be

    @property
    def num_turns(self) -> int:
        return 1 + len(self.later_turns)


def read_spec_bench(directory: Path) -> list[BenchPrompt]:
    """Every question in `directory`/question.jsonl; MT-bench's eight categories are one task.

    Raises InvalidRequest.
    """
    return _read_rows(directory / SPEC_BENCH_FILE, "--spec-bench")


def read_prompts(file: Path) -> list[BenchPrompt]:
    """Rows with exactly one of `prompt` (text that a user says), `turns` (several, one after the other), `messages` or
    `prompt_token_ids`; `task` or `category`, `id` or `question_id`, and a `prediction` of the (first) answer may be
    there, other keys are ignored.

    Raises InvalidRequest.
    """
    return _read_rows(file, "--prompts")


def tasks_of(prompts: Sequence[BenchPrompt]) -> list[str]:
    """Distinct tasks in order of appearance."""
    return list(dict.fromkeys(prompt.task for prompt in prompts))


def pick_rows(prompts: Sequence[BenchPrompt], per_task: int | None) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
    """(`per_task` prompts of every task, evenly spaced over its rows; the others). None or too many: all of a task."""
    picked: list[BenchPrompt] = []
    left: list[BenchPrompt] = []
    for task in tasks_of(prompts):
        rows = [prompt for prompt in prompts if prompt.task == task]
        count = len(rows) if per_task is None else min(per_task, len(rows))
        chosen = {index * len(rows) // count for index in range(count)}
        picked += [row for index, row in enumerate(rows) if index in chosen]
        left += [row for index, row in enumerate(rows) if index not in chosen]
    return picked, left


def make_blocks(prompts: Sequence[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """Blocks of `size` prompts of one task (a task's last may be smaller), the tasks in turn: a slow minute of the
    machine then falls on all tasks."""
    queues = []
    for task in tasks_of(prompts):
        rows = [prompt for prompt in prompts if prompt.task == task]
        queues.append([rows[start : start + size] for start in range(0, len(rows), size)])
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def _read_rows(file: Path, option: str) -> list[BenchPrompt]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines() also breaks at characters JSON allows
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, str(file), f"it cannot be read: {error}") from None
    prompts = [
        _read_row(f"{option} {file}:{number}", number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise InvalidRequest(option, str(file), "it must have at least one row")
    names = Counter(prompt.name for prompt in prompts)
    repeated = next((name for name, count in names.items() if count > 1), None)
    if repeated is not None:
        raise InvalidRequest(f"{option} {file} id", repeated, "every row needs an id of its own, or none any")
    return prompts


def _read_row(where: str, number: int, line: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(where, line[:60], f"not valid JSON: {error}") from None
    keys = [key for key in _CONTENT_KEYS if isinstance(row, dict) and key in row]
    if len(keys) != 1:
        raise InvalidRequest(where, line[:60], f"a row needs exactly one of {', '.join(_CONTENT_KEYS)}")
    name = str(row.get("id", row.get("question_id", number)))
    category = str(row.get("task", row.get("category", "")))
    task = "mt_bench" if category in _MT_BENCH else category or NO_TASK
    prediction = row.get("prediction") or ""
    if not isinstance(prediction, str):
        raise InvalidRequest(f"{where} prediction", str(prediction)[:60], "it must be a text")
    prompt = BenchPrompt(name, task, category=category, prediction=prediction)
    key, value = keys[0], row[keys[0]]
    if key == "prompt_token_ids":
        if not _is_list_of(value, int) or any(type(token) is not int or token < 0 for token in value):
            raise InvalidRequest(f"{where} {key}", str(value)[:60], "it must hold token ids, at least one")
        return replace(prompt, token_ids=tuple(value))
    if key == "messages":
        if not _is_list_of(value, dict) or not all(_is_message(message) for message in value):
            raise InvalidRequest(f"{where} {key}", str(value)[:60], "it must hold messages with role and content")
        messages = tuple({"role": message["role"], "content": message["content"]} for message in value)
        return replace(prompt, messages=messages)
    turns = value if key == "turns" else [value]
    if not _is_list_of(turns, str) or not all(turns):
        raise InvalidRequest(f"{where} {key}", str(value)[:60], "it must hold a text")
    return replace(prompt, messages=({"role": "user", "content": turns[0]},), later_turns=tuple(turns[1:]))


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, kind) for part in value)


def _is_message(message: dict[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
