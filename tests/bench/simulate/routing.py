"""Routers chosen by their news against routers with the fewest requests, or by chance: prefix hits and first tokens.

    python -m tests.bench.simulate.routing [--groups 2 8] [--seconds 600] [--rate 0.45] [--seed 0] [--level exact]

rate: conversations a second and group; system prompts come four times as often, in requests of one turn. Hit rates are
shares of those of one router that forgets nothing and is never busy. Ends with status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from cluster.cli.table import plain_table
from cluster.config import ClusterConfig
from cluster.simulate import router_choice
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import ForwardOptions, SimulationOptions
from cluster.simulate.rounds import RoundCounts
from cluster.simulate.service_rates import ServiceRates
from cluster.simulate.simulation import Simulation, measured_rates
from cluster.simulate.texts import PhraseTexts

KV_TOKENS = 262_144
# A target on a GPU: 10 ms a round, 0.2 ms more for a sequence, 0.3 ms for a prompt token.
FORWARD = ForwardOptions(row_times=((1, 0.010), (32, 0.016), (256, 0.084), (512, 0.160)))
AT_ONCE = ForwardOptions(row_times=((1, 1e-5), (512, 2e-5)))
TRACES: dict[str, dict[str, Any]] = {
    "conversations": {"turns": 5.0, "think_s": 20.0, "system_tokens": 512, "prompt_tokens": 220, "answer_tokens": 115},
    "system prompts": {
        "turns": 1.0,
        "system_tokens": 2000,
        "system_prompts": 8,
        "prompt_tokens": 220,
        "answer_tokens": 115,
    },
    "one hot prompt": {
        "turns": 2.0,
        "think_s": 20.0,
        "system_tokens": 1024,
        "system_prompts": 1,
        "tenant_skew": 2.5,
        "prompt_tokens": 220,
        "answer_tokens": 115,
    },
}
RATES = {"conversations": 1.0, "system prompts": 4.0, "one hot prompt": 2.0}  # of the given one
SKEWED = "one hot prompt"
LEAST_HITS, LEAST_TTFT_GAIN, MOST_P99 = 0.9, 1.5, 1.05  # of the ideal; p50 and p99 against fewest requests
NAMES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tokens_per_s", "prefix_hit_rate")


def config_of(groups: int, kv_tokens: int = KV_TOKENS, places: int = 32) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "target": {"groups": groups, "kv_cache_tokens": kv_tokens},
            "draft": {"model": "none"},
            "gateway": {"replicas": 2},
            "router": {"max_running": places},
        }
    )


def options_of(
    trace: str,
    rate: float,
    seconds: float,
    *,
    news: str,
    forward: ForwardOptions,
    seed: int = 0,
    level: str = "aggregate",
) -> SimulationOptions:
    return SimulationOptions.model_validate(
        {
            "level": level,
            "news": news,
            "seed": seed,
            "seconds": seconds,
            "warm_up_s": seconds / 4,
            "forward": forward,
            "traffic": {"conversations_per_s": rate, "tenants": 50, "tenant_skew": 1.0, **TRACES[trace]},
        }
    )


def by_chance() -> AbstractContextManager[object]:
    """Each request goes to a router drawn by chance."""
    drawn = random.Random(0)
    return patch.object(
        router_choice,
        "soonest_first",
        lambda known, ready, request, prompt, now: [[drawn.choice(list(ready.values()))]],
    )


def rates_of(trace: str) -> ServiceRates:
    first = options_of(trace, 1.0, 40.0, news="none", forward=FORWARD)
    few_tenants = first.model_copy(update={"traffic": first.traffic.model_copy(update={"tenants": 8})})
    return measured_rates(config_of(1), few_tenants, texts=PhraseTexts(0), times=MeasuredTimes(FORWARD), seconds=20.0)


def ideal_hit_rate(trace: str, rate: float, seconds: float, seed: int) -> float:
    told = options_of(trace, rate, seconds, news="none", forward=AT_ONCE, seed=seed)
    rates = ServiceRates({1: RoundCounts(1, 1, 1, 1, 1e-5)}, MeasuredTimes(AT_ONCE), None)
    return Simulation(config_of(1, 1 << 30, 256), told, rates=rates).run().figures["prefix_hit_rate"]


def is_met(trace: str, hits: float, p50_gain: float, p99_ratio: float) -> bool:
    if trace == SKEWED:  # those with the fewest requests have most hits there, too
        return p99_ratio <= MOST_P99
    return hits >= LEAST_HITS and p50_gain >= LEAST_TTFT_GAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=0.45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=["aggregate", "exact"], default="aggregate")
    arguments = parser.parse_args()
    missed = []
    for trace, times in RATES.items():
        rates = rates_of(trace)
        for groups in arguments.groups:
            rate = arguments.rate * times * groups
            found = {}
            for name, news, choice in (
                ("by chance", "none", by_chance()),
                ("fewest requests", "none", nullcontext()),
                ("by news", "each", nullcontext()),
            ):
                told = options_of(
                    trace, rate, arguments.seconds, news=news, forward=FORWARD,
                    seed=arguments.seed, level=arguments.level,
                )  # fmt: skip
                with choice:
                    found[name] = Simulation(config_of(groups), told, rates=rates).run().figures
            ideal = ideal_hit_rate(trace, rate, arguments.seconds, arguments.seed)
            rows = []
            for name in NAMES:
                fewest, by_news = found["fewest requests"][name], found["by news"][name]
                rows.append((name, *(f"{one[name]:,.2f}" for one in found.values()), f"{by_news / fewest:.2f}"))
            hits = (f"{one['prefix_hit_rate'] / ideal:.2f}" for one in found.values())
            rows.append(("hits, of the ideal", *hits, f"ideal {ideal:.2f}"))
            title = f"\n{trace}, {groups} groups, {found['by news']['requests']:.0f} requests"
            print(plain_table(title, ("figure", *found, "news / fewest"), rows), flush=True)
            fewest, by_news = found["fewest requests"], found["by news"]
            p50_gain = fewest["ttft_p50_ms"] / by_news["ttft_p50_ms"]
            if not is_met(
                trace, by_news["prefix_hit_rate"] / ideal, p50_gain, by_news["ttft_p99_ms"] / fewest["ttft_p99_ms"]
            ):
                missed.append(f"{trace}, {groups} groups")
    if missed:
        raise SystemExit(f"below a bar: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
