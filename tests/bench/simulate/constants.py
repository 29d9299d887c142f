"""Measures the constants of a real cluster: forward times by rows, and what router, gateway and hops take.

Forwards are measured while serving, since processes that share processors slow each other down: plain decoding of
1, 2, 4 ... sequences gives the times of as many rows, answers of one token those of a prompt's rows. The rest comes
from what clients see beside the target's own time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine.row_tiers import row_tier
from cluster.cli.bench.options import ServeOptions
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.serve import run_serve
from cluster.simulate.options import CostOptions, ForwardOptions
from tests.bench.simulate.real_cluster import RoundMeter

_DECODING = (1, 2, 4, 8, 16)
_PROMPT_ROWS = (32, 64, 128, 256)
_ANSWER = 24  # tokens of an answer while decoding is measured
_REPEATS = 6
_MOST_STEPPED_ROWS = 256  # as of `actors.engine.model_runner`
_FIRST_TOKEN = 1000  # ids of made-up prompts


@dataclass(frozen=True, slots=True)
class Measured:
    costs: CostOptions
    forward: ForwardOptions

    def as_json(self) -> dict[str, Any]:
        return {"costs": self.costs.model_dump(), "forward": self.forward.model_dump()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Measured:
        return Measured(CostOptions.model_validate(data["costs"]), ForwardOptions.model_validate(data["forward"]))


def measure(url: str, seed: int = 0) -> Measured:
    random = np.random.default_rng(seed)
    forward: dict[int, float] = {}
    periods: dict[int, tuple[float, float]] = {}  # of rounds, by sequences: as clients see it, and the target's part
    router: dict[int, float] = {}
    for count in _DECODING:
        meter = RoundMeter(url)
        records = _ask(url, random, count, count, prompt=8, answer=_ANSWER)
        read = meter.read()
        forward[count] = read["target_s"] / read["rounds"]
        router[count] = read["router_s"] / read["rounds"]
        gaps = [gap for record in records for gap in record.itls]
        periods[count] = statistics.median(gaps), forward[count] + router[count]
    firsts: list[float] = []  # of answers of one token: what the client waits for beside the target
    for rows in _PROMPT_ROWS:
        meter = RoundMeter(url)
        records = _ask(url, random, _REPEATS, 1, prompt=rows, answer=1)
        read = meter.read()
        forward[rows] = read["target_s"] / read["rounds"]
        firsts += [record.ttft - forward[rows] for record in records]
    burst = _ask(url, random, 16, 16, prompt=8, answer=1)
    return Measured(_costs(periods, router, firsts, [record.ttft for record in burst]), _forward(forward))


def _forward(seconds: dict[int, float]) -> ForwardOptions:
    """Non-decreasing: a measurement below that of fewer rows is noise."""
    points, least = [], 0.0
    for rows in sorted(seconds):
        least = max(least, seconds[rows])
        points.append((rows, least))
    steps = sorted({row_tier(rows) for rows in range(1, _MOST_STEPPED_ROWS + 1)})
    return ForwardOptions(row_times=tuple(points), row_steps=tuple(steps))


def _costs(
    periods: dict[int, tuple[float, float]], router: dict[int, float], firsts: list[float], burst: list[float]
) -> CostOptions:
    counts = np.array(sorted(router), np.float64)
    slope, level = np.polyfit(counts, [router[int(count)] for count in counts], 1)
    link_s = max(0.0, min(period - known for period, known in periods.values()))
    # The first and the last of a burst are apart by what gateways do one after the other, two of them at a time.
    request_s = max(0.0005, (max(burst) - min(burst)) / len(burst))
    router_s = max(0.0, level + slope)
    rest_s = max(0.0, statistics.median(firsts) - router_s - link_s - request_s)
    return CostOptions(
        gateway_request_s=request_s,
        gateway_chunk_s=min(0.0004, rest_s / 8),
        hop_s=rest_s / 4,  # to the gateway, to the router, and back
        router_request_s=0.0,  # part of the wait for a first token, which is measured as a whole
        router_round_s=max(0.0, float(level)),
        router_sequence_s=max(0.0, float(slope)),
        link_s=link_s,
    )


def _ask(url, random, number, concurrency, *, prompt, answer):  # type: ignore[no-untyped-def]
    prompts = [
        BenchPrompt(str(index), "", token_ids=tuple(random.integers(_FIRST_TOKEN, 40_000, prompt).tolist()))
        for index in range(number)
    ]
    options = ServeOptions(
        url=url, num_prompts=number, max_concurrency=concurrency, max_tokens=answer, speculation="off",
        ignore_eos=True, num_warmups=0,
    )  # fmt: skip
    return run_serve(prompts, options).records["off"]
