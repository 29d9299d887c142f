"""Where the milliseconds of a round go, from the router's plan to its commit.

    python -m tests.bench.bench_round_profile [--model tiny] [--sequences 1,8] [--drafters suffix]

Router core, CPU drafters, link, worker's loop and engine are the product's, in one process. Prints the mean of each
part in milliseconds a round: the router's stages, the engine's parts with timers around them, and what is left of the
wait for the target: link and threads. Rounds are serial, so that the parts add up.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.build import build_target_engine
from actors.drafters.registry import create_drafters
from actors.engine import host_rounds, model_runner, target_engine
from actors.engine.cpu_kernels.whole_forward import WholeForward
from actors.engine.planned_round import PlannedRound
from actors.engine.sequence_table import SequenceTable
from actors.engine.target_engine import TargetEngine
from actors.home import paceline_home
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import GenerationRequest, SamplingParams, VerifyAhead, VerifyBatch, VerifyResult, WorkerInfo
from actors.models.catalog import resolve_model
from actors.options import TargetOptions
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, RoundStage, run_rounds
from paceline_testing.tiny_models import save_tiny_model
from tests.bench.bench_round_planning import timed_parts
from tests.bench.bench_simulated_device import NoDraftWorkers, serving

ROUTER_STAGES = ("plan", "draft", "assemble", "commit")
ENGINE_PARTS: dict[str, list[tuple[Any, str]]] = {
    "tree checks": [(target_engine, "valid_trees")],
    "follow": [(SequenceTable, "take_in")],
    "pack": [(PlannedRound, "pack")],
    "forward": [(model_runner, "PaddedPlan"), (model_runner.ModelRunner, "_run"), (WholeForward, "logits")],
    "row sampling": [(PlannedRound, "sampling")],
    "sampling": [(host_rounds, "sample_tokens"), (host_rounds, "most_probable")],
    "walk": [(host_rounds, "walk_trees")],
    "engine's rest": [(TargetEngine, "verify"), (TargetEngine, "answer")],
}


def profile(model: str, sequences: int, drafters: tuple[str, ...], rounds: int, prompt: int = 128) -> dict[str, float]:
    """Milliseconds a round by part; `round` is their sum, and `tokens` the tokens that a round emits."""
    engine = build_target_engine(resolve_model(model, paceline_home()), TargetOptions(device="cpu"))
    longest = int(engine.model.config.max_position_embeddings)
    info = WorkerInfo("target", 1, engine.vocab_size, longest, engine.options.block_size, engine.options.num_blocks)
    core = RouterCore(
        info, RouterConfig(max_running=sequences, send_ahead="off"), SpeculationConfig(drafters=drafters),
        create_drafters(drafters),
    )  # fmt: skip
    rng, keys = np.random.default_rng(0), LinkKeys.generate()
    for index in range(sequences):
        ids = np.tile(rng.integers(0, 200, 16), -(-prompt // 16))[:prompt].astype(np.int32)
        core.add(
            GenerationRequest(
                request_id=f"r{index}", prompt_token_ids=ids, max_new_tokens=longest - prompt,
                sampling=SamplingParams(seed=index, temperature=0.0),
            ),
            time.monotonic(),
        )  # fmt: skip
    spent: Counter[str] = Counter()
    stage, since, done, tokens = "end", time.perf_counter(), 0, 0

    def begin(following: RoundStage) -> None:
        nonlocal stage, since
        now = time.perf_counter()
        spent[stage] += now - since  # type: ignore[assignment]
        stage, since = following, now

    def deliver(events: list[Any]) -> None:
        nonlocal tokens
        tokens += sum(len(event.token_ids) for event in events)

    async def run(address: Any, timers: Any) -> None:
        nonlocal done, tokens
        link = AsyncLink(address, keys)

        async def verify(message: VerifyBatch | VerifyAhead) -> Any:
            nonlocal done
            begin("verify")  # `run_rounds` says so after it has sent the batch
            answer = await link.call(message, 600.0)
            done += isinstance(answer, VerifyResult) and bool(answer.verdicts)
            return answer

        hooks = RoundHooks(begin=begin, deliver=deliver)
        try:
            for last in (rounds // 4, rounds // 4 + rounds):  # the first part warms up
                spent.clear()
                timers.spent.clear()
                before, tokens = done, 0
                while done < last and core.has_work:
                    await run_rounds(core, NoDraftWorkers(), verify, hooks)
                done_now = done - before
            done = done_now
        finally:
            link.close()

    with timed_parts(ENGINE_PARTS) as timers, serving(engine, info, keys) as address:
        asyncio.run(run(address, timers))
    found = {name: spent[name] * 1e3 / done for name in ROUTER_STAGES}
    found |= {name: timers.spent[name] / 1e6 / done for name in ENGINE_PARTS}
    waited = (spent["verify"] + spent["collect"] + spent["end"]) * 1e3 / done
    found["link"] = waited - sum(found[name] for name in ENGINE_PARTS)
    return {"tokens": tokens / done, "round": sum(spent.values()) * 1e3 / done, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a model's name or directory, or tiny: one that is made")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--drafters", default="suffix,soft_ngram")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model == "tiny":
            model = str(save_tiny_model(Path(folder) / "tiny", "llama", 3, max_positions=4096))
        columns: dict[int, dict[str, float]] = {}
        for sequences in map(int, given.sequences.split(",")):
            columns[sequences] = profile(model, sequences, tuple(given.drafters.split(",")), given.rounds)
    print("| ms a round | " + " | ".join(f"{sequences} sequences" for sequences in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(f"{column[name]:.3f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
