"""Cost of the suffix automaton and of the drafters that read a sequence's own past.

    python tests/bench/bench_suffix_automaton.py

Text: the Spec-Bench prompts (../shared/data/spec_bench beside the checkout) as SmolLM2 tokens where both are present,
else word pieces of library source. Times are CPU seconds of this thread, the best of several runs.
"""

import argparse
import inspect
import json
import re
import time
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.drafters.contract import CpuDrafter, DraftContext
from actors.drafters.registry import create_drafter
from actors.errors import ModelError
from actors.home import paceline_home
from actors.messages import SamplingParams
from actors.models.catalog import resolve_model
from actors.models.loader import load_tokenizer
from cache_service.automata.suffix_automaton import Cursor, SuffixAutomaton, warm_up

QUESTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "spec_bench" / "question.jsonl"
SAMPLING = SamplingParams(seed=0)


def spec_bench_tokens() -> np.ndarray | None:
    """All turns of all questions as SmolLM2 tokens, or None where questions or tokenizer are absent."""
    try:
        lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
        tokenizer = load_tokenizer(resolve_model("smollm2", paceline_home()))
    except (OSError, ModelError):
        return None
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    return np.concatenate([np.array(tokenizer(turn).input_ids, np.int32) for turn in turns])


def source_tokens() -> np.ndarray:
    source = "".join(inspect.getsource(module) for module in (argparse, typing, inspect, np.ma, re))
    ids: dict[str, int] = {}
    return np.array([ids.setdefault(piece, len(ids)) for piece in re.findall(r"\w{1,6}|\s+|[^\w\s]", source)], np.int32)


def measured_texts() -> dict[str, np.ndarray]:
    """What automata are measured on, by name, tokens int32 [n]; the first is text as people write it."""
    text, name = spec_bench_tokens(), "Spec-Bench prompts"
    if text is None:
        text, name = source_tokens(), "library source"
    relabelled = [np.random.default_rng(i).permutation(int(text.max()) + 1).astype(np.int32)[text] for i in range(8)]
    return {
        name: text,
        "8 relabelled copies": np.concatenate(relabelled),
        "uniform of 128,256": np.random.default_rng(0).integers(0, 128_256, 500_000).astype(np.int32),
        "one repeated token": np.zeros(500_000, np.int32),
    }


def built(tokens: np.ndarray) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


def report_automaton(name: str, tokens: np.ndarray) -> None:
    count = len(tokens)
    build = best_seconds(lambda: built(tokens))
    half = built(tokens[: count // 2])
    match = best_seconds(lambda: half.advance(Cursor(), tokens[count // 2 :]))
    growing, most = SuffixAutomaton(), 0.0
    for begin in range(0, count, 1000):
        growing.extend(tokens[begin : begin + 1000])
        if len(growing) >= 10_000:
            most = max(most, growing.memory_bytes / len(growing))
    print(
        f"{name:22} {count:9,} tokens: build {count / build / 1e6:5.2f} M tokens/s, match"
        f" {match / (count - count // 2) * 1e6:.3f} us/token, {growing.memory_bytes / count:.1f} B/token"
        f" (at most {most:.1f} on the way), {1 + len(growing.states()[2]) / count:.2f} states and"
        f" {1 + len(growing.transitions()[0]) / count:.2f} transitions a token"
    )


def report_cost(drafter: CpuDrafter, tokens: np.ndarray) -> None:
    """Microseconds of a round that brings 3 new tokens to sequences of 500, and of the first round."""
    for sequences in (1, 8):
        texts = [tokens[i * 600 : i * 600 + 560] for i in range(sequences)]
        rounds, firsts = [], []
        for _ in range(20):
            for known, size in [(0, 500), *((n, n + 3) for n in range(500, 557, 3))]:
                contexts = [DraftContext(i, text[:size], known, 100, 16, SAMPLING) for i, text in enumerate(texts)]
                begin = time.perf_counter()
                drafter.propose(contexts)
                (rounds if known else firsts).append(time.perf_counter() - begin)
            for i in range(sequences):
                drafter.forget(i)
        print(
            f"{drafter.name:14} {sequences} sequences of 500: {np.median(rounds) * 1e6:6.1f} us a round,"
            f" {np.median(firsts) * 1e6:6.1f} us for the first"
        )


def best_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """CPU seconds of this thread in the best of several runs."""
    times = []
    for _ in range(runs):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def main() -> None:
    warm_up()
    texts = measured_texts()
    for name, tokens in texts.items():
        report_automaton(name, tokens)
    for drafter in ("prompt_lookup", "suffix"):
        report_cost(create_drafter(drafter), next(iter(texts.values())))


if __name__ == "__main__":
    main()
