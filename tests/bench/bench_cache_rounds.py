"""What the shared cache adds to a router's rounds: without it, with a server that answers, stopped, and gone.

    python tests/bench/bench_cache_rounds.py [--batch 8] [--rounds 1500] [--repeats 3]

States take turns, each in a process of its own. Prints the wall time of the router's own part of a round in
microseconds: median, 99th percentile, greatest. A toy target repeats what others have said before and sleeps as long as
a forward of a large model takes, so the cache's threads run beside the rounds as they would in a router.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from actors.drafters.registry import create_drafters
from actors.messages import GenerationRequest, SamplingParams, VerifyBatch, VerifyResult
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.guarded_sink import SharedLearning
from cluster.router.run_round import RoundHooks, RoundStage, run_local_round
from paceline_testing.rounds import toy_info
from paceline_testing.toy_target import ToyTarget

STATES = ("none", "live", "stopped", "gone")
VOCAB_SIZE = 5_000
FORWARD_S = 0.01


def round_seconds(state: str, batch: int, rounds: int) -> list[float]:
    """Seconds of each of `rounds`. state: one of STATES, what becomes of the cache's server after a third as many
    rounds that are not counted. Raises ServerError where no server can be run."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory)) as server:
        cache = None if state == "none" else SharedCache(server.settings, "bench")
        drafters = create_drafters(("cache", "suffix"), index=None if cache is None else cache.index)
        core = RouterCore(
            toy_info(VOCAB_SIZE, 4096, 16),
            RouterConfig(max_running=batch, max_waiting=batch),
            SpeculationConfig(),
            drafters,
            shared=SharedLearning(token_sink=cache),
        )
        # Rounds before the fault are not counted: they fill the cache and compile what is compiled late.
        _run(core, batch, rounds // 3)
        if state == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        elif state == "gone":
            server.stop()
        try:
            return _run(core, batch, rounds)
        finally:
            if state == "stopped":
                os.kill(server.pid, signal.SIGCONT)
            if cache is not None:
                cache.close()


def _run(core: RouterCore, batch: int, rounds: int) -> list[float]:
    target = ToyTarget(VOCAB_SIZE, 4096, 16, 1 << 16, order=2)
    random = np.random.default_rng(0)
    seconds: list[float] = []
    asked_for: list[str] = []
    first = time.monotonic_ns()
    began: dict[RoundStage, float] = {}

    def verify(message: VerifyBatch) -> VerifyResult:
        answer = target.verify(message)
        time.sleep(FORWARD_S)
        return answer

    def mark(stage: RoundStage) -> None:
        began[stage] = time.perf_counter()

    hooks = RoundHooks(now=lambda: FORWARD_S * len(seconds), begin=mark)
    while len(seconds) < rounds:
        while core.num_running + core.num_waiting < batch:
            asked_for.append(str(first + len(asked_for)))
            prompt = random.integers(0, 50, 8).astype(np.int32)  # few beginnings: texts come again
            core.add(
                GenerationRequest(
                    request_id=asked_for[-1],
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(seed=1, temperature=0.0),
                    max_new_tokens=200,
                ),
                hooks.now(),
            )
        outcome = run_local_round(core, verify, hooks=hooks)
        assert outcome.round is not None
        seconds.append(began["verify"] - began["plan"] + began["end"] - began["commit"])
    core.target_lost()
    for request_id in asked_for:
        core.cancel(request_id)
    core.end_overdue(hooks.now())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--state", choices=STATES, help="measure one state here and print its figures as JSON")
    arguments = parser.parse_args()
    if arguments.state is not None:
        print(json.dumps(round_seconds(arguments.state, arguments.batch, arguments.rounds)))
        return
    seconds: dict[str, list[float]] = {state: [] for state in STATES}
    for _ in range(arguments.repeats):
        for state in STATES:
            command = [sys.executable, __file__, "--state", state]
            command += ["--batch", str(arguments.batch), "--rounds", str(arguments.rounds)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds[state] += json.loads(printed.splitlines()[-1])
    for state, values in seconds.items():
        median, high = np.percentile(values, [50, 99]) * 1e6
        print(f"{state:8} {median:6.0f} us median, {high:6.0f} us p99, {max(values) * 1e6:6.0f} us greatest")


if __name__ == "__main__":
    main()
