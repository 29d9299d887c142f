"""What a round of the target engine costs outside the model: the host work that a device waits for.

    python -m tests.bench.bench_round_planning [--against CHECKOUT] [--rounds 200] [--context 8192]

A real `TargetEngine` verifies trees of sequences with a long context; the model and the sampler are replaced by
answers prepared before, two draft nodes of each tree are accepted and one of them moves. Prints processor time a round
in microseconds, median: the total alone, and its parts with timers around them. With `padded` attention the masks,
which its first layer makes, are a part that the total leaves out. `--against` measures another checkout in the same
run, in turn.
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
from actors.engine import model_runner, target_engine
from actors.engine.attention import padded
from actors.engine.options import EngineOptions
from actors.engine.sequence_table import SequenceTable
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem

BLOCK = 16
VOCAB_SIZE = 1000
CASES = [(sequences, nodes, kind) for sequences in (1, 8, 32) for nodes in (7, 31) for kind in ("greedy", "sampled")]
# Part of a round: where its functions are, under the names of this checkout and of earlier ones.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "find, update": [(SequenceTable, "find"), (SequenceTable, "bring_up_to_date"), (target_engine, "distinct")],
    "tree checks": [(DraftTree, "is_valid"), (target_engine, "valid_trees")],
    "pack": [(model_runner, "pack")],
    "plan": [(model_runner.ModelRunner, "_plan")],
    "mask": [(padded.PaddedPlan, "_mask")],
    "row sampling": [(target_engine, "_row_sampling")],
    "walk": [(target_engine, "walk_tree"), (target_engine, "walk_trees")],
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
def timed_parts() -> Iterator[Timers]:
    timers = Timers()
    replaced = []
    for part, places in PARTS.items():
        for owner, name in places:
            if hasattr(owner, name):
                replaced.append((owner, name, getattr(owner, name)))
                setattr(owner, name, timers.around(part, replaced[-1][2]))
    try:
        yield timers
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)


def engine_of(attention: str, num_blocks: int) -> TargetEngine:
    """An engine whose model answers at once."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = TargetEngine(model.eval(), EngineOptions(num_blocks, BLOCK, attention=attention))
    logits = torch.zeros(4096, VOCAB_SIZE)

    def answer(token_ids: Any, positions: Any, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(plan, padded.PaddedPlan):
            for group in plan._groups:
                plan._mask(group, None, 1, torch.float32)
        return logits[: len(rows)]

    engine._runner._run = answer
    return engine


def tree_of(nodes: int) -> DraftTree:
    """Node i has the token i + 1 and, as far as there are so many, the children 2 i + 1 and 2 i + 2."""
    parents = [(node - 1) // 2 if node else -1 for node in range(nodes)]
    confidence = np.linspace(0.9, 0.1, nodes, dtype=np.float32)
    return DraftTree(np.arange(1, nodes + 1, dtype=np.int32), np.array(parents, np.int32), confidence)


def drawn_of(sequences: int, nodes: int) -> torch.Tensor:
    """Tokens that accept the nodes 0 and 2 of every tree."""
    drawn = np.zeros((sequences, 1 + nodes), np.int64)
    drawn[:, 0], drawn[:, 1] = 1, 3
    return torch.from_numpy(drawn.reshape(-1))


def measure(case: tuple[int, int, str], attention: str, rounds: int, context: int) -> dict[str, float]:
    """Microseconds a round: `total` and each part."""
    sequences, nodes, kind = case
    blocks = -(-(context + 6 * rounds + nodes + 64) // BLOCK)
    engine = engine_of(attention, sequences * blocks)
    prompt = np.arange(context, dtype=np.int32) % VOCAB_SIZE
    tree, drawn = tree_of(nodes), drawn_of(sequences, nodes)
    sample_tokens = target_engine.sample_tokens
    target_engine.sample_tokens = lambda logits, rows: drawn[: len(rows)]
    lengths = context
    try:
        for index in range(sequences):
            hot = {"temperature": 0.8, "top_p": 0.9} if kind == "sampled" else {"temperature": 0.0}
            delta = SequenceDelta(index + 1, 0, np.append(prompt[:-1], index).astype(np.int32))
            begin = SequenceStart(SamplingParams(index, **hot), context)
            engine.verify(VerifyBatch(0, [VerifyItem(delta, context, None, begin)]))

        def play() -> Iterator[float]:
            nonlocal lengths
            for number in range(rounds):
                committed = np.array([1, 3, 0] if lengths > context else [0], np.int32)
                items = [
                    VerifyItem(SequenceDelta(index + 1, lengths, committed.copy()), 256, tree)
                    for index in range(sequences)
                ]
                lengths += len(committed)
                began = time.thread_time_ns()
                result = engine.verify(VerifyBatch(number + 1, items))
                yield (time.thread_time_ns() - began) / 1000
                assert [verdict.path.tolist() for verdict in result.verdicts] == [[0, 2]] * sequences

        found = {"total": float(np.median(list(play())[10:]))}
        with timed_parts() as timers:
            by_round = []
            for _ in play():
                by_round.append(timers.spent.copy())
                timers.spent.clear()
        for part in PARTS:
            found[part] = float(np.median([spent[part] for spent in by_round])) / 1000
    finally:
        target_engine.sample_tokens = sample_tokens
    if attention == "padded":
        found["total"] -= found["mask"]
    return found


def elsewhere(checkout: Path, case: tuple[int, int, str], attention: str, arguments: argparse.Namespace) -> dict:
    """`measure` with the packages of another checkout."""
    paths = f"{checkout}{os.pathsep}{checkout / 'tests' / 'support'}"
    command = [sys.executable, __file__, "--only", json.dumps([case, attention]), "--rounds", str(arguments.rounds)]
    command += ["--context", str(arguments.context)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout to measure in the same run")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--attention", nargs="+", default=["triton_tree", "padded"])
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only:
        case, attention = json.loads(arguments.only)
        print(json.dumps(measure(tuple(case), attention, arguments.rounds, arguments.context)))
        return
    here = Path(__file__).resolve().parents[2]
    checkouts = {"before": arguments.against, "now": here} if arguments.against else {"now": here}
    columns = ["total", *PARTS]
    for attention in arguments.attention:
        print(f"\n{attention}, context {arguments.context}: microseconds a round\n")
        print(f"| sequences | nodes | | | {' | '.join(columns)} |")
        print("|" + "---|" * (4 + len(columns)))
        for case in CASES:
            for name, checkout in checkouts.items():
                found = elsewhere(checkout, case, attention, arguments)
                times = " | ".join(f"{found[column]:.0f}" for column in columns)
                print(f"| {case[0]} | {case[1]} | {case[2]} | {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
