"""Where the time of a round goes on real prompts, and how long a prompt of 1,000 tokens takes beside `transformers`.

    python tests/bench/bench_decoding.py --spec-bench DIR [--dtype float32] [--drafters suffix] [--prompts 12]

Prints means over the rounds without prompts, in milliseconds: of the target (forward, sampling, acceptance and the
engine's bookkeeping), of drafts, and of the rest of the router. Prefill is CPU time of one thread, the least of three.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import load_model
from cluster.offline.engine import LocalEngine
from cluster.router.trace import RoundTrace

_CHARACTERS = 400  # of a prompt, at most
_PREFILL_TOKENS = 1000


class RoundTimes:
    """Sums over the rounds that decode."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, trace: RoundTrace) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if trace.num_emitted == 0 or trace.rows > 60:
            return
        self.sums.update(rounds=1, tokens=trace.num_emitted, rows=trace.rows)
        for name, part in (("round", seconds), ("target", trace.verify_s), ("drafts", trace.draft_s)):
            self.sums[name] += 1e3 * part  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, required=True, help="directory with question.jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafters", default="none")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = (arguments.spec_bench / "question.jsonl").read_text(encoding="utf-8").splitlines()
    count = arguments.prompts
    texts = [json.loads(lines[index * len(lines) // count])["turns"][0][:_CHARACTERS] for index in range(count)]
    engine = LocalEngine(
        arguments.model, draft_model="none", drafters=tuple(arguments.drafters.split(",")), dtype=arguments.dtype,
        batch_size=1,
    )  # fmt: skip
    engine.generate(texts[:2], max_new_tokens=16)
    times = RoundTimes()
    for text in texts:
        times.start()
        engine.generate([text], max_new_tokens=arguments.max_new_tokens, on_round=times)
    sums = times.sums
    means = {name: sums[name] / sums["rounds"] for name in ("target", "drafts", "round", "rows", "tokens")}
    means["rest"] = means["round"] - means["target"] - means["drafts"]
    print(arguments.dtype, arguments.drafters, *(f"{name} {mean:.2f}" for name, mean in means.items()))
    print_prefill(engine, arguments.model, arguments.dtype)


@torch.inference_mode()
def print_prefill(engine: LocalEngine, name: str, dtype: str) -> None:
    model = load_model(resolve_model(name, paceline_home()), dtype)
    ours, theirs = [], []
    for turn in range(3):
        prompt = [(7 * index + 31 * turn) % 1000 + 100 for index in range(_PREFILL_TOKENS)]
        started = time.process_time()
        engine.generate([prompt], max_new_tokens=1)
        ours.append(time.process_time() - started)
        started = time.process_time()
        model(torch.tensor([prompt]), logits_to_keep=1)
        theirs.append(time.process_time() - started)
    own, other = min(ours), min(theirs)
    print(f"{_PREFILL_TOKENS} tokens: {own:.2f} s, transformers {other:.2f} s, ratio {other / own:.2f}")


if __name__ == "__main__":
    main()
