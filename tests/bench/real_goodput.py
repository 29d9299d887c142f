"""Requests within their objectives a second in a real cluster: with `router.objectives`, and in order of arrival.

    python -m tests.bench.real_goodput [--seconds 60] [--turns 2] [--loads 0.8 1.0 1.5 3.0]

`paceline serve` of a toy model, twice on this machine: without objectives, and with them. They take turns under the
same open load: Poisson arrivals, half of the requests batch, each sent once. Capacity is what twice as many clients as
places get of the first one that send a request as soon as they have an answer. Requests of the first fifth of a turn
are not counted; what is not answered at its end is not good. Tokens are those that the router has emitted. Figures are
means of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from cluster.cli.table import plain_table
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.tiny_models import save_tiny_model
from tests.bench.simulate.goodput import BARS, LEAST_TOKENS, OBJECTIVES
from tests.bench.simulate.real_cluster import RoundMeter, serving

_PLACES = 8
_CONFIG = Path(__file__).parents[2] / "configs" / "laptop.yaml"
_WARM_UP = 0.2  # of the time
_MEAN_TOKENS = 160
_SPREAD = 0.7  # sigma of the lognormal lengths


@dataclass(slots=True)
class Asked:
    """One request; times are in seconds from the beginning of the load."""

    service_class: str
    prompt: str
    max_tokens: int
    at: float
    first_at: float | None = None
    ended_at: float | None = None
    is_refused: bool = False

    @property
    def is_good(self) -> bool:
        if self.first_at is None or self.ended_at is None:
            return False
        limits = OBJECTIVES[self.service_class]
        tpot_s = (self.ended_at - self.first_at) / max(1, self.max_tokens - 1)
        return self.first_at - self.at <= limits["ttft_s"] and tpot_s <= limits.get("tpot_s", tpot_s)


def draw(rng: random.Random, at: float) -> Asked:
    prompt, answer = (int(rng.lognormvariate(np.log(_MEAN_TOKENS) - _SPREAD**2 / 2, _SPREAD)) + 2 for _ in range(2))
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=min(prompt, 1000)))
    return Asked(rng.choice(("interactive", "batch")), text, min(answer, 1000), at)


async def ask(client: httpx.AsyncClient, one: Asked, began: float) -> None:
    body = {
        "prompt": one.prompt,
        "max_tokens": one.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "service_tier": "flex" if one.service_class == "batch" else "default",
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        one.is_refused = response.status_code == 429
        if one.is_refused:
            return
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                one.ended_at = time.monotonic() - began
            elif line and one.first_at is None:
                one.first_at = time.monotonic() - began


async def open_load(url: str, rate: float, seconds: float, seed: int) -> list[Asked]:
    """Requests at so many a second, whatever becomes of them."""
    rng = random.Random(seed)
    asked: list[Asked] = []
    at = rng.expovariate(rate)
    while at < seconds:
        asked.append(draw(rng, at))
        at += rng.expovariate(rate)
    async with _client(url) as client:
        began = time.monotonic()
        tasks = []
        for one in asked:
            await asyncio.sleep(max(0.0, began + one.at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, one, began)))
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        await _end(tasks)
    return asked


async def capacity(url: str, seconds: float, seed: int) -> float:
    """Answers a second."""
    rng = random.Random(seed)
    answers: list[float] = []

    async def keep_asking(client: httpx.AsyncClient, began: float) -> None:
        while True:
            one = draw(rng, 0.0)
            await ask(client, one, began)
            if one.ended_at is not None:
                answers.append(one.ended_at)

    async with _client(url) as client:
        began = time.monotonic()
        tasks = [asyncio.create_task(keep_asking(client, began)) for _ in range(2 * _PLACES)]
        await asyncio.sleep(seconds)
        await _end(tasks)
    return sum(at >= _WARM_UP * seconds for at in answers) / ((1.0 - _WARM_UP) * seconds)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Stops what is not over. Raises what others have met with."""
    for task in tasks:
        if not task.done():
            task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


def figures_of(asked: list[Asked], tokens: float, seconds: float) -> dict[str, float]:
    counted_s = (1.0 - _WARM_UP) * seconds
    counted = [one for one in asked if one.at >= _WARM_UP * seconds]
    figures = {"goodput": sum(one.is_good for one in counted) / counted_s, "tokens": tokens / seconds}
    for kind in OBJECTIVES:
        own = [one for one in counted if one.service_class == kind]
        waits = [one.first_at - one.at for one in own if one.first_at is not None] or [0.0]
        figures[f"{kind} sent"] = len(own) / counted_s
        figures[f"{kind} good"] = sum(one.is_good for one in own) / counted_s
        figures[f"{kind} answered"] = sum(one.ended_at is not None for one in own) / counted_s
        figures[f"{kind} refused"] = sum(one.is_refused for one in own) / counted_s
        figures[f"{kind} ttft p50"], figures[f"{kind} ttft p99"] = np.percentile(waits, [50, 99]).tolist()
    return figures


def cluster(model: Path, drafter: str, has_objectives: bool) -> AbstractContextManager[str]:
    settings = [f"target.model={model}", "draft.model=none", f"speculation.drafters=[{drafter}]", "cache.url=none"]
    settings += [f"router.max_running={_PLACES}"]
    if has_objectives:
        settings.append(f"router.objectives={json.dumps(OBJECTIVES)}")
    return serving(_CONFIG, settings, Path(f"build/real_goodput_{has_objectives}.log"))


def measured(urls: Sequence[str], rate: float, seconds: float, seed: int) -> list[dict[str, float]]:
    figures = []
    for url in urls:
        meter = RoundMeter(url)
        asked = asyncio.run(open_load(url, rate, seconds, seed))
        figures.append(figures_of(asked, meter.read()["tokens"], seconds))
        print(f"load average: {os.getloadavg()[0]:.1f}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--loads", type=float, nargs="+", default=list(BARS), help="of capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", default="none", help="that both clusters have")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory), "llama", 5, layers=4, hidden_size=96, max_positions=2048)
        speak_ascii(model)
        with cluster(model, arguments.drafter, False) as one, cluster(model, arguments.drafter, True) as other:
            most = asyncio.run(capacity(one, arguments.seconds / 2, arguments.seed))
            print(f"capacity: {most:.2f} requests a second", flush=True)
            for load in arguments.loads:
                turns = [
                    measured((one, other), load * most, arguments.seconds, arguments.seed + turn)
                    for turn in range(arguments.turns)
                ]
                show(load, turns)


def show(load: float, turns: list[list[dict[str, float]]]) -> None:
    """turns: figures of both clusters in each."""
    before, after = (
        {name: float(np.mean([turn[name] for turn in own])) for name in own[0]} for own in zip(*turns, strict=True)
    )
    rows = [(name, f"{before[name]:.2f}", f"{after[name]:.2f}") for name in before]
    print(plain_table(f"\n{load:g} times capacity", ("figure", "by arrival", "by objectives"), rows))
    goodput, tokens = (after[name] / before[name] for name in ("goodput", "tokens"))
    bar = BARS.get(load)
    print(f"goodput x {goodput:.2f} (bar: {bar}), tokens x {tokens:.3f} (bar: {LEAST_TOKENS})", flush=True)


if __name__ == "__main__":
    main()
