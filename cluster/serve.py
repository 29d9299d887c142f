"""Puts a whole cluster on Ray: directory, target groups, draft workers, routers, gateways: one Serve application."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ray import serve

from actors.drafters.registry import (
    DRAFT_MODEL,
    EAGLE,
    OUROBOROS,
    expand_drafters,
    most_successors,
)
from actors.drafters.retrieval import open_corpora
from actors.errors import ModelError
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import (
    ModelInfo,
    check_attention,
    check_draft_ranks,
    check_encoder_decoder,
    check_exact,
    check_tensor_parallel,
    choose_device,
    read_config,
    read_model_info,
    refuse_encoder,
)
from actors.models.source import ModelSource
from actors.models.token_text import has_own_vocabulary
from actors.options import MTP_HEAD, DraftPoolOptions
from actors.training.drafter_build import default_drafter_dir, ready_drafter
from actors.workers.directory_actor import get_or_create_directory
from actors.workers.draft_pool import draft_pool_application
from actors.workers.gpu_shares import GpuDemand, needed_gpus, share_gpus
from actors.workers.settings import DraftSettings, TargetSettings
from actors.workers.target_group import target_group_application
from cluster.cache.promotion import PromotionSource
from cluster.cache.regions import RegionsSource
from cluster.config import ClusterConfig, DraftConfig, DraftModelConfig, TargetConfig, check_devices
from cluster.errors import ConfigError
from cluster.gateway.deployment import gateway_application
from cluster.gateway.served_model import ServedModel
from cluster.node_metrics import MOST_ON_PAGE
from cluster.ray_names import DIRECTORY
from cluster.router.configured_drafters import checked_drafters
from cluster.router.deployment import RouterSettings, router_application
from cluster.router.prefill_budget import round_limits
from cluster.tenants.access import TenantAccess, tenant_access
from cluster.text.tools.detect import format_of

_Pool = TypeVar("_Pool", bound=DraftPoolOptions)
_OUTCOMES_AHEAD = 8  # drafted for ahead by a GPU


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft model beside the first one."""

    options: DraftModelConfig
    source: ModelSource
    device: str
    has_own_vocabulary: bool  # then its drafts go by way of the text


def _cpus_of_drafts(options: DraftPoolOptions) -> float:
    ranks = options.tensor_parallel
    return options.most_workers * (0.5 if ranks == 1 else ranks)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything that is decided before Ray is touched: models found, devices chosen."""

    config: ClusterConfig
    target: ModelSource
    info: ModelInfo
    target_device: str
    draft: ModelSource | None  # its directory may not be there yet: see `builds_drafter`
    draft_device: str
    builds_drafter: bool
    access: TenantAccess
    draft_has_own_vocabulary: bool = False  # then its drafts go by way of the text
    more_drafts: Mapping[str, PlannedDraft] = field(default_factory=dict)  # by name, those that a drafter asks

    @property
    def num_cpus(self) -> float:
        """CPUs that the actors ask of Ray."""
        groups = self.config.target.most_groups * (0.1 + self.config.target.tensor_parallel)
        drafts = _cpus_of_drafts(self.config.draft) if self.draft is not None else 0.0
        drafts += sum(_cpus_of_drafts(draft.options) for draft in self.more_drafts.values())
        return groups + drafts + 0.1 * (self.config.target.most_groups + self.config.gateway.replicas) + 1.1

    @property
    def draft_ahead(self) -> int:
        """Outcomes of each draft that draft workers draft for before they are asked."""
        return _outcomes_ahead(self.config.draft, self.draft_device)

    @property
    def build_progress(self) -> Path | None:
        """File that says how far the drafter's build is, on the machine that builds it; None: nothing is built."""
        if self.draft is None or not self.builds_drafter:
            return None
        return self.draft.path.with_name(f"{self.draft.path.name}.progress")

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that run; without a draft model, none that needs one."""
        names = expand_drafters(
            self.config.speculation.drafters,
            has_head=self.config.target.eagle_head != "none",
            pools=tuple(self.config.more_drafts),
        )
        return tuple(name for name in names if name not in (DRAFT_MODEL, OUROBOROS) or self.draft is not None)


def plan_cluster(
    config: ClusterConfig,
    home: Path,
    progress: Progress = silent,
    choose: Callable[[str], str] = choose_device,
) -> ClusterPlan:
    """Find and prepare the models. choose: the device that a configured one stands for where the models will run.

    Raises ModelError, InvalidRequest or ConfigError, before anything is started.
    """
    access, _ = tenant_access(config, home)
    try:
        format_of("", config.target.tool_parser)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_devices(config)
    drafters = checked_drafters(config)
    _check_head_is_there(config.target.eagle_head)
    source = resolve_model(config.target.model, home, progress)
    info = read_model_info(source, config.target.served_name)
    _check_head_fits(config.target, source, info, drafters)
    check_exact(config.target)
    check_tensor_parallel(source, config.target.tensor_parallel)
    if config.speculation.corpora:
        open_corpora(config.speculation.corpora, info.tokenizer_fingerprint)
    draft, builds_drafter = None, False
    if any(name in drafters for name in (DRAFT_MODEL, OUROBOROS)) and config.draft.workers > 0:
        draft, builds_drafter = _draft_model(config.draft, source, info, home, progress)
        if draft is not None and config.draft.model != "auto" and OUROBOROS in drafters:
            refuse_encoder(draft, f"drafter {OUROBOROS!r}")
    target_device = choose(_device_of_ray(config.target.device))
    draft_device = choose(_device_of_ray(config.draft.device))
    check_attention(config.target, target_device)
    if draft is not None:
        check_attention(config.draft, draft_device)
        check_draft_ranks(draft, config.draft.tensor_parallel)
    has_own = draft is not None and not builds_drafter and has_own_vocabulary(draft, source)
    return ClusterPlan(
        config=config,
        target=source,
        info=info,
        target_device=target_device,
        draft=draft,
        draft_device=draft_device,
        builds_drafter=builds_drafter,
        access=access,
        draft_has_own_vocabulary=has_own,
        more_drafts={
            name: _planned_draft(options, source, home, progress, choose)
            for name, options in config.more_drafts.items()
            if drafters
        },
    )


def _check_head_is_there(head: str) -> None:
    """Raises ModelError for a directory that is not there."""
    if head not in ("none", MTP_HEAD) and not Path(head).is_dir():
        raise ModelError(f"target.eagle_head {head!r}: there is no such directory")


def _check_head_fits(target: TargetConfig, source: ModelSource, info: ModelInfo, drafters: tuple[str, ...]) -> None:
    """Raises ModelError for a target that can have no head, or has no MTP head, where the head drafts."""
    if info.is_encoder_decoder:
        check_encoder_decoder(source, target if EAGLE in drafters else target.model_copy(update={"eagle_head": "none"}))
    if target.eagle_head == MTP_HEAD and EAGLE in drafters:
        from actors.eagle.mtp_loading import check_mtp_head  # with torch, which takes its time to load

        check_mtp_head(source, read_config(source))


def _planned_draft(
    options: DraftModelConfig,
    target: ModelSource,
    home: Path,
    progress: Progress,
    choose: Callable[[str], str],
) -> PlannedDraft:
    device = choose(_device_of_ray(options.device))
    check_attention(options, device)
    source = resolve_model(options.model, home, progress)
    check_draft_ranks(source, options.tensor_parallel)
    return PlannedDraft(options, source, device, has_own_vocabulary(source, target))


def _outcomes_ahead(options: DraftPoolOptions, device: str) -> int:
    if options.ahead is None:
        return 0 if device == "cpu" else _OUTCOMES_AHEAD
    return options.ahead


def _draft_model(
    options: DraftConfig, target: ModelSource, info: ModelInfo, home: Path, progress: Progress
) -> tuple[ModelSource | None, bool]:
    """The draft model, None for none, and whether it is still to be built. info: of the target."""
    if options.model == "none":
        return None, False
    if options.model != "auto":
        return resolve_model(options.model, home, progress), False
    ready = ready_drafter(home, target)
    if info.is_encoder_decoder or not (options.build or ready):  # for an encoder none can be built
        return None, False
    directory = ready or default_drafter_dir(home, target)
    return ModelSource(spec="auto", name=directory.name, path=directory), ready is None


def with_gpu_shares(plan: ClusterPlan, nodes: Sequence[int]) -> ClusterPlan:
    """The plan with the share of a GPU that each rank and draft worker takes. Draft workers of several ranks take whole
    ones. nodes: GPUs of each node of the cluster.

    If `gpus` is configured for the target and for every draft model, nothing is checked, because nodes may be added
    later. Raises ConfigError if there are too few GPUs, which Ray would wait for silently, and if `gpus` is configured
    for some draft models but not for others.
    """
    target, draft = plan.config.target, plan.config.draft
    on_gpu = plan.target_device.startswith("cuda")
    drafts: dict[str, DraftPoolOptions] = {
        f"more_drafts.{name}": planned.options
        for name, planned in plan.more_drafts.items()
        if planned.device.startswith("cuda")
    }
    if plan.draft is not None and plan.draft_device.startswith("cuda"):
        drafts = {"draft": draft, **drafts}
    singles = {section: options for section, options in drafts.items() if options.tensor_parallel == 1}
    given = {options.gpus for options in singles.values()} or {draft.gpus}
    if len(given) > 1 and None in given:
        raise ConfigError(f"gpus is given for some of {', '.join(singles)}; give it for all of them, or for none")
    draft_gpus = None if None in given else max(gpus for gpus in given if gpus is not None)
    if not (on_gpu or drafts) or (target.gpus is not None and draft_gpus is not None):
        return plan
    fewest, most_workers = sum(o.workers for o in singles.values()), sum(o.most_workers for o in singles.values())
    groups = [options for options in drafts.values() if options.tensor_parallel > 1]
    least_groups = tuple(o.tensor_parallel for o in groups for _ in range(o.workers))
    most_groups = tuple(o.tensor_parallel for o in groups for _ in range(o.most_workers))
    least = GpuDemand(target.groups * on_gpu, target.tensor_parallel, fewest, least_groups)
    most = GpuDemand(target.most_groups * on_gpu, target.tensor_parallel, most_workers, most_groups)
    shares = share_gpus(nodes, least, most, target.gpus, draft_gpus)
    if shares is None:
        needed = needed_gpus(least, target.gpus, draft_gpus)
        ranks = target.tensor_parallel
        together = f", {ranks} of them on one node for each target group" if ranks > 1 else ""
        if least_groups:
            together += f", {max(least_groups)} on one node for a draft worker"
        raise ConfigError(
            f"the configuration needs {needed} GPU(s){together}; this Ray cluster has {sum(nodes)} "
            f"on {len(nodes)} node(s). To wait for nodes that are added later, set target.gpus and draft.gpus"
        )
    update = {} if draft_gpus is not None and len(given) > 1 else {"gpus": shares.draft}
    config = plan.config.model_copy(
        update={
            "target": target.model_copy(update={"gpus": shares.rank}),
            "draft": _shared(draft, update),
        }
    )
    more_drafts = {
        name: replace(planned, options=_shared(planned.options, update)) for name, planned in plan.more_drafts.items()
    }
    return replace(plan, config=config, more_drafts=more_drafts)


def _shared(options: _Pool, update: dict[str, float]) -> _Pool:
    """The options with their share of a GPU; a worker of several ranks has whole ones."""
    return options.model_copy(update=update) if options.tensor_parallel == 1 else options


def told_gpu_shares(plan: ClusterPlan) -> str | None:
    """Who has less than a GPU; None: nobody."""
    drafts = (plan.config.draft, *(planned.options for planned in plan.more_drafts.values()))
    rank, draft = plan.config.target.gpus or 1.0, min(options.gpus or 1.0 for options in drafts)
    return None if min(rank, draft) == 1.0 else f"a rank has {rank:g} of one, a draft worker {draft:g}"


def _device_of_ray(device: str) -> str:
    """The only GPU that a worker sees has no number."""
    return "cuda" if device == "cuda:0" else device


def device_elsewhere(device: str) -> str:
    """For `plan_cluster`, where models run on other nodes than this one: what is named need not be here. `auto` is what
    there is here."""
    return choose_device(device) if device == "auto" else device


def cluster_application(plan: ClusterPlan) -> serve.Application:
    """The Serve application of a plan. Ray must be initialised and Serve's proxies started.

    Where `cache.url` is None, its routers have no shared cache: see `cluster.cache.embedded_cache`.
    """
    config = plan.config
    get_or_create_directory(DIRECTORY, lifetime="detached")
    # The group gives up a batch after the same time as the router; otherwise it could be busy with it forever.
    upstream = [
        target_group_application(
            _target_settings(plan),
            DIRECTORY,
            batch_limit_s=config.router.verify_timeout_s,
            scaling=config.autoscaling,
            observability=config.observability,
        )
    ]
    upstream += [
        draft_pool_application(draft, DIRECTORY, config.autoscaling, config.observability)
        for draft in _draft_settings(plan)
    ]
    router = router_application(_router_settings(plan), *upstream, replicas=config.target.most_groups)
    return gateway_application(
        router,
        str(plan.target.path),
        served_model(plan),
        config.gateway,
        access=plan.access,
        observability=config.observability,
        directory_name=DIRECTORY,
        cache=config.cache,
        num_routers=config.target.most_groups,
    )


def _target_settings(plan: ClusterPlan) -> TargetSettings:
    config = plan.config
    eagle_head = config.target.eagle_head if EAGLE in plan.drafters else "none"
    if eagle_head not in ("none", MTP_HEAD):
        eagle_head = str(Path(eagle_head).resolve())
    return TargetSettings(
        source=plan.target,
        options=config.target.model_copy(update={"device": plan.target_device, "eagle_head": eagle_head}),
        fingerprint=plan.info.fingerprint,
        limits=replace(
            round_limits(config.router, config.speculation),
            successors=most_successors(plan.drafters, config.speculation.drafter_options),
        ),
    )


def _router_settings(plan: ClusterPlan) -> RouterSettings:
    config, cache = plan.config, plan.config.cache
    promotion = PromotionSource(plan.access.file, plan.target, cache.promotion) if cache.promotion.enabled else None
    regions = None
    if cache.regions.url is not None:
        regions = RegionsSource(plan.access.file, plan.target, cache.regions, cache.promotion)
    return RouterSettings(
        config.router,
        config.speculation,
        config.draft,
        cache,
        model=plan.info,
        tokenizer_dir=str(plan.target.path),
        directory_name=DIRECTORY,
        promotion=promotion,
        regions=regions,
        observability=config.observability,
        build_progress=plan.build_progress,
        more_drafts={name: planned.options for name, planned in plan.more_drafts.items()},
        metrics_by_node=config.target.most_groups > MOST_ON_PAGE,
    )


def _draft_settings(plan: ClusterPlan) -> Iterator[DraftSettings]:
    """The settings of each pool of draft workers."""
    if plan.draft is not None:
        update = {"device": plan.draft_device, "ahead": plan.draft_ahead}
        yield DraftSettings(
            plan.draft,
            plan.config.draft.model_copy(update=update),
            plan.target,
            needs_lookahead=OUROBOROS in plan.drafters,
        )
    for name, planned in plan.more_drafts.items():
        update = {"device": planned.device, "ahead": _outcomes_ahead(planned.options, planned.device)}
        yield DraftSettings(planned.source, planned.options.model_copy(update=update), plan.target, pool=name)


def served_model(plan: ClusterPlan) -> ServedModel:
    """As far as it is known before the target group has started."""
    limits = [plan.info.max_model_len, plan.config.target.max_model_len, plan.config.target.kv_cache_tokens]
    return ServedModel(
        name=plan.info.name,
        max_model_len=min(limit for limit in limits if limit is not None),
        vocab_size=plan.info.vocab_size,
        eos_token_ids=plan.info.eos_token_ids,
        created=int(time.time()),
        drafters=plan.drafters,
        tool_parser=plan.config.target.tool_parser,
        max_requests=plan.config.router.max_running + plan.config.router.max_waiting,
        max_side_len=plan.info.max_side_len,
    )
