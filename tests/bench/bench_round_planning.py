"""What a round of the target engine costs outside the model: the host work that a device waits for.

    python tests/bench/bench_round_planning.py [--against CHECKOUT] [--rounds 200] [--context 8192]

A real `TargetEngine` verifies trees of sequences with a long context; launches (and for `padded` attention the forward
and the draws) give answers prepared before. Two draft nodes of each tree are accepted and one of them moves. Prints
processor time a round in microseconds, median: the total alone, and its parts with timers around them; then that of
rounds which are sent ahead, by when it is spent. `triton_tree` lays everything out for one copy to the device, which is
a copy within the host's memory here. `--against` measures another checkout in the same run, in turn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.draft_tree import DraftTree
from actors.engine import device_rounds, host_rounds, kv_cache, model_runner, planned_round, target_engine
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import (
    AheadItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
)

BLOCK = 16
VOCAB_SIZE = 4096
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
SHAPES = [(1, 7), (8, 7), (32, 7), (32, 31)]  # sequences, nodes of each tree
SHAPES_AHEAD = [(1, 0), (8, 0), (32, 0), *SHAPES]
# Part of a round: the functions that do it, by module.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "tree checks": [(target_engine, "valid_trees")],
    "follow": [(target_engine.SequenceTable, "take_in")],
    "rows": [(planned_round.PlannedRound, "pack"), (device_rounds, "sizes_of"), (device_rounds, "write_round")],
    "row sampling": [(planned_round.PlannedRound, "sampling"), (device_rounds.AdjustmentTable, "assign")],
    "send": [(model_runner, "send_written")],
    "moves": [(kv_cache.KvCache, "copy_slots")],
    "plan": [(model_runner, "PaddedPlan")],
    "read": [(device_rounds.DeviceRounds, "read"), (host_rounds, "walk_trees")],
    "result": [(TargetEngine, "result")],
    "rest": [(TargetEngine, "verify")],
}


class Timers:
    """Time of each part without the parts inside it, in nanoseconds."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner: list[int] = [0]

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - began
                self.spent[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed


@contextmanager
def timed_parts(parts: dict[str, list[tuple[Any, str]]]) -> Iterator[Timers]:
    """parts: where the functions of each are; those that a checkout does not have are left out."""
    timers = Timers()
    replaced = []
    for part, places in parts.items():
        for owner, name in places:
            if hasattr(owner, name):
                replaced.append((owner, name, getattr(owner, name)))
                setattr(owner, name, timers.around(part, replaced[-1][2]))
    try:
        yield timers
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)


def launched(result: Any) -> Any:
    """What a launch of a round returns."""
    return device_rounds._Launched(result, torch.empty(0, dtype=torch.int64), None, None)


def engine_of(attention: str, num_blocks: int, nodes: int) -> TargetEngine:
    """An engine whose model answers at once with tokens that accept the nodes 0 and 2 of every tree."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = TargetEngine(model.eval(), EngineOptions(num_blocks, BLOCK, attention=attention))
    answers: dict[Any, Any] = {}

    def launch(inputs: Any, shape: Any, launch: Any, **_: Any) -> Any:
        if shape is None:
            return None
        # Of the padded shape of the round, which is what comes back from the device.
        num_trees = len(inputs.more[3]) - 1
        key = num_trees, shape
        if key not in answers:
            walked = np.zeros((num_trees, 2 + shape.nodes), np.int64)
            walked[:, 1] = 1
            if nodes and shape.nodes >= nodes:
                walked[:, :4] = 2, 0, 0, 2
            answers[key] = launched(torch.from_numpy(walked.reshape(-1)))
        return answers[key]

    logits = torch.zeros(4096, VOCAB_SIZE)
    engine._runner.launch = launch
    engine._runner._whole = None
    engine._runner._run = lambda token_ids, positions, plan, rows: logits[: len(rows)]
    return engine


@contextmanager
def prepared_draws(sequences: int, nodes: int) -> Iterator[None]:
    """Rounds of the host's code get the same tokens."""
    drawn = np.zeros((sequences, 1 + nodes), np.int64)
    drawn[:, 0], drawn[:, 1] = 1, 3  # token 0 comes after them, which no node has
    tokens = torch.from_numpy(drawn.reshape(-1))
    sample_tokens = host_rounds.sample_tokens
    host_rounds.sample_tokens = lambda logits, rows, **_: tokens[: len(rows)]
    try:
        yield
    finally:
        host_rounds.sample_tokens = sample_tokens


def tree_of(nodes: int) -> DraftTree:
    """Node i has the token i + 1 and, as far as there are so many, the children 2 i + 1 and 2 i + 2."""
    parents = [(node - 1) // 2 if node else -1 for node in range(nodes)]
    confidence = np.linspace(0.9, 0.1, nodes, dtype=np.float32)
    return DraftTree(np.arange(1, nodes + 1, dtype=np.int32), np.array(parents, np.int32), confidence)


def measure(
    sequences: int, nodes: int, kind: str, attention: str = "triton_tree", rounds: int = 200, context: int = 8192
) -> dict[str, float]:
    """Microseconds a round: `total` and each part."""
    warm = min(10, rounds // 2)
    blocks = -(-(context + 6 * rounds + nodes + 64) // BLOCK)
    engine = engine_of(attention, sequences * blocks, nodes)
    rng = np.random.default_rng(0)
    length = context
    with prepared_draws(sequences, nodes):
        for index in range(sequences):
            # Words of a text are used again: about 1,500 different ones in 8,192.
            prompt = (rng.zipf(1.3, context) % VOCAB_SIZE).astype(np.int32)
            start = SequenceStart(SamplingParams(index, **KINDS[kind]), context)
            engine.verify(VerifyBatch(0, [VerifyItem(SequenceDelta(index + 1, 0, prompt), context, None, start)]))
        tree = tree_of(nodes)

        def play() -> Iterator[float]:
            nonlocal length
            for number in range(rounds):
                committed = np.array([1, 3, 0] if length > context else [1], np.int32)
                items = [
                    VerifyItem(SequenceDelta(index + 1, length, committed.copy()), 256, tree)
                    for index in range(sequences)
                ]
                length += len(committed)
                began = time.thread_time_ns()
                result = engine.verify(VerifyBatch(number + 1, items))
                yield (time.thread_time_ns() - began) / 1000
                assert [verdict.path.tolist() for verdict in result.verdicts] == [[0, 2]] * sequences

        found = {"total": float(np.median(list(play())[warm:]))}
        with timed_parts(PARTS) as timers:
            by_round = []
            for _ in play():
                by_round.append(timers.spent.copy())
                timers.spent.clear()
        for part in PARTS:
            found[part] = float(np.median([spent[part] for spent in by_round])) / 1000
    return found


def guess_of(nodes: int) -> DraftTree:
    """The tokens that come true, and `tree_of` behind them."""
    emitted = [1, 3, 0] if nodes else [1]
    tree = tree_of(nodes)
    depth = len(emitted)
    return DraftTree(
        np.concatenate([np.array(emitted, np.int32), tree.token_ids]),
        np.concatenate([np.arange(-1, depth - 1, dtype=np.int32), tree.parents + np.int32(depth)]),
        np.concatenate([np.ones(depth, np.float32), tree.confidence]),
    )


def measure_ahead(sequences: int, nodes: int, kind: str, rounds: int = 200, context: int = 8192) -> dict[str, float]:
    """Microseconds a round of those that are sent ahead, by when they are spent: while the device computes (`prepare`),
    while it waits (`between`: from the outcome to the next launch), and after that launch (`result`)."""
    warm = min(10, rounds // 2)
    engine = engine_of("triton_tree", sequences * -(-(context + 3 * rounds + nodes + 64) // BLOCK), nodes)
    rng = np.random.default_rng(0)
    seq_ids = range(1, sequences + 1)
    for seq_id in seq_ids:
        prompt = (rng.zipf(1.3, context) % VOCAB_SIZE).astype(np.int32)
        start = SequenceStart(SamplingParams(seq_id, **KINDS[kind]), context)
        engine.verify(VerifyBatch(0, [VerifyItem(SequenceDelta(seq_id, 0, prompt), context, None, start)]))
    first = [VerifyItem(SequenceDelta(seq_id, context, np.ones(1, np.int32)), 1, tree_of(nodes)) for seq_id in seq_ids]
    begun = engine.begin(VerifyBatch(0, first))
    spent: dict[str, list[float]] = {"prepare": [], "between": [], "result": []}
    for number in range(1, rounds + 1):
        guess = guess_of(nodes) if nodes else None
        ahead = VerifyAhead(number, number - 1, [AheadItem(seq_id, guess, nodes) for seq_id in seq_ids])
        times = [time.thread_time_ns()]
        prepared = engine.prepare(ahead, begun)
        times.append(time.thread_time_ns())
        engine.settle(begun)
        assert prepared is not None
        following = engine.follow(prepared, begun)
        times.append(time.thread_time_ns())
        result = engine.result(begun)
        times.append(time.thread_time_ns())
        for name, took in zip(spent, np.diff(times), strict=True):
            spent[name].append(took / 1000)
        assert following is not None
        assert [verdict.num_nodes for verdict in result.verdicts] == [nodes] * sequences
        begun = following
    return {name: float(np.median(took[warm:])) for name, took in spent.items()}


def elsewhere(checkout: Path, case: tuple[int, int, str, str], arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` with the packages of another checkout."""
    paths = f"{checkout}{os.pathsep}{checkout / 'tests' / 'support'}"
    command = [sys.executable, __file__, "--only", json.dumps(case), "--rounds", str(arguments.rounds)]
    command += ["--context", str(arguments.context)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout to measure in the same run")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--attention", nargs="+", default=["triton_tree", "padded"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing of it is launched
    torch.set_num_threads(1)
    if arguments.only:
        print(json.dumps(measure(*json.loads(arguments.only), arguments.rounds, arguments.context)))
        return
    here = Path(__file__).resolve().parents[2]
    checkouts = {"before": arguments.against, "now": here} if arguments.against else {"now": here}
    columns = ["total", *PARTS]
    for attention in arguments.attention:
        print(f"\n{attention}, context {arguments.context}: microseconds a round\n")
        print(f"| sequences | nodes | | | {' | '.join(columns)} |")
        print("|" + "---|" * (4 + len(columns)))
        for sequences, nodes in SHAPES:
            for kind in arguments.kinds:
                for name, checkout in checkouts.items():
                    found = elsewhere(checkout, (sequences, nodes, kind, attention), arguments)
                    times = " | ".join(f"{found[column]:.0f}" for column in columns)
                    print(f"| {sequences} | {nodes} | {kind} | {name} | {times} |", flush=True)
    print(
        "\nrounds sent ahead, triton_tree: microseconds a round\n\n| sequences | nodes | | prepare | between | result |"
    )
    print("|" + "---|" * 6)
    for sequences, nodes in SHAPES_AHEAD:
        for kind in arguments.kinds:
            found = measure_ahead(sequences, nodes, kind, arguments.rounds, arguments.context)
            print(
                f"| {sequences} | {nodes} | {kind} | {' | '.join(f'{took:.0f}' for took in found.values())} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
