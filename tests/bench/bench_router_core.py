"""What a round costs the router itself: plan, draft on the CPU, assemble and commit, with a toy target.

    python tests/bench/bench_router_core.py [--batch 8] [--rounds 2000] [--profile]

Two CPU drafters and a draft worker propose trees of about 16 nodes each; the target and the making of the drafts are
not counted, the router's part of asking for them is. Prints processor time a round in microseconds: median, 90th and
99th percentile.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.messages import DraftBatch, DraftResult, GenerationRequest, SamplingParams
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import toy_info
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 50_000


class ReadyDrafter(CpuDrafter):
    """Hands out trees made in advance: a right chain of some length, with wrong branches."""

    def __init__(self, name: str, target: ToyTarget, seed: int) -> None:
        self.name = name
        self._target = target
        self._random = np.random.default_rng(seed)
        self.seconds = 0.0

    def tree(self, tokens: np.ndarray, max_nodes: int) -> DraftTree:
        count = min(16, max_nodes)
        ids = self._random.integers(0, VOCAB_SIZE, count).astype(np.int32)
        parents = np.empty(count, np.int32)
        confidence = np.empty(count, np.float32)
        context = tokens[-2:].tolist()
        at = -1
        for node in range(count):
            parents[node] = at
            confidence[node] = 0.9 * (confidence[at] if at >= 0 else 1.0)
            if node % 2 == 0 and node < 2 * self._random.integers(1, 6):
                ids[node] = self._target.next_token(context)
                context.append(int(ids[node]))
                at = node
        return DraftTree(ids, parents, confidence)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        began = time.thread_time()
        trees = [self.tree(context.tokens, context.max_nodes) for context in contexts]
        self.seconds += time.thread_time() - began
        return trees


def draft(batch: DraftBatch, worker: ReadyDrafter) -> DraftResult:
    seq_ids, trees = [], []
    for item in batch.items:
        if item.max_nodes:
            tree = worker.tree(item.delta.token_ids, item.max_nodes)
            seq_ids.append(item.delta.seq_id)
            trees.append(tree)
    return DraftResult(batch.round_id, seq_ids, trees)


def measure(batch: int, rounds: int, is_profiled: bool) -> np.ndarray:
    target = ToyTarget(VOCAB_SIZE, 16_384, 16, 1 << 20, seconds=lambda rows: 0.02 + 0.00002 * rows)
    drafters = {name: ReadyDrafter(name, target, seed) for seed, name in enumerate(("suffix", "ngram"))}
    worker = ReadyDrafter("draft_model", target, 9)
    core = RouterCore(
        toy_info(VOCAB_SIZE, 16_384, 16),
        RouterConfig(max_running=batch, max_waiting=100_000, max_prefill_rows=1024),
        SpeculationConfig(max_rows=16 * batch),
        drafters,
        draft_shapes={"draft": DraftShape(8)},
    )
    core.set_draft_workers(["worker"])
    random = np.random.default_rng(0)
    profiler = cProfile.Profile()
    seconds = np.zeros(rounds)
    rows = tokens = nodes = 0
    now = 0.0
    num_requests = 0
    for index in range(rounds):
        while core.num_waiting < batch:
            prompt = random.integers(0, VOCAB_SIZE, 64).astype(np.int32)
            core.add(
                GenerationRequest(
                    request_id=str(num_requests),
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(seed=1),
                    max_new_tokens=1024,
                    stop_token_ids=(VOCAB_SIZE - 1, VOCAB_SIZE - 2),
                ),
                now,
            )
            num_requests += 1
        drafting = sum(drafter.seconds for drafter in drafters.values())
        began = time.thread_time()
        if is_profiled:
            profiler.enable()
        round, _ = core.plan_round(now)
        assert round is not None
        core.draft_locally(round)
        profiler.disable()
        paused = time.thread_time()
        results = {name: draft(message, worker) for name, message in round.asked.batches.items()}
        resumed = time.thread_time()
        if is_profiled:
            profiler.enable()
        message = core.assemble(round, results)
        profiler.disable()
        assembled = time.thread_time()
        answer = target.verify(message)
        now += answer.elapsed_s
        committing = time.thread_time()
        if is_profiled:
            profiler.enable()
        events = core.commit(round, answer, now)
        profiler.disable()
        ended = time.thread_time()
        drafting = sum(drafter.seconds for drafter in drafters.values()) - drafting
        seconds[index] = (paused - began) + (assembled - resumed) + (ended - committing) - drafting
        rows += answer.rows
        nodes += sum(len(item.tree) for item in message.items)
        tokens += sum(len(event.token_ids) for event in events)
    print(f"batch {batch}: {tokens / rounds:.1f} tokens, {nodes / rounds:.1f} nodes, {rows / rounds:.1f} rows a round")
    if is_profiled:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for batch in arguments.batch:
        seconds = measure(batch, arguments.rounds, arguments.profile)[20:] * 1e6
        median, high, highest = np.percentile(seconds, [50, 90, 99])
        print(f"  router's own: {median:.0f} us median, {high:.0f} us p90, {highest:.0f} us p99")


if __name__ == "__main__":
    main()
