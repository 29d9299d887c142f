"""Measures the constants of a real cluster: forward times by rows, and what router, gateway and hops take.

Forwards are measured while serving, since processes that share processors slow each other down. Plain decoding of 1, 2,
4 ... sequences gives the times of as many rows: what longer answers take more than shorter ones, so that prompts and
the first and last rounds, in which not all sequences decode, cancel out. Answers of one token give the times of
prompts. The processor time of gateways is the operating system's; the rest comes from what clients see beside that.
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
from tests.bench.simulate.real_cluster import GATEWAYS, RoundMeter, processor_s

_DECODING = (1, 2, 4, 8, 16)
_PROMPT = 8  # tokens of a prompt while decoding is measured
_FAR, _FAR_PROMPT = 8, 256  # sequences, and tokens of their prompts, for what a cached token costs
_PROMPT_ROWS = (8, 16, 32, 64, 128, 256)
_SHORT, _LONG = 8, 40  # tokens of the answers while decoding is measured
_ASKED = 16  # requests at once whose gateway's time is measured
_REPEATS = 9
_DECODINGS = 3
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
    decoding: dict[int, float] = {}  # seconds of a forward by its sequences, of a row each
    prompts: dict[int, float] = {}  # by rows, of which one has logits
    periods: dict[int, tuple[float, float]] = {}  # of rounds, by sequences: as clients see it, and the target's part
    router: dict[int, float] = {}
    for count in _DECODING:
        decoding[count], quiet_router_s, gap = _decode(url, random, count, _PROMPT)
        periods[count] = gap, decoding[count] + quiet_router_s
        _, router[count], _ = _decode(url, random, count, _PROMPT, "on")
    far, _, _ = _decode(url, random, _FAR, _FAR_PROMPT)
    context_token_s = max(0.0, (far - decoding[_FAR]) / (_FAR * (_FAR_PROMPT - _PROMPT)))
    firsts: list[float] = []  # of answers of one token: what the client waits for beside the target
    for rows in _PROMPT_ROWS:
        # In a round each; another, empty one frees the sequence.
        asked = [_metered(url, random, 1, 1, prompt=rows, answer=1) for _ in range(_REPEATS)]
        prompts[rows] = statistics.median(read["target_s"] for read, _ in asked)
        firsts += [records[0].ttft - read["target_s"] for read, records in asked]
    gateway = _gateway_times(url, random)
    return Measured(_costs(periods, router, firsts, *gateway), _forward(decoding, prompts, context_token_s))


def _decode(
    url: str, random: np.random.Generator, count: int, prompt: int, speculation: str = "off"
) -> tuple[float, float, float]:
    """Seconds of the target and of the router for a round of so many sequences, and the gap between chunks."""
    found = []
    for _ in range(_DECODINGS):
        short, _ = _metered(url, random, count, count, prompt=prompt, answer=_SHORT, speculation=speculation)
        long, records = _metered(url, random, count, count, prompt=prompt, answer=_LONG, speculation=speculation)
        rounds = long["rounds"] - short["rounds"]
        gap = statistics.median(gap for record in records for gap in record.itls)
        found.append((*((long[name] - short[name]) / rounds for name in ("target_s", "router_s")), gap))
    target_s, router_s, gap = (statistics.median(column) for column in zip(*found, strict=True))
    return target_s, router_s, gap


def _gateway_times(url: str, random: np.random.Generator) -> tuple[float, float]:
    """Processor time of a gateway for a request and for a chunk."""
    spent = []
    for answer in (_SHORT, _LONG):
        before = processor_s(GATEWAYS)
        _ask(url, random, _ASKED, _ASKED, prompt=_PROMPT, answer=answer)
        spent.append((processor_s(GATEWAYS) - before) / _ASKED)
    chunk_s = max(0.0, (spent[1] - spent[0]) / (_LONG - _SHORT))
    return max(0.0, spent[0] - _SHORT * chunk_s), chunk_s


def _forward(decoding: dict[int, float], prompts: dict[int, float], context_token_s: float) -> ForwardOptions:
    """Non-decreasing: a measurement below that of fewer rows is noise."""
    both = decoding.keys() & prompts.keys()
    scored_s = max(0.0, statistics.mean((decoding[count] - prompts[count]) / (count - 1) for count in both))
    seconds = {count: measured - count * scored_s for count, measured in decoding.items()}
    seconds |= {rows: measured - scored_s for rows, measured in prompts.items()}
    points, least = [], 0.0
    for rows in sorted(seconds):
        least = max(least, seconds[rows])
        points.append((rows, least))
    steps = sorted({row_tier(rows) for rows in range(1, _MOST_STEPPED_ROWS + 1)})
    return ForwardOptions(
        row_times=tuple(points), row_steps=tuple(steps), scored_row_s=scored_s, context_token_s=context_token_s
    )


def _costs(
    periods: dict[int, tuple[float, float]], router: dict[int, float], firsts: list[float], request_s: float,
    chunk_s: float,
) -> CostOptions:  # fmt: skip
    counts = np.array(sorted(router), np.float64)
    slope, level = np.polyfit(counts, [router[int(count)] for count in counts], 1)
    link_s = max(0.0, statistics.median(period - known for period, known in periods.values()))
    router_s = max(0.0, level + slope)
    rest_s = max(0.0, statistics.median(firsts) - router_s - link_s - request_s - chunk_s)
    return CostOptions(
        gateway_request_s=request_s,
        gateway_chunk_s=chunk_s,
        hop_s=rest_s / 4,  # to the gateway, to the router, and back
        router_request_s=0.0,  # part of the wait for a first token, which is measured as a whole
        router_round_s=max(0.0, float(level)),
        router_sequence_s=max(0.0, float(slope)),
        link_s=link_s,
    )


def _metered(url, random, number, concurrency, *, prompt, answer, speculation="off"):  # type: ignore[no-untyped-def]
    """What the router's metrics say of these requests, and the client's records."""
    meter = RoundMeter(url)
    records = _ask(url, random, number, concurrency, prompt=prompt, answer=answer, speculation=speculation)
    return meter.read(), records


def _ask(url, random, number, concurrency, *, prompt, answer, speculation="off"):  # type: ignore[no-untyped-def]
    prompts = [
        BenchPrompt(str(index), "", token_ids=tuple(random.integers(_FIRST_TOKEN, 40_000, prompt).tolist()))
        for index in range(number)
    ]
    options = ServeOptions(
        url=url, num_prompts=number, max_concurrency=concurrency, max_tokens=answer, speculation=speculation,
        ignore_eos=True, num_warmups=0,
    )  # fmt: skip
    return run_serve(prompts, options).records[speculation]
