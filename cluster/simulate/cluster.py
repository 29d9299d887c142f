"""The simulated cluster: groups, draft workers, shared cache and gateways, made from a cluster's own configuration."""

from __future__ import annotations

from collections.abc import Callable

from actors.drafters.registry import create_drafters, expand_drafters
from actors.messages import VerifyItem
from actors.pool_names import FIRST_POOL
from cluster.config import NO_CACHE, ClusterConfig
from cluster.router.core import RouterCore
from cluster.router.guarded_sink import SharedLearning
from cluster.router.worker_drafting import DraftShape
from cluster.routing.announcer import Announcer
from cluster.routing.heard_routers import HeardRouters
from cluster.simulate.cluster_scaling import ClusterScaling
from cluster.simulate.draft_workers import DraftPool
from cluster.simulate.events import Events
from cluster.simulate.exact_group import ExactGroup
from cluster.simulate.failures import Failures
from cluster.simulate.faults import Fault
from cluster.simulate.fluid_cache import FluidCache
from cluster.simulate.fluid_group import FluidGroup
from cluster.simulate.forward_time import ForwardTimes
from cluster.simulate.gateway import Gateway
from cluster.simulate.news import Audience, SimulatedPublisher, announcer_of
from cluster.simulate.options import SimulationOptions
from cluster.simulate.rounds import Group
from cluster.simulate.router_choice import Readiness, RouterChoice
from cluster.simulate.scripts import Script, Scripts
from cluster.simulate.service_rates import ServiceRates
from cluster.simulate.shared_log import RouterCache, SharedLog
from cluster.simulate.target import ScriptedTarget
from cluster.simulate.tenant_leases import GatewayLimiters, StoredLimits
from cluster.tenants.registry import TenantLimits

_KV_TOKENS = 2**17  # of a group whose configuration leaves it open

Inspect = Callable[[VerifyItem, Script], object]


class SimulatedCluster:
    def __init__(
        self,
        events: Events,
        config: ClusterConfig,
        options: SimulationOptions,
        *,
        scripts: Scripts,
        vocab_size: int,
        times: ForwardTimes,
        rates: ServiceRates | None = None,
        inspect: Inspect = lambda item, script: None,
    ) -> None:
        """rates: of aggregated groups; None: each round is computed."""
        self.events = events
        self.scripts = scripts
        self.readiness = Readiness()
        self.groups: dict[str, Group] = {}
        self.log = SharedLog(events, options.costs)
        self.draft_pool = DraftPool(events, scripts, options.draft, options.seed, self._draft_workers_changed)
        self.mean_draft_workers = self.mean_groups = 0.0
        self._config = config
        self._options = options
        self._vocab_size = vocab_size
        self._times = times
        self._rates = rates
        self._has_cache = config.cache.url != NO_CACHE
        self._inspect = inspect
        self._num_started = self._num_cores = 0
        self._audience = Audience(config.gateway.replicas)
        self._heard: HeardRouters | None = HeardRouters() if options.news == "shared" else None
        for _ in range(config.draft.workers if config.draft.model != "none" else 0):
            self.draft_pool.start()
        for _ in range(config.target.groups):
            self._start_group()
        self._stored_limits = StoredLimits() if self._has_leases else None
        self.gateways = [self._gateway(number) for number in range(config.gateway.replicas)]
        self._failures = Failures(events, self.groups, self.gateways, self.draft_pool, self.log, options.zones)
        self._scaling = ClusterScaling(
            events,
            config,
            self.groups,
            self.draft_pool,
            start_s=options.start_s,
            start_group=self._start_group,
            stop_group=self._stop_group,
            scales_drafts=rates is None,
        )
        events.every(1.0, self._sample)

    # Gateways

    @property
    def _has_leases(self) -> bool:
        """As in production, a gateway that is alone needs none, and there are none without a store."""
        has_limits = self._options.tenant_limits != TenantLimits()
        return has_limits and self._config.gateway.replicas > 1 and self._config.cache.url != NO_CACHE

    def _gateway(self, number: int) -> Gateway:
        options, seed = self._options, self._options.seed * 1000 + number
        gateway = Gateway(
            self.events,
            options.costs,
            lambda: RouterChoice(self.readiness, seed, self._heard),
            lambda gateway: GatewayLimiters(
                self.events,
                options.tenant_limits,
                self._config.gateway.replicas,
                self._stored_limits,
                store_s=options.costs.store_s,
                reaches_store=lambda: self.log.is_there and not gateway.store.is_cut,
                seed=seed,
            ),
            lambda gateway: self._audience.joined.append(gateway.hear),
        )
        if self._options.news == "each":
            self._audience.add(gateway.hear)
        elif self._options.news == "shared" and not self._audience.hearers:  # it hears for all
            self._audience.add(lambda router, news, now: gateway.choice.hear(news, now))
        return gateway

    # Groups

    def _start_group(self) -> None:
        number = self._num_started
        self._num_started += 1
        name, zone = f"group-{number}", number % self._options.zones
        group: Group
        if self._rates is not None:
            blocks = self._config.target.kv_cache_tokens or _KV_TOKENS
            group = FluidGroup(
                name,
                zone,
                self.events,
                self.scripts,
                self._config.router,
                self._rates,
                blocks,
                self._told_readiness,
                (lambda: self._announcer(name)) if self._options.news != "none" else None,
                draft_pool=self.draft_pool,
                cache=FluidCache(self.log, self._config.cache.max_namespaces) if self._has_cache else None,
            )
        else:
            group = self._exact_group(name, zone)
        self.groups[name] = group
        self.readiness.groups.append(group)
        self.readiness.ready[group.name] = group

    def _announcer(self, name: str) -> Announcer:
        return announcer_of(name, SimulatedPublisher(name, self.events, self._options.costs.hop_s, self._audience))

    def _exact_group(self, name: str, zone: int) -> ExactGroup:
        target, options = self._config.target, self._options
        scripted = ScriptedTarget(
            self.scripts,
            self._times,
            vocab_size=self._vocab_size,
            max_model_len=target.max_model_len or self.max_model_len,
            block_size=target.block_size,
            num_blocks=max(1, (target.kv_cache_tokens or _KV_TOKENS) // target.block_size),
            inspect=self._inspect,
        )
        group = ExactGroup(
            name,
            zone,
            self.events,
            scripted,
            lambda: self._core(scripted),
            draft_pool=self.draft_pool,
            draft_deadline_s=self._config.draft.deadline_ms / 1e3,
            costs=options.costs,
            on_change=self._told_readiness,
            make_announcer=lambda: self._announcer(name),
        )
        group.set_draft_workers()
        return group

    @property
    def max_model_len(self) -> int:
        return self._config.target.max_model_len or (self._config.target.kv_cache_tokens or _KV_TOKENS) // 2

    def _core(self, target: ScriptedTarget) -> tuple[RouterCore, RouterCache | None]:
        config, speculation = self._config, self._config.speculation
        names = expand_drafters(speculation.drafters, has_draft_model=bool(self.draft_pool.workers))
        cache = None
        if self._has_cache:
            cache = RouterCache(self.log, self._vocab_size, config.cache.max_namespaces)
        drafters = create_drafters(names, index=cache, options=speculation.drafter_options)
        self._num_cores += 1
        core = RouterCore(
            target.info(),
            config.router.model_copy(update={"send_ahead": "off"}),
            speculation.model_copy(update={"drafters": names}),
            drafters,
            draft_shapes={FIRST_POOL: DraftShape(config.draft.gamma, config.draft.branch)},
            shared=SharedLearning(cache),
            seq_id_base=self._num_cores << 32,
        )
        return core, cache

    def _told_readiness(self, group: Group) -> None:
        """Gateways learn of it a little later."""
        self.events.after(self._options.costs.readiness_s, self._note_readiness, group, group.is_ready)

    def _note_readiness(self, group: Group, is_ready: bool) -> None:
        if is_ready and group.name in self.groups:
            self.readiness.ready[group.name] = group
        else:
            self.readiness.ready.pop(group.name, None)

    def _draft_workers_changed(self) -> None:
        for group in self.groups.values():
            if isinstance(group, ExactGroup):
                group.set_draft_workers()

    def _stop_group(self, group: Group) -> None:
        group.drain()
        del self.groups[group.name]
        self.readiness.groups.remove(group)

    def _sample(self) -> None:
        share = 1.0 / self.events.now  # a second of all that have passed
        self.mean_draft_workers += share * (len(self.draft_pool.workers) - self.mean_draft_workers)
        self.mean_groups += share * (len(self.groups) - self.mean_groups)

    def plan(self, fault: Fault) -> None:
        self._failures.plan(fault)
