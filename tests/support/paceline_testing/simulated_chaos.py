"""Small simulated clusters with random traffic and faults, and what must hold in all of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from actors.messages import VerifyItem
from cluster.config import ClusterConfig
from cluster.simulate.faults import random_faults
from cluster.simulate.gateway import ClientCall, is_right
from cluster.simulate.options import SimulationOptions
from cluster.simulate.scripts import Script
from cluster.simulate.simulation import Simulation
from cluster.simulate.texts import PhraseTexts

_SECONDS = 4.0  # of arrivals and faults
_REST_S = 700.0  # until everything is over: longer than any request may take
_RESERVED = 2  # token ids below are nobody's own


@dataclass(slots=True)
class Chaos:
    """One run; `problems` is empty where everything held."""

    seed: int
    problems: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    num_drafted: int = 0  # draft tokens that were inspected


def chaos_config(drawn: random.Random) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "target": {
                "groups": drawn.randint(1, 4),
                "kv_cache_tokens": drawn.choice([512, 1024, 4096]),
                "max_model_len": 400,
                "block_size": drawn.choice([4, 16]),
            },
            "draft": {"workers": drawn.randint(1, 3), "gamma": 4, "model": drawn.choice(["auto", "none"])},
            "router": {
                "max_running": drawn.choice([2, 8]),
                "max_waiting": drawn.choice([2, 16]),
                "objectives": drawn.choice([{}, {"interactive": {"ttft_s": 0.3, "tpot_s": 0.02}}]),
            },
            "gateway": {"replicas": drawn.randint(1, 2), "request_timeout_s": drawn.choice([5.0, 60.0, 600.0])},
        }
    )


def chaos_options(seed: int, drawn: random.Random) -> SimulationOptions:
    traffic = {
        "conversations_per_s": drawn.choice([0.5, 1.0, 3.0]),
        "arrivals": drawn.choice(["poisson", "gamma", "mmpp"]),
        "tenants": drawn.randint(1, 4),
        "batch_share": drawn.choice([0.0, 0.5]),
        "turns": 2.0,
        "think_s": 1.0,
        "system_tokens": 16,
        "prompt_tokens": 16,
        "answer_tokens": 14,
        "cancelled_share": drawn.choice([0.0, 0.3]),
    }
    return SimulationOptions.model_validate(
        {
            "seed": seed,
            "seconds": _SECONDS,
            "traffic": traffic,
            "policy": drawn.choice(["isolated", "promoted"]),
            "tenant_limits": drawn.choice([{}, {"max_concurrent": 4}, {"tokens_per_minute": 2000}]),
        }
    )


def run_chaos(seed: int) -> Chaos:
    """Every request ends exactly once, no token is lost or comes twice, and no draft has another tenant's tokens."""
    drawn, chaos = random.Random(seed), Chaos(seed)
    config, options = chaos_config(drawn), chaos_options(seed, drawn)
    texts = PhraseTexts(seed, tokens_of_tenant=1000)
    faults = random_faults(seed, drawn.randint(0, 6), within_s=_SECONDS, longest_s=drawn.choice([0.5, 2.0, 6.0]))
    ended: Counter[str] = Counter()

    def inspect(item: VerifyItem, script: Script) -> None:
        own = texts.tokens_of(script.tenant)
        for token in item.tree.token_ids.tolist():
            chaos.num_drafted += 1
            if token >= _RESERVED and token not in own:
                chaos.problems.append(f"token {token} was drafted for tenant {script.tenant}, which never had it")

    def check(call: ClientCall) -> None:
        ended[call.name] += 1
        chaos.outcomes[call.record.outcome] += 1
        chaos.num_resumed += call.record.resumed
        if not is_right(call):
            answer = f"{len(call.received)} tokens of {len(call.turn.answer)}"
            chaos.problems.append(f"{call.name} ended as {call.record.outcome} with {answer}, not the right ones")

    simulation = Simulation(config, options, texts=texts, faults=faults, inspect=inspect, on_end=check)
    simulation.run()
    simulation.traffic.stop()
    simulation.events.run(_SECONDS + _REST_S)
    chaos.num_requests, chaos.num_faults = len(simulation.records), len(faults)
    chaos.problems += [f"{name} ended {count} times" for name, count in ended.items() if count != 1]
    chaos.problems += [f"{call.name} has not ended" for call in simulation.calls]
    chaos.problems += [
        f"{group.name} still has {group.num_open} requests"
        for group in simulation.cluster.groups.values()
        if group.num_open
    ]
    return chaos
