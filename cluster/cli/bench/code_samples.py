"""Programs that answer HumanEval (Chen et al. 2021, arXiv:2107.03374) and MBPP (Austin et al. 2021, arXiv:2108.07732),
in files as the harness of HumanEval reads them; MBPP was published without a harness. Code that a model wrote is never
run here: harnesses do that, in a sandbox of your choice."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from cluster.cli.bench.compare import CompareReport
from cluster.cli.bench.prompts import CODE_BENCHMARKS, BenchPrompt
from cluster.cli.bench.speed import answers_by_prompt

_BLOCK = re.compile(r"```[ \t]*([\w.+-]*)[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)  # its language and its lines
_ENDS = {
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("),  # what Chen et al. stop a completion at
    "mbpp": ("\nassert ", "\nif ", "\nprint("),  # a whole program: imports and functions belong to it
}


def write_samples(report: CompareReport, prompts: Sequence[BenchPrompt], directory: Path) -> list[Path]:
    """`<method>-<benchmark>.jsonl` for every method and code benchmark: `task_id` and `completion` of every row that
    was answered, in order of the prompts; files that are there are replaced. Raises OSError."""
    directory.mkdir(exist_ok=True)
    files = []
    for method in report.methods:
        answers = answers_by_prompt(report.blocks, method.name)
        for benchmark in CODE_BENCHMARKS:
            rows = [
                {"task_id": task_id(prompt), "completion": code_of(answers[prompt.name].text, benchmark)}
                for prompt in prompts
                if prompt.benchmark == benchmark and prompt.name in answers
            ]
            if rows:
                file = directory / f"{method.name}-{benchmark}.jsonl"
                file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                files.append(file)
    return files


def task_id(prompt: BenchPrompt) -> str | int:
    """As the benchmark writes it: MBPP has numbers."""
    return int(prompt.name) if prompt.benchmark == "mbpp" and prompt.name.isdecimal() else prompt.name


def code_of(answer: str, benchmark: str) -> str:
    """What of an answer is code: its first block of Python, or of no language, between ``` where it has one (a whole
    function there replaces the prompt's), else its beginning up to where something new is started at the margin."""
    for language, lines in _BLOCK.findall(answer):
        if not language or language.lower().startswith("py"):
            return str(lines) + "\n"
    ends = [at for at in map(answer.find, _ENDS[benchmark]) if at >= 0]
    return answer[: min(ends)] if ends else answer
