"""Benchmark prompts: any JSONL file, rows as published benchmarks have them, or the questions of Spec-Bench (Xia et al.
2024, arXiv:2401.07851)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.errors import InvalidRequest
from cluster.request_limits import is_text

SPEC_BENCH_FILE = "question.jsonl"
NO_TASK = "prompts"  # the task of rows that name none

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_CONTENT_KEYS = ("turns", "prompt", "messages", "prompt_token_ids")
_MAX_LINE = 16 * 2**20  # characters; far more than any model has room for
_SHOWN = 60  # characters of a value in an error

Row = dict[str, Any]


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
    benchmark: str = ""  # the task of the one of `BENCHMARKS` whose row it is
    reference: str = ""  # what the first answer is scored against

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
    `prompt_token_ids`, or with the fields of one of `BENCHMARKS`; `task` or `category`, `id` or `question_id`, a
    `prediction` of the (first) answer and a `reference` to score it against may be there, other keys are ignored.

    Raises InvalidRequest that names file, line and field.
    """
    return _read_rows(file, "--prompts")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How a published benchmark writes its rows."""

    name: str
    task: str
    fields: tuple[str, ...]  # a row that has all of them is one of its rows
    question: Callable[[Row], str]  # what the user says; raises InvalidRequest
    id_field: str = "id"
    reference: Callable[[Row], Any] = lambda row: row.get("reference")  # what else than text comes out is none


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not is_text(value) or not value.strip():
        raise InvalidRequest(field, _shown(value), "it must be a text that is not empty")
    return value


def _programming_task(field: str) -> Callable[[Row], str]:
    def question(row: Row) -> str:
        tests = row["test_list"]
        if not _is_list_of(tests, str) or not all(map(is_text, tests)):
            raise InvalidRequest("test_list", _shown(tests), "it must hold texts, at least one")
        lines = "\n".join(tests)
        return f"Write Python code for this task: {_text(row, field)}\nIt must pass these tests:\n{lines}"

    return question


def _translation(row: Row) -> str:
    pair = row["translation"]
    if not isinstance(pair, dict) or not is_text(pair.get("de")) or not pair["de"].strip():
        raise InvalidRequest("translation", _shown(pair), "it must hold a German text under de")
    return f"Translate German to English: {pair['de']}"


def _instruction(row: Row) -> str:
    given = row.get("input") or ""
    if not is_text(given, may_be_empty=True):
        raise InvalidRequest("input", _shown(given), "it must be a text")
    instruction = _text(row, "instruction")
    return f"{instruction}\n\n{given}" if given.strip() else instruction


# The first that fits counts.
BENCHMARKS = (
    Benchmark("MBPP", "mbpp", ("text", "test_list"), _programming_task("text"), "task_id"),
    Benchmark("sanitized MBPP", "mbpp", ("prompt", "test_list"), _programming_task("prompt"), "task_id"),
    Benchmark("HumanEval", "humaneval", ("task_id", "prompt"), lambda row: _text(row, "prompt"), "task_id"),
    Benchmark(
        "CNN/DM",
        "cnn_dm",
        ("article",),
        lambda row: f"Summarize this article: {_text(row, 'article')}",
        reference=lambda row: row.get("highlights"),
    ),
    Benchmark("WMT16", "wmt16", ("translation",), _translation, reference=lambda row: row["translation"].get("en")),
    Benchmark("Alpaca", "alpaca", ("instruction",), _instruction),
    Benchmark(
        "GSM8K", "gsm8k", ("question",), lambda row: _text(row, "question"), reference=lambda row: row.get("answer")
    ),
)


CODE_BENCHMARKS = ("humaneval", "mbpp")  # whose answers are programs


def prompt_of(row: Row, number: int) -> BenchPrompt:
    """What is asked by the row in line `number` of a file. Raises InvalidRequest that names the row's own field, ""
    where it has none that is known.
    """
    own = [key for key in _CONTENT_KEYS if key in row]
    benchmark = next((one for one in BENCHMARKS if set(own) <= set(one.fields) <= row.keys()), None)
    if benchmark is None and len(own) != 1:
        known = "; ".join(f"{', '.join(one.fields)} ({one.name})" for one in BENCHMARKS)
        raise InvalidRequest("", "", f"a row needs exactly one of {', '.join(_CONTENT_KEYS)}, or the fields {known}")
    own_id = row.get(benchmark.id_field, number) if benchmark else number
    name = str(row.get("id", row.get("question_id", own_id)))
    category = str(row.get("task", row.get("category", "")))
    is_mt_bench = "task" not in row and "turns" in row and category in _MT_BENCH
    task = "mt_bench" if is_mt_bench else category or (benchmark.task if benchmark else NO_TASK)
    prediction = row.get("prediction") or ""
    for field, value in (("id", name), ("task", category), ("prediction", prediction)):
        if not is_text(value, may_be_empty=True):
            raise InvalidRequest(field, _shown(value), "it must be a text")
    prompt = BenchPrompt(name, task, category=category, prediction=prediction)
    if benchmark is not None:
        messages = _user_says(benchmark.question(row))
        reference = _reference(benchmark.reference(row))
        return replace(prompt, messages=messages, benchmark=benchmark.task, reference=reference)
    prompt = replace(prompt, reference=_reference(row.get("reference")))
    key, value = own[0], row[own[0]]
    if key == "prompt_token_ids":
        if not _is_list_of(value, int) or any(type(token) is not int or token < 0 for token in value):
            raise InvalidRequest(key, _shown(value), "it must hold token ids, at least one")
        return replace(prompt, token_ids=tuple(value))
    if key == "messages":
        if not _is_list_of(value, dict) or not all(_is_message(message) for message in value):
            raise InvalidRequest(key, _shown(value), "it must hold messages with role and content")
        messages = tuple({"role": message["role"], "content": message["content"]} for message in value)
        return replace(prompt, messages=messages)
    turns = value if key == "turns" else [value]
    if not _is_list_of(turns, str) or not all(map(is_text, turns)):
        raise InvalidRequest(key, _shown(value), "it must hold a text")
    return replace(prompt, messages=_user_says(turns[0]), later_turns=tuple(turns[1:]))


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
        prompts = [
            _read_row(f"{option} {file}:{number}", number, line)
            for number, line in _lines(file, option)
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(option, str(file), f"it cannot be read: {error}") from None
    if not prompts:
        raise InvalidRequest(option, str(file), "it must have at least one row")
    names = Counter(prompt.name for prompt in prompts)
    repeated = next((name for name, count in names.items() if count > 1), None)
    if repeated is not None:
        raise InvalidRequest(f"{option} {file} id", repeated, "every row needs an id of its own, or none any")
    return prompts


def _lines(file: Path, option: str) -> Iterator[tuple[int, str]]:
    """Numbered from 1. A file's lines end where those of JSONL do; splitlines() also breaks at what JSON allows."""
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
        if not error.field:
            raise InvalidRequest(where, line[:_SHOWN], error.limit) from None
        raise InvalidRequest(f"{where} {error.field}", error.value, error.limit) from None


def _reference(value: Any) -> str:
    """Where it is a list, as in Spec-Bench, it has one for each turn."""
    first = value[0] if isinstance(value, list) and value else value
    return first if is_text(first) else ""


def _user_says(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _shown(value: Any) -> str:
    try:
        return str(value)[:_SHOWN]
    except RecursionError:
        return "deeply nested lists"


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, kind) for part in value)


def _is_message(message: dict[str, Any]) -> bool:
    return is_text(message.get("role")) and is_text(message.get("content"), may_be_empty=True)
