"""Whether two checkouts emit the same tokens, and each of them the same with any drafter.

    python tests/bench/same_tokens.py --against CHECKOUT [--spec-bench DIR] [--model tiny] [--count 60] [--tokens 16]

Each checkout answers the prompts in a process of its own, with the packages of its own: greedy and with seeds, with
every drafter, in float32, and under `exact: bitwise` in every dtype. Prints a row for each case that differs: from the
other checkout, or from the answers without drafts, which float32 and bitwise must both keep. Rows are taken to be
cheap, so that drafts are verified whatever the machine. The exit status is 1 if a checkout differs from the other.
Answers in 16-bit dtypes without `bitwise` may differ by rounding; `--dtypes` adds them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TINY = "tiny"
HERE = Path(__file__).resolve().parents[2]
BITWISE_DTYPES = ("float32", "bfloat16", "float16")
# `cache` and `retrieval` need a store and corpora, `eagle` a trained head.
CPU_DRAFTERS = ("lookahead", "ngram_table", "prediction", "prompt_lookup", "soft_ngram", "suffix", "token_recycling")
MODEL_DRAFTERS = ("draft_model", "ouroboros")
DECODING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}


class Case(NamedTuple):
    exact: str
    dtype: str
    decoding: str
    drafter: str


def cases_of(drafters: Iterable[str], dtypes: Iterable[str], exact: Iterable[str]) -> list[Case]:
    kinds = [("default", dtype) for dtype in dtypes] if "default" in exact else []
    kinds += [("bitwise", dtype) for dtype in BITWISE_DTYPES] if "bitwise" in exact else []
    return [
        Case(*kind, decoding, drafter) for kind in kinds for decoding in DECODING for drafter in ("none", *drafters)
    ]


def prompts_of(spec_bench: Path | None, count: int, most_characters: int) -> list[str]:
    """Evenly spaced questions, or texts that repeat some of their words."""
    if spec_bench is not None:
        lines = (spec_bench / "question.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["turns"][0] for line in lines if line.strip()]
        return [texts[index * len(texts) // count][:most_characters] for index in range(count)]
    rng = np.random.default_rng(0)
    words = ["oak", "elm", "pine", "ash", "river", "stone", "and", "the", "under", "of", "12", "(x)"]
    return [" ".join(rng.choice(words, int(rng.integers(4, 30))))[:most_characters] for _ in range(count)]


def answers(task: dict[str, Any]) -> Iterator[list[list[int]] | str]:
    """Token ids of each prompt's answer, case by case; the error of a case that is refused."""
    from cluster.offline.engine import LocalEngine

    engine, made_for = None, None
    for case in (Case(*case) for case in task["cases"]):
        try:
            if engine is None or made_for != case._replace(decoding=""):
                engine, made_for = None, case._replace(decoding="")
                engine = LocalEngine(
                    task["model"],
                    drafters=(case.drafter,),
                    draft_model=task["draft_model"] if case.drafter in MODEL_DRAFTERS else "none",
                    dtype=case.dtype,
                    exact=case.exact,
                    seconds_of_rows=lambda rows: 0.02 + 1e-6 * rows,
                )
            done = engine.generate(
                task["prompts"], max_new_tokens=task["tokens"], seed=17, predictions=task["prompts"],
                **DECODING[case.decoding],
            )  # fmt: skip
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
        else:
            yield [one.token_ids for one in done]


def answers_of(checkout: Path, task: dict[str, Any]) -> list[list[list[int]] | str]:
    """`answers` in a process with the checkout's packages."""
    paths = [str(checkout), str(checkout / "tests" / "support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--answer"], env=environment, cwd=checkout, input=json.dumps(task), text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found: list[list[list[int]] | str] = json.loads(done.stdout.splitlines()[-1])
    return found


class Difference(NamedTuple):
    case: Case
    between: str
    prompts: int  # that differ
    first: str  # prompt and token


def differences(
    cases: list[Case], ours: list[list[list[int]] | str], others: list[list[list[int]] | str]
) -> list[Difference]:
    """Between the checkouts, and between a case of ours and the one of its group without drafts."""
    found = []
    plain = {case._replace(drafter=""): mine for case, mine in zip(cases, ours, strict=True) if case.drafter == "none"}
    for case, mine, other in zip(cases, ours, others, strict=True):
        found += _compared(case, "checkouts", mine, other)
        if not isinstance(mine, str) and (case.exact == "bitwise" or case.dtype == "float32"):
            found += _compared(case, "drafts", mine, plain[case._replace(drafter="")])
    return found


def _compared(case: Case, between: str, one: Any, other: Any) -> list[Difference]:
    if one == other:
        return []
    if isinstance(one, str) or isinstance(other, str):
        return [Difference(case, between, 0, f"{one!s:.60} / {other!s:.60}")]
    wrong = [index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    first, second = one[wrong[0]], other[wrong[0]]
    at = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return [
        Difference(
            case, between, len(wrong), f"prompt {wrong[0]}, token {at}: {first[at : at + 3]}, {second[at : at + 3]}"
        )
    ]


def tiny_models(folder: Path) -> tuple[Path, Path]:
    """A target, and a draft model of another seed."""
    from paceline_testing.tiny_models import save_tiny_model

    shape: dict[str, Any] = {"max_positions": 1024, "hidden_size": 48}
    return save_tiny_model(folder / "target", "llama", 3, **shape), save_tiny_model(
        folder / "draft", "llama", 4, layers=1, **shape
    )


def compare(against: Path, task: dict[str, Any]) -> tuple[list[Difference], list[str], list[int]]:
    """Differences, refused cases, and the number of prompts and tokens of the answers that were compared."""
    cases = [Case(*case) for case in task["cases"]]
    ours = answers_of(HERE, task)
    others = answers_of(against, task)
    refused = [f"{' '.join(case)}: {found}" for case, found in zip(cases, ours, strict=True) if isinstance(found, str)]
    given = [answer for found in ours if not isinstance(found, str) for answer in found]
    return differences(cases, ours, others), refused, [len(given), sum(map(len, given))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--spec-bench", type=Path, help="directory with question.jsonl; without it, made-up prompts")
    parser.add_argument("--model", default=TINY, help="a model's name or directory, or tiny: one that is made")
    parser.add_argument("--draft-model", help="for the drafters that need one; tiny models have theirs")
    parser.add_argument("--count", type=int, default=60, help="prompts")
    parser.add_argument("--characters", type=int, default=200, help="of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--drafters", nargs="*")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="without `bitwise`")
    parser.add_argument("--exact", nargs="+", choices=["default", "bitwise"], default=["default", "bitwise"])
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        print(json.dumps(list(answers(json.loads(sys.stdin.read())))))
        return 0
    if given.against is None:
        parser.error("--against is missing: the checkout to compare with")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model, draft_model = given.model, given.draft_model
        if model == TINY:
            model, draft_model = map(str, tiny_models(Path(folder)))
        drafters = given.drafters
        if drafters is None:
            drafters = [*CPU_DRAFTERS, *(MODEL_DRAFTERS if draft_model else ())]
        cases = cases_of(drafters, given.dtypes, given.exact)
        task = {
            "model": model, "draft_model": draft_model, "cases": cases, "tokens": given.tokens,
            "prompts": prompts_of(given.spec_bench, given.count, given.characters),
        }  # fmt: skip
        found, refused, (answers_given, tokens) = compare(given.against.resolve(), task)
    print(f"{len(cases)} cases, {answers_given} answers, {tokens} tokens; {time.perf_counter() - began:.0f} s")
    for line in refused:
        print(f"refused: {line}")
    print("\n| exact | dtype | decoding | drafter | between | prompts | first |\n|---|---|---|---|---|---|---|")
    for one in found:
        print(f"| {' | '.join(one.case)} | {one.between} | {one.prompts} | {one.first} |")
    if not found:
        print("| none | | | | | | |")
    return 1 if any(one.between == "checkouts" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
