"""Builds the drafters' configuration and the engines of a `LocalEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.build import build_draft_engine, build_target_engine
from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_draft_engine import RetokenizedDraftEngine
from actors.draft_model.warm_up import warm_up
from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import DRAFT_MODEL, EAGLE, OUROBOROS, expand_drafters
from actors.engine.target_engine import TargetEngine
from actors.errors import ModelError
from actors.grammar.grammars import Grammars
from actors.models.loader import choose_device, refuse_encoder
from actors.models.source import ModelSource
from actors.options import DraftOptions
from actors.workers.gpu_shares import GpuDemand, share_gpus
from actors.workers.gpus import on_device
from cluster.config import ClusterConfig, SpeculationConfig
from cluster.router.cpu_drafting import check_required_rows, least_max_rows
from cluster.router.draft_budget import USUAL_DRAFT_ROWS
from cluster.router.prefill_budget import round_limits


def drafter_names(config: ClusterConfig, source: ModelSource, draft_source: ModelSource | None) -> tuple[str, ...]:
    """Names of the drafters to run. Raises ModelError for one whose model is missing."""
    has_head = config.target.eagle_head != "none"
    names = expand_drafters(
        config.speculation.drafters,
        has_draft_model=draft_source is not None,
        has_head=has_head,
        pools=tuple(config.more_drafts),
    )
    if needs_first_draft(names) and draft_source is None:
        name = OUROBOROS if OUROBOROS in names else DRAFT_MODEL
        build = f"; run: paceline drafter build --target {source.spec}" if config.draft.model == "auto" else ""
        raise ModelError(f"drafter {name!r} needs a draft model, and --draft-model is {config.draft.model!r}{build}")
    if OUROBOROS in names and draft_source is not None:
        refuse_encoder(draft_source, f"drafter {OUROBOROS!r}")
    if EAGLE in names and not has_head:
        raise ModelError(f"drafter {EAGLE!r} needs a head of the model, and --eagle-head is 'none'")
    return names


def needs_first_draft(names: tuple[str, ...]) -> bool:
    return DRAFT_MODEL in names or OUROBOROS in names


def with_required_rows(
    config: SpeculationConfig, names: tuple[str, ...], drafters: Mapping[str, CpuDrafter]
) -> SpeculationConfig:
    """The configuration with these drafters and enough rows in a round for those they require."""
    max_rows = config.max_rows
    if max_rows is not None:
        check_required_rows(drafters.values(), max_rows, config.acceptance, "max_rows")
    else:
        needed = least_max_rows(drafters.values(), config.acceptance) + config.max_draft_tokens
        max_rows = needed if needed > USUAL_DRAFT_ROWS else None
    return config.model_copy(update={"drafters": names or ("none",), "max_rows": max_rows})


def share_gpu(config: ClusterConfig, draft_devices: Sequence[str]) -> tuple[ClusterConfig, float | None]:
    """The configuration with the target's share of the GPU that it is on together with draft models, and the share of
    each of these; without meaning on a CPU. None: as configured."""
    demand = GpuDemand(1, 1, sum(device == config.target.device for device in draft_devices))
    shares = share_gpus([1], demand, demand, config.target.gpus, config.draft.gpus) if demand.workers else None
    if shares is None:
        return config, None
    return config.model_copy(update={"target": config.target.model_copy(update={"gpus": shares.rank})}), shares.draft


def build_target(config: ClusterConfig, source: ModelSource, names: tuple[str, ...]) -> TargetEngine:
    options = config.target if EAGLE in names else config.target.model_copy(update={"eagle_head": "none"})
    with on_device(torch.device(choose_device(options.device))):
        return build_target_engine(source, options, limits=round_limits(config.router, config.speculation))


def build_draft(
    options: DraftOptions, source: ModelSource, target: ModelSource, grammars: Grammars
) -> DraftEngine | RetokenizedDraftEngine:
    """Without drafting ahead: this process does nothing else while the target verifies."""
    with on_device(torch.device(choose_device(options.device))):
        options = options.model_copy(update={"ahead": 0})
        engine = build_draft_engine(source, options, target=target, grammars=grammars)
        warm_up(engine, options.gamma, options.branch)
        return engine
