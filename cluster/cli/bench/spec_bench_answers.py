"""Answer files of Spec-Bench (Xia et al. 2024, arXiv:2401.07851), for that benchmark's own evaluation scripts."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.cli.bench.compare import CompareReport, answer_name
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.speed import TimedBlock, answers_by_prompt


def write_answers(report: CompareReport, questions: Sequence[BenchPrompt], directory: Path) -> list[Path]:
    """One `<method>.jsonl` for every method, rows in order of their ids; files that are there are replaced.

    questions: those of the comparison, and perhaps others, which are left out. Raises OSError.
    """
    directory.mkdir(exist_ok=True)
    files = []
    for method in report.methods:
        file = directory / f"{method.name}.jsonl"
        model_id = f"{report.config['model_name']}-{method.name}-{report.config['dtype']}"
        rows = sorted(answer_rows(report.blocks, method.name, questions, model_id), key=_by_id)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files.append(file)
    return files


def answer_rows(
    blocks: Sequence[TimedBlock], method: str, questions: Sequence[BenchPrompt], model_id: str
) -> Iterator[dict[str, Any]]:
    """A row for every question that the method answered.

    `new_tokens`, `decoding_steps` (rounds) and `wall_time` (seconds) are by turn; `accept_lengths` are the tokens that
    each round committed, of all turns.
    """
    answers = answers_by_prompt(blocks, method)
    for question in questions:
        if question.name not in answers:
            continue
        turns = [answers[answer_name(question.name, turn)] for turn in range(1, question.num_turns + 1)]
        choice = {
            "index": 0,
            "turns": [answer.text.strip() for answer in turns],
            "decoding_steps": [answer.rounds for answer in turns],
            "new_tokens": [len(answer.token_ids) for answer in turns],
            "wall_time": [answer.seconds for answer in turns],
            "accept_lengths": [count for answer in turns for count in answer.round_tokens or ()],
        }
        yield {
            "question_id": int(question.name) if question.name.isdecimal() else question.name,
            "category": question.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }


def _by_id(row: dict[str, Any]) -> tuple[bool, Any]:
    """Numbers before names."""
    return isinstance(row["question_id"], str), row["question_id"]
