"""Small simulated clusters with random traffic and faults, and what must hold in all of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from actors.messages import VerifyItem
from cluster.config import ClusterConfig
from cluster.simulate.faults import random_faults
from cluster.simulate.gateway import GATEWAY_LOST, ClientCall, is_right
from cluster.simulate.options import SimulationOptions
from cluster.simulate.scripts import Script
from cluster.simulate.simulation import Simulation, sharing_of_tenant
from cluster.simulate.texts import PhraseTexts
from cluster.tenants.scope import Sharing

_SECONDS = 6.0  # of arrivals and faults
_LONGEST_S = 700.0  # until everything is over: longer than any request may take
_STEP_S = 5.0  # between looks whether it is
_REST_S = 15.0  # afterwards: longer than what is left of faults, and than anything needs to notice one
_RESERVED = 2  # token ids below are nobody's own
_COMPANIES = (("isolated", None), ("promoted", None), ("group", "red"), ("group", "blue"), ("shared", None))


@dataclass(slots=True)
class Chaos:
    """One run; `problems` is empty where everything held."""

    seed: int
    problems: list[str] = field(default_factory=list)
    num_requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    outcomes: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    num_drafted: int = 0  # draft tokens that were inspected
    num_of_company: int = 0  # of these, tokens of another tenant that shares with this one


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
            "gateway": {"replicas": drawn.randint(1, 3), "request_timeout_s": drawn.choice([5.0, 60.0, 600.0])},
        }
    )


def chaos_options(seed: int, drawn: random.Random) -> SimulationOptions:
    traffic = {
        "conversations_per_s": drawn.choice([1.0, 2.0, 4.0]),
        "arrivals": drawn.choice(["poisson", "gamma", "mmpp"]),
        "tenants": drawn.randint(1, 6),
        "tenant_skew": 0.5,
        "batch_share": drawn.choice([0.0, 0.5]),
        "turns": 2.0,
        "think_s": 1.0,
        "system_tokens": 16,
        "prompt_tokens": 16,
        "answer_tokens": 24,
        "cancelled_share": drawn.choice([0.0, 0.3]),
    }
    limits = [{}, {"max_concurrent": 4}, {"tokens_per_minute": 2000}, {"requests_per_second": 2.0}]
    return SimulationOptions.model_validate(
        {"seed": seed, "seconds": _SECONDS, "traffic": traffic, "tenant_limits": drawn.choice(limits)}
    )


def _sharing(drawn: random.Random, num_tenants: int) -> list[Sharing]:
    """One policy for all, or one for each; tenants of a group are in one of two."""
    policies = drawn.choice([("isolated",), ("promoted",), ("group",), ("isolated", "promoted", "group", "shared")])
    companies = [one for one in _COMPANIES if one[0] in policies]
    return [sharing_of_tenant(tenant, *drawn.choice(companies)) for tenant in range(num_tenants)]


def _company(tenant: int, sharing: list[Sharing]) -> list[int]:
    """Tenants whose text this one's drafts may have."""
    own = sharing[tenant]
    if own.policy in ("isolated", "promoted"):
        return [tenant]
    return [other for other, one in enumerate(sharing) if (one.policy, one.group) == (own.policy, own.group)]


class _Inspection:
    """Whose tokens are in drafts."""

    def __init__(self, chaos: Chaos, texts: PhraseTexts, sharing: list[Sharing]) -> None:
        self._chaos = chaos
        self._texts = texts
        self._companies = [
            [texts.tokens_of(other) for other in _company(tenant, sharing)] for tenant in range(len(sharing))
        ]

    def __call__(self, item: VerifyItem, script: Script) -> None:
        chaos, tenant = self._chaos, script.tenant
        own = self._texts.tokens_of(tenant)
        for token in item.tree.token_ids.tolist():
            chaos.num_drafted += 1
            if token < _RESERVED or token in own or token in self._texts.common_tokens:
                continue
            if any(token in tokens for tokens in self._companies[tenant]):
                chaos.num_of_company += 1
            else:
                chaos.problems.append(f"token {token} was drafted for tenant {tenant}, who must not have it")


class _Ends:
    """How requests end."""

    def __init__(self, chaos: Chaos) -> None:
        self.counts: Counter[str] = Counter()
        self._chaos = chaos

    def __call__(self, call: ClientCall) -> None:
        record, chaos = call.record, self._chaos
        self.counts[call.name] += 1
        chaos.outcomes[record.outcome] += 1
        chaos.num_resumed += record.resumed
        if not is_right(call):
            answer = f"{len(call.received)} tokens of {len(call.turn.answer)}"
            chaos.problems.append(f"{call.name} ended as {record.outcome} with {answer}, not the right ones")
        if (record.outcome == GATEWAY_LOST) == call.gateway.is_there:
            chaos.problems.append(
                f"{call.name} ended as {record.outcome}; is its gateway there: {call.gateway.is_there}"
            )


def run_chaos(seed: int) -> Chaos:
    """Every request ends exactly once; no token is lost or comes twice; no draft has tokens of a tenant that does not
    share with the request's; a gateway's end ends the requests that it has, and no others."""
    drawn, chaos = random.Random(seed), Chaos(seed)
    config, options = chaos_config(drawn), chaos_options(seed, drawn)
    sharing = _sharing(drawn, options.traffic.tenants)
    texts = PhraseTexts(seed, tokens_of_tenant=1000, num_common=3)
    faults = random_faults(seed, drawn.randint(0, 8), within_s=_SECONDS, longest_s=drawn.choice([0.5, 2.0, 6.0]))
    ends = _Ends(chaos)
    simulation = Simulation(
        config,
        options,
        texts=texts,
        faults=faults,
        inspect=_Inspection(chaos, texts, sharing),
        on_end=ends,
        sharing_of=sharing.__getitem__,
    )
    simulation.run()
    simulation.traffic.stop()
    events = simulation.events
    while simulation.calls and events.now < _LONGEST_S:
        events.run(events.now + _STEP_S)
    events.run(events.now + _REST_S)
    chaos.num_requests = len(simulation.records)
    chaos.faults.update(fault.kind for fault in faults)
    chaos.problems += [f"{name} ended {count} times" for name, count in ends.counts.items() if count != 1]
    chaos.problems += [f"{call.name} has not ended" for call in simulation.calls]
    chaos.problems += [
        f"{group.name} still has {group.num_open} requests"
        for group in simulation.cluster.groups.values()
        if group.num_open
    ]
    return chaos
