"""One simulation: traffic, cluster, faults, and the report of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.drafters.registry import CACHE
from actors.errors import spelled
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.simulate.cluster import Inspect, SimulatedCluster
from cluster.simulate.conversations import ConversationDraws, drawn_ahead
from cluster.simulate.events import Events
from cluster.simulate.exact_group import ExactGroup
from cluster.simulate.faults import Fault
from cluster.simulate.forward_time import ForwardTimes, MeasuredTimes
from cluster.simulate.gateway import ClientCall, Gateway, SimulatedTenant
from cluster.simulate.options import SimulationOptions
from cluster.simulate.records import Record, figures_of
from cluster.simulate.rounds import RoundCounts
from cluster.simulate.scripts import Scripts
from cluster.simulate.service_rates import Drafting, ServiceRates
from cluster.simulate.texts import LengthsOnly, PhraseTexts, Texts
from cluster.simulate.traffic import Traffic, TrafficSource, Turn
from cluster.tenants.registry import Policy
from cluster.tenants.scope import Sharing, scope_of

_SERVER_KEY = b"simulated"
_RATE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_DRAFTING_S = 40.0  # after the warm-up
_MANY_CONVERSATIONS = 50_000  # so many, and another process draws them: its start takes a few seconds
_MOST_RATE_WORKERS = 16  # beyond, sequences have a draft worker each anyway


def sharing_of_tenant(tenant: int, policy: Policy, group: str | None = None) -> Sharing:
    return Sharing(f"tenant-{tenant}", policy, group, _SERVER_KEY)


@dataclass(slots=True)
class Report:
    figures: dict[str, float]
    records: list[Record] = field(repr=False)
    # Of exact groups, after the warm-up:
    by_running: dict[int, RoundCounts] = field(repr=False)  # rounds that only decode, by their sequences
    draft_prompt_s: float = 0.0  # of draft workers, for prompts
    cache_gain: float = 0.0  # as in `RouterLoad`, since the start

    def as_json(self) -> dict[str, Any]:
        rates = {str(count): asdict(counts) for count, counts in sorted(self.by_running.items())}
        return {**self.figures, "rounds_by_sequences": rates}


class Simulation:
    """`calls` counts the requests under way; `on_end` sees each when it ends."""

    def __init__(
        self,
        config: ClusterConfig,
        options: SimulationOptions,
        *,
        texts: Texts | None = None,
        times: ForwardTimes | None = None,
        rates: ServiceRates | None = None,
        faults: Iterable[Fault] = (),
        inspect: Inspect = lambda item, script: None,
        on_end: Callable[[ClientCall], object] = lambda call: None,
        make_traffic: Callable[[Events, Callable[[Turn], object]], TrafficSource] | None = None,
        sharing_of: Callable[[int], Sharing] | None = None,
    ) -> None:
        """make_traffic, sharing_of (by tenant): None: by the options. rates: for level aggregate; None: exact runs
        measure them first. Raises ConfigError where level aggregate lacks what is configured."""
        self.events = Events()
        self.scripts = Scripts()
        self.calls: set[ClientCall] = set()
        self.records: list[Record] = []
        self._config = config
        self._options = options
        self._on_end = on_end
        times = times or MeasuredTimes(options.forward)
        is_exact = options.level == "exact"
        texts = texts or PhraseTexts(options.seed)
        if not is_exact:
            _refuse_what_rates_lack(config, options)
            rates = rates or measured_rates(config, options, texts=texts, times=times)
            texts = LengthsOnly()
        self.cluster = SimulatedCluster(
            self.events,
            config,
            options,
            scripts=self.scripts,
            vocab_size=texts.vocab_size,
            times=times,
            rates=None if is_exact else rates,
            inspect=inspect,
        )
        for fault in faults:
            self.cluster.plan(fault)
        self._sharing_of = sharing_of or (lambda tenant: sharing_of_tenant(tenant, options.policy))
        self._tenants: dict[int, SimulatedTenant] = {}
        self._num_sent = 0
        self.traffic = (make_traffic or self._traffic_over(texts))(self.events, self._send)

    def _traffic_over(self, texts: Texts) -> Callable[[Events, Callable[[Turn], object]], TrafficSource]:
        options, traffic = self._options, self._options.traffic
        draws = ConversationDraws(traffic, texts, options.seed, most_tokens=self.cluster.max_model_len - 1)
        is_long = traffic.clients is None and traffic.conversations_per_s * options.seconds >= _MANY_CONVERSATIONS
        conversations = drawn_ahead(draws) if is_long and options.level == "aggregate" else iter(draws)
        return lambda events, send: Traffic(events, traffic, conversations, options.seed, send=send)

    def run(self) -> Report:
        began = time.perf_counter()
        self.events.run(min(self._options.warm_up_s, self._options.seconds))
        for group in self.cluster.groups.values():
            if isinstance(group, ExactGroup):
                group.begin_counting()
        before = self.totals()
        self.events.run(self._options.seconds)
        return self._report(before, time.perf_counter() - began)

    def _send(self, turn: Turn) -> None:
        call = ClientCall(
            turn,
            self._tenant(turn.conversation.tenant),
            self._next_gateway,
            self.scripts,
            timeout_s=self._config.gateway.request_timeout_s,
            retries=self._options.traffic.retries,
            on_end=self._ended,
        )
        self.calls.add(call)
        self.records.append(call.record)
        call.begin()

    def _next_gateway(self) -> Gateway:
        """By turns, of those that are there; any where none is."""
        gateways, first = self.cluster.gateways, self._num_sent
        self._num_sent += 1
        turns = (gateways[(first + number) % len(gateways)] for number in range(len(gateways)))
        return next((gateway for gateway in turns if gateway.is_there), gateways[first % len(gateways)])

    def _ended(self, call: ClientCall) -> None:
        self.calls.remove(call)
        self._on_end(call)
        self.traffic.ended(call.turn, call.record.outcome == "answered")

    def _tenant(self, number: int) -> SimulatedTenant:
        known = self._tenants.get(number)
        if known is None:
            sharing = self._sharing_of(number)
            known = self._tenants[number] = SimulatedTenant(
                sharing.tenant_id, scope_of(sharing), self._options.tenant_limits.weight or 1.0
            )
        return known

    def totals(self) -> dict[str, float]:
        """Seconds, bytes and messages since the start, by the names of the figures."""
        cluster, traffic = self.cluster, self.cluster.log.meter.traffic
        return {
            "draft_workers_busy": cluster.draft_pool.busy_s,
            "store_written_bytes_per_s": traffic.written,
            "store_read_bytes_per_s": traffic.read,
            "store_messages_per_s": traffic.messages,
            "store_busy_share": cluster.log.bandwidth.busy_s,
            "probes_per_s": sum(gateway.num_probes + gateway.choice.num_probes for gateway in cluster.gateways),
        }

    def _report(self, before: Mapping[str, float], wall_s: float) -> Report:
        """before: totals when the warm-up ended."""
        options, cluster, traffic = self._options, self.cluster, self.cluster.log.meter.traffic
        counted = [record for record in self.records if record.arrived >= options.warm_up_s]
        seconds = options.seconds - options.warm_up_s
        figures = figures_of(counted, seconds, options.objectives)
        figures |= {name: (total - before[name]) / seconds for name, total in self.totals().items()}
        figures |= {
            "conversations_too_long": self.traffic.num_too_long if isinstance(self.traffic, Traffic) else 0,
            "groups": cluster.mean_groups,
            "draft_workers": cluster.mean_draft_workers,
            "busiest_gateway_share": max(gateway.server.busy_s for gateway in cluster.gateways) / options.seconds,
            "store_read_delay_ms": 1e3 * traffic.read_delay_s / max(1, traffic.reads),
            "events": self.events.num_done,
            "wall_s": wall_s,
        }
        by_running: dict[int, RoundCounts] = {}
        draft_prompt_s, emitted, from_cache = 0.0, 0, 0
        for group in cluster.groups.values():
            if isinstance(group, ExactGroup):
                draft_prompt_s += group.draft_prompt_s
                emitted += group.core.counters.emitted_tokens
                from_cache += group.core.counters.accepted_tokens[CACHE]
                for count, seen in group.by_running.items():
                    by_running.setdefault(count, RoundCounts()).add(seen)
        return Report(figures, self.records, by_running, draft_prompt_s, from_cache / max(1, emitted - from_cache))


def _refuse_what_rates_lack(config: ClusterConfig, options: SimulationOptions) -> None:
    """Figures that leave it out would look as if it did nothing."""
    costs = options.costs
    bandwidths = {
        name: getattr(costs, name) for name in ("store_bytes_per_s", "store_link_bytes_per_s", "link_bytes_per_s")
    }
    lacking = {f"costs.{name}": bandwidth for name, bandwidth in bandwidths.items() if bandwidth is not None}
    if config.router.objectives.are_set:
        lacking["router.objectives"] = config.router.objectives.model_dump(exclude_unset=True)
    for name, value in lacking.items():
        raise ConfigError(f"{name} is {spelled(value)}: only level exact goes by it, and the level is aggregate")


def _one_group(config: ClusterConfig) -> ClusterConfig:
    """It has the cluster's draft workers: a router's sequences are spread over all of them."""
    workers = min(config.draft.workers, _MOST_RATE_WORKERS)
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"groups": 1, "max_groups": None}),
            "draft": config.draft.model_copy(update={"workers": workers, "max_workers": None}),
        }
    )


def measured_rates(
    config: ClusterConfig,
    options: SimulationOptions,
    *,
    texts: Texts,
    times: ForwardTimes,
    seconds: float = 40.0,
    drafting: Drafting | None = None,
) -> ServiceRates:
    """Rates of rounds from exact runs of one group, with 1, 2, 4 ... requests of the same traffic under way. drafting:
    None: it is measured, too, if there is a draft model."""
    if drafting is None and config.draft.model != "none":
        drafting = measured_drafting(config, options, texts=texts, times=times)
    by_running: dict[int, RoundCounts] = {}
    speeds: list[float] = []
    cache_gains: dict[int, float] = {}
    one_group = _one_group(config)
    for clients in (count for count in _RATE_COUNTS if count <= config.router.max_running):
        traffic = options.traffic.model_copy(update={"clients": clients, "think_s": 0.0, "tool_s": 0.0})
        closed = options.model_copy(update={"level": "exact", "seconds": seconds, "warm_up_s": 0.0, "traffic": traffic})
        report = Simulation(one_group, closed, texts=texts, times=times).run()
        for count, seen in report.by_running.items():
            by_running.setdefault(count, RoundCounts()).add(seen)
        cache_gains[sum(record.outcome == "answered" for record in report.records)] = report.cache_gain
        speeds += [record.num_tokens / record.rounds for record in report.records if record.rounds > 1]
    return ServiceRates(by_running, times, config.router.max_prefill_rows, speeds or (1.0,), drafting, cache_gains)


def measured_drafting(
    config: ClusterConfig, options: SimulationOptions, *, texts: Texts, times: ForwardTimes, seeds: int = 4
) -> Drafting:
    """From exact runs of one group with its share of the traffic. Unlike rates, how often a router asks draft workers
    depends on how its load changes."""
    traffic, groups = options.traffic, config.target.groups
    share = {"conversations_per_s": traffic.conversations_per_s / groups}
    if traffic.clients is not None:
        share["clients"] = max(1, round(traffic.clients / groups))
    seconds = min(options.seconds, options.warm_up_s + _DRAFTING_S)
    own = options.model_copy(update={"level": "exact", "seconds": seconds, "traffic": traffic.model_copy(update=share)})
    by_running: dict[int, RoundCounts] = {}
    prompts_s, prompt_tokens = 0.0, 0
    for seed in range(options.seed, options.seed + seeds):
        seeded = own.model_copy(update={"seed": seed})
        report = Simulation(_one_group(config), seeded, texts=texts, times=times).run()
        for count, seen in report.by_running.items():
            by_running.setdefault(count, RoundCounts()).add(seen)
        prompts_s += report.draft_prompt_s
        prompt_tokens += sum(record.num_prompt for record in report.records if record.first_at > own.warm_up_s)
    return Drafting(by_running, prompts_s / max(1, prompt_tokens))
