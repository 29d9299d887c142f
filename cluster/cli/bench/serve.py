"""`paceline bench serve`: open-loop load on a running server, timed at the client.

Requests arrive by a Poisson process, whether or not earlier ones have been answered; an infinite rate sends all at
once. With speculation compared on against off, short blocks of either kind take turns, each drained before the next
begins, so that noise falls on both; either kind has prompts of its own, so that none finds the other's answers learnt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from actors.errors import Unavailable
from actors.models.catalog import Progress, silent
from cluster.cli.api_key import bearer_headers
from cluster.cli.bench.options import ServeOptions
from cluster.cli.bench.prompts import BenchPrompt, make_blocks, user_says
from cluster.cli.bench.serve_metrics import Summary, format_summary, summarise
from cluster.cli.bench.stream_client import RequestRecord, ServerCard, send_request, server_card

_RATIO_NAMES = {
    "output_throughput_ratio": "Output token throughput, speculation on / off:",
    "tpot_ratio": "Mean TPOT, speculation off / on:",
}


@dataclass(frozen=True, slots=True)
class ServeReport:
    """`records` and `summaries`: by mode of speculation, on or off."""

    model: str
    records: dict[str, list[RequestRecord]]
    summaries: dict[str, Summary]
    num_repeated: int  # requests whose prompt had been sent before
    max_concurrency: int | None  # None: no limit

    def ratios(self) -> dict[str, float | None]:
        """Speculation on against off, None where there is nothing to divide by; empty unless both were measured."""
        if len(self.summaries) < 2:
            return {}
        on, off = self.summaries["on"], self.summaries["off"]
        pairs = ((on["output_throughput"], off["output_throughput"]), (off["mean_tpot_ms"], on["mean_tpot_ms"]))
        return {name: one / other if other else None for name, (one, other) in zip(_RATIO_NAMES, pairs, strict=True)}

    def as_text(self, options: ServeOptions) -> str:
        """A block for each mode of speculation, then the ratios between them."""
        text = ""
        for mode, summary in self.summaries.items():
            title = "Serving Benchmark Result" + (f", speculation {mode}" if len(self.summaries) > 1 else "")
            text += format_summary(summary, title, self.max_concurrency, options.request_rate)
        for name, ratio in self.ratios().items():
            text += f"{_RATIO_NAMES[name]:<50} {'-' if ratio is None else format(ratio, '.2f')}\n"
        return text

    def as_json(self, options: ServeOptions) -> dict[str, Any]:
        """The keys of `vllm bench serve`; with two modes, those of each under "on" and "off"."""
        settings = ("num_prompts", "max_tokens", "temperature", "seed", "ignore_eos", "speculation")
        data: dict[str, Any] = {
            "backend": "paceline",
            "model_id": self.model,
            "num_repeated_prompts": self.num_repeated,
            "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
            "burstiness": 1.0,
            "max_concurrency": self.max_concurrency,
            **{name: getattr(options, name) for name in settings},
        }
        if len(self.summaries) == 1:
            return {**data, **next(iter(self.summaries.values()))}
        return {**data, "block_size": options.block_size, **self.ratios(), **self.summaries}


def run_serve(prompts: Sequence[BenchPrompt], options: ServeOptions, progress: Progress = silent) -> ServeReport:
    """Raises Unavailable when the server does not answer; requests that fail are counted, not raised."""
    return asyncio.run(_measure(prompts, options, progress))


async def _measure(prompts: Sequence[BenchPrompt], options: ServeOptions, progress: Progress) -> ServeReport:
    modes = ("off", "on") if options.speculation == "both" else (options.speculation,)
    generator = np.random.default_rng(options.seed)
    shuffled = [prompts[index] for index in generator.permutation(len(prompts))]
    hands, num_repeated = deal_prompts(shuffled, len(modes), options.num_prompts)
    records: dict[str, list[RequestRecord]] = {mode: [] for mode in modes}
    seconds = dict.fromkeys(modes, 0.0)
    timeout = httpx.Timeout(options.timeout, connect=30.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = bearer_headers(options.api_key)
    async with httpx.AsyncClient(base_url=options.url, timeout=timeout, limits=limits, headers=headers) as client:
        card = await _card(client, options)
        model, max_concurrency = card.model, options.max_concurrency or card.max_requests
        for mode in modes * options.num_warmups:
            fields = _fields(options, model, mode, 0)
            first = await send_request(client, _warm_up_prompt(prompts), fields, 0.0, options.max_retries)
            if first.error:
                raise Unavailable(f"{options.url}: the first request failed: {first.error}")
        epoch, done = time.perf_counter(), 0
        progress("requests", done, len(modes) * options.num_prompts)
        for mode, start, stop in take_turns(modes, options.num_prompts, options.block_size):

            async def send(index: int, mode: str = mode, start: int = start) -> RequestRecord:
                nonlocal done
                prompt = hands[modes.index(mode)][start + index]
                record = await send_request(
                    client, prompt, _fields(options, model, mode, start + index), epoch, options.max_retries
                )
                done += 1
                progress("requests", done, len(modes) * options.num_prompts)
                return record

            began = time.perf_counter()
            offsets = arrival_times(stop - start, options.request_rate, generator)
            records[mode] += await _send_all(offsets, send, max_concurrency)
            seconds[mode] += time.perf_counter() - began
    summaries = {mode: summarise(records[mode], seconds[mode], options.objectives()) for mode in modes}
    return ServeReport(model, records, summaries, num_repeated, max_concurrency)


async def _card(client: httpx.AsyncClient, options: ServeOptions) -> ServerCard:
    """Raises Unavailable, unless the model is given: not every server lists its models."""
    try:
        card = await server_card(client)
    except Unavailable:
        if options.model is None:
            raise
        return ServerCard(options.model, None)
    return ServerCard(options.model or card.model, card.max_requests)


def _warm_up_prompt(prompts: Sequence[BenchPrompt]) -> BenchPrompt:
    """Token ids if all prompts are token ids: the model may have no chat template then."""
    if any(prompt.messages for prompt in prompts):
        return BenchPrompt("", "", user_says("Count from one to twenty."))
    return BenchPrompt("", "", token_ids=(1, 2, 3))


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
    hands = [  # a prompt that comes again comes to another hand
        [full[index % len(full)][(hand + index // len(full)) % num_hands] for index in range(hand_size)]
        for hand in range(num_hands)
    ]
    distinct = {prompt.name for hand in hands for prompt in hand}
    return hands, num_hands * hand_size - len(distinct)


def take_turns(modes: Sequence[str], count: int, block_size: int) -> list[tuple[str, int, int]]:
    """(mode, first request, one past the last) of each block; which mode goes first changes from block to block. One
    mode alone has one block."""
    if len(modes) == 1:
        return [(modes[0], 0, count)]
    return [
        (mode, start, min(start + block_size, count))
        for index, start in enumerate(range(0, count, block_size))
        for mode in (modes if index % 2 == 0 else reversed(modes))
    ]


async def _send_all(
    offsets: Sequence[float], send: Callable[[int], Awaitable[RequestRecord]], max_concurrency: int | None
) -> list[RequestRecord]:
    """Call send(i) for request i in offsets[i] seconds, and wait for all."""
    places = asyncio.Semaphore(max_concurrency or max(1, len(offsets)))
    started = time.perf_counter()

    async def one(index: int, offset: float) -> RequestRecord:
        await asyncio.sleep(started + offset - time.perf_counter())
        async with places:
            return await send(index)

    return await asyncio.gather(*map(one, range(len(offsets)), offsets))


def _fields(options: ServeOptions, model: str, mode: str, index: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + index,
        "ignore_eos": options.ignore_eos,
        "speculation": {"enabled": mode == "on", "stats": True},
    }
