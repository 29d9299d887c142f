"""CPU time of a request to the draft engine, from the batch that its worker gets to the tree that it answers.

    python tests/bench/bench_draft_request.py [--draft-model auto] [--dtype float32] [--requests 200]

One sequence of a target's own vocabulary, behind a prompt of 200 tokens, which gets one to three random tokens between
requests. Prints the median of one thread in microseconds, for chains and trees, greedy and sampled.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from actors.build import build_draft_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.home import paceline_home
from actors.messages import DraftBatch, DraftItem, SamplingParams, SequenceDelta, SequenceStart
from actors.models.catalog import resolve_model
from actors.options import DraftOptions
from actors.training.drafter_build import resolve_draft_model

PROMPT = 200
CASES = [(1, 1, 0.0), (4, 1, 0.0), (4, 2, 0.0), (4, 1, 0.8)]  # depth, branch, temperature


def request_us(engine: DraftEngine, seq_id: int, depth: int, branch: int, temperature: float, count: int) -> float:
    rng, known, spent = np.random.default_rng(0), 0, []
    begin = SequenceStart(SamplingParams(seed=1, temperature=temperature), PROMPT)
    for turn in range(count + 1):
        new = rng.integers(100, 20_000, (1, 2, 1, 3)[turn % 4] if turn else PROMPT).astype(np.int32)
        delta = SequenceDelta(seq_id, known, new)
        item = DraftItem(delta, depth * branch, None if turn else begin, depth, branch)
        batch = DraftBatch(turn, [item], [] if turn else [seq_id - 1])
        began = time.thread_time_ns()
        engine.draft(batch)
        spent.append((time.thread_time_ns() - began) / 1e3)
        known += len(new)
    return float(np.median(spent[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    home = paceline_home()
    target = resolve_model(given.model, home)
    draft = resolve_draft_model(given.draft_model, target, home)
    assert draft is not None
    options = DraftOptions(kv_cache_tokens=8192, dtype=given.dtype, device="cpu")
    engine = build_draft_engine(draft, options, target=target)
    assert isinstance(engine, DraftEngine)
    for seq_id, (depth, branch, temperature) in enumerate([*CASES, *CASES], 1):  # compiled in the first turn
        found = request_us(engine, seq_id, depth, branch, temperature, given.requests)
        if seq_id > len(CASES):
            print(f"depth {depth}, branch {branch}, temperature {temperature}: {found:.0f} us")


if __name__ == "__main__":
    main()
