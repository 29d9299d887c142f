"""`paceline bench serve`: open-loop load on a running server, timed at the client.

Requests arrive by a Poisson process, whether or not earlier ones have been answered; an infinite rate sends all at
once. With speculation compared on against off, short blocks of either kind take turns, each drained before the next
begins, so that noise falls on both; either kind has prompts of its own, so that none finds the other's answers learnt.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np

from actors.errors import Unavailable
from actors.models.catalog import Progress, silent
from cluster.cli.api_key import bearer_headers
from cluster.cli.bench.prompts import BenchPrompt, make_blocks
from cluster.cli.bench.serve_metrics import RequestRecord, Summary, detailed_json, format_summary, summarise
from cluster.cli.bench.stream_client import send_request, served_model

Mode = Literal["on", "off"]
Prompts = Sequence[BenchPrompt]

_RATIO_NAMES = {
    "output_throughput_ratio": "Output token throughput, speculation on / off:",
    "median_block_ratio": "The same, median over pairs of blocks:",
    "tpot_ratio": "Mean TPOT, speculation off / on:",
}
_WARM_UP_MESSAGES = ({"role": "user", "content": "Count from one to twenty."},)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to send, and how."""

    prompts: tuple[BenchPrompt, ...]
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None  # None: the first that the server lists
    num_prompts: int = 100  # for each mode
    request_rate: float = math.inf  # a second
    max_concurrency: int | None = None
    max_tokens: int = 128
    speculation: Literal["on", "off", "both"] = "on"
    block_size: int = 16  # requests of one mode before it is the other's turn
    temperature: float = 0.0
    seed: int = 0  # arrivals; request i is sampled with seed + i
    ignore_eos: bool = False
    objectives: Mapping[str, float] = field(default_factory=dict)  # milliseconds by ttft, tpot, e2el
    num_warmups: int = 1  # requests of each mode
    timeout_s: float = 600.0  # without a byte from the server

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("off", "on") if self.speculation == "both" else (self.speculation,)


@dataclass(frozen=True, slots=True)
class ServedBlock:
    mode: Mode
    seconds: float
    records: list[RequestRecord]

    @property
    def output_throughput(self) -> float:
        return sum(record.output_tokens for record in self.records if not record.error) / self.seconds


@dataclass(frozen=True, slots=True)
class ServeReport:
    model: str
    summaries: dict[Mode, Summary]
    blocks: list[ServedBlock]
    num_repeated: int  # requests whose prompt had been sent before

    def ratios(self) -> dict[str, float | None]:
        """Speculation on against off, None where there is nothing to divide by; empty unless both were measured."""
        if len(self.summaries) < 2:
            return {}
        on, off = self.summaries["on"], self.summaries["off"]
        pairs = zip(*([one for one in self.blocks if one.mode == mode] for mode in ("on", "off")), strict=False)
        of_blocks = [one.output_throughput / other.output_throughput for one, other in pairs if other.output_throughput]
        return {
            "output_throughput_ratio": _divided(on["output_throughput"], off["output_throughput"]),
            "median_block_ratio": statistics.median(of_blocks) if of_blocks else None,
            "tpot_ratio": _divided(off["mean_tpot_ms"], on["mean_tpot_ms"]),
        }

    def as_text(self, plan: ServePlan) -> str:
        """A block for each mode of speculation, then the ratios between them."""
        text = ""
        for mode, summary in self.summaries.items():
            title = "Serving Benchmark Result" + (f", speculation {mode}" if len(self.summaries) > 1 else "")
            text += format_summary(summary, title, plan.max_concurrency, plan.request_rate)
        for name, ratio in self.ratios().items():
            text += f"{_RATIO_NAMES[name]:<50} {'-' if ratio is None else format(ratio, '.2f')}\n"
        return text

    def as_json(self, plan: ServePlan, detailed: bool = False) -> dict[str, Any]:
        """The keys of `vllm bench serve`; with two modes, those of each under "on" and "off"."""
        settings = ("max_concurrency", "max_tokens", "temperature", "seed", "ignore_eos", "speculation")
        data: dict[str, Any] = {
            "backend": "paceline",
            "model_id": self.model,
            "num_prompts": plan.num_prompts,
            "num_repeated_prompts": self.num_repeated,
            "request_rate": "inf" if math.isinf(plan.request_rate) else plan.request_rate,
            "burstiness": 1.0,
            **{name: getattr(plan, name) for name in settings},
        }
        parts: dict[str, Any] = {}
        for mode, summary in self.summaries.items():
            records = [record for block in self.blocks if block.mode == mode for record in block.records]
            parts[mode] = summary | (detailed_json(records) if detailed else {})
        if len(parts) == 1:
            return {**data, **next(iter(parts.values()))}
        return {**data, "block_size": plan.block_size, **self.ratios(), **parts}


def _divided(one: float, other: float) -> float | None:
    return one / other if other else None


def run_serve(plan: ServePlan, progress: Progress = silent) -> ServeReport:
    """Raises Unavailable when the server does not answer; requests that fail are counted, not raised."""
    return asyncio.run(measure(plan, progress))


async def measure(plan: ServePlan, progress: Progress = silent) -> ServeReport:
    timeout = httpx.Timeout(plan.timeout_s, connect=30.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = bearer_headers(plan.api_key)
    async with httpx.AsyncClient(base_url=plan.url, timeout=timeout, limits=limits, headers=headers) as client:
        model = plan.model or await served_model(client)
        # Token ids alone may mean that the model has no chat template.
        has_messages = any(prompt.messages for prompt in plan.prompts)
        warm_up = BenchPrompt("", "", _WARM_UP_MESSAGES) if has_messages else BenchPrompt("", "", token_ids=(1, 2, 3))
        for mode in plan.modes * plan.num_warmups:
            first = await send_request(client, warm_up, _fields(plan, model, mode, 0), time.perf_counter())
            if first.error:
                raise Unavailable(f"{plan.url}: the first request failed: {first.error}")
        generator = np.random.default_rng(plan.seed)
        shuffled = [plan.prompts[index] for index in generator.permutation(len(plan.prompts))]
        prompts, num_repeated = deal_prompts(shuffled, len(plan.modes), plan.num_prompts)
        epoch, done, total, blocks = time.perf_counter(), 0, plan.num_prompts * len(plan.modes), []
        for mode, start, stop in take_turns(plan.modes, plan.num_prompts, plan.block_size):
            hand = prompts[plan.modes.index(mode)]

            async def send(index: int, mode: Mode = mode, start: int = start, hand: Prompts = hand) -> RequestRecord:
                nonlocal done
                fields = _fields(plan, model, mode, start + index)
                record = await send_request(client, hand[start + index], fields, epoch)
                done += 1
                progress("requests", done, total)
                return record

            offsets = arrival_times(stop - start, plan.request_rate, generator)
            blocks.append(await _run_block(mode, offsets, send, plan.max_concurrency))
    summaries = {
        mode: summarise(
            [record for block in blocks if block.mode == mode for record in block.records],
            sum(block.seconds for block in blocks if block.mode == mode),
            plan.objectives,
        )
        for mode in plan.modes
    }
    return ServeReport(model, summaries, blocks, num_repeated)


def arrival_times(count: int, request_rate: float, generator: np.random.Generator) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process whose first arrival is at 0."""
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = generator.exponential(1.0 / request_rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def deal_prompts(prompts: Sequence[BenchPrompt], num_hands: int, hand_size: int) -> tuple[list[list[BenchPrompt]], int]:
    """`num_hands` lists of `hand_size` prompts, tasks in turn and alike in all; with how many had to be repeated."""
    # Blocks of one task, one prompt for each hand: hands then differ in rows but not in tasks.
    rounds = make_blocks(prompts, num_hands)
    full = [block for block in rounds if len(block) == num_hands] or [
        [prompts[(start + hand) % len(prompts)] for hand in range(num_hands)] for start in range(len(prompts))
    ]
    hands: list[list[BenchPrompt]] = [[] for _ in range(num_hands)]
    for index in range(hand_size):
        lap, position = divmod(index, len(full))
        for hand in range(num_hands):  # a prompt that comes again comes to another hand
            hands[hand].append(full[position][(hand + lap) % num_hands])
    distinct = {prompt.name for hand in hands for prompt in hand}
    return hands, num_hands * hand_size - len(distinct)


def take_turns(modes: Sequence[Mode], count: int, block_size: int) -> list[tuple[Mode, int, int]]:
    """(mode, first request, one past the last) of each block; which mode goes first changes from block to block. One
    mode alone has one block."""
    if len(modes) == 1:
        return [(modes[0], 0, count)]
    turns = []
    for index, start in enumerate(range(0, count, block_size)):
        order = modes if index % 2 == 0 else tuple(reversed(modes))
        turns += [(mode, start, min(start + block_size, count)) for mode in order]
    return turns


async def _run_block(
    mode: Mode,
    offsets: Sequence[float],
    send: Callable[[int], Awaitable[RequestRecord]],
    max_concurrency: int | None,
) -> ServedBlock:
    """Call send(i) for request i, offsets[i] seconds after the block began, and wait for all."""
    places = asyncio.Semaphore(max_concurrency or max(1, len(offsets)))
    started = time.perf_counter()

    async def one(index: int, offset: float) -> RequestRecord:
        await asyncio.sleep(started + offset - time.perf_counter())
        async with places:
            return await send(index)

    records = await asyncio.gather(*map(one, range(len(offsets)), offsets))
    return ServedBlock(mode, time.perf_counter() - started, records)


def _fields(plan: ServePlan, model: str, mode: Mode, index: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed + index,
        "ignore_eos": plan.ignore_eos,
        "speculation": {"enabled": mode == "on", "stats": True},
    }
