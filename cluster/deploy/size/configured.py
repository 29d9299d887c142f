"""What a configuration allows of the ways to draft, to be compared with the best."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from actors.drafters.registry import DRAFT_MODEL, OUROBOROS, source_named
from actors.options import DraftPoolOptions
from actors.pool_names import FIRST_POOL
from cluster.config import MOST_DRAFT_ROWS, ClusterConfig, DraftConfig, DraftModelConfig
from cluster.deploy.size.estimate import (
    MAX_DRAFT_TOKENS,
    WORTHWHILE_GAIN,
    Deployment,
    DraftPool,
    Sizing,
    Speed,
    sizing_of,
)
from cluster.deploy.size.model_shape import known_model

_AHEAD_ON_GPUS = 8  # draft.ahead where it is left open
_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Configured:
    speed: Speed  # the cheapest that the configuration allows
    better: tuple[Speed, ...]  # ways of the same sizing that beat it, the best by the token first


def fill_in(asked: Namespace, config: ClusterConfig) -> Namespace:
    """The command's options, completed by a configuration: models, dtypes and numbers of GPUs that are None there are
    taken from here, except models that the configuration's drafters do not use. A directory stands for the known model
    of its name, if there is one."""
    target, draft, given, places, drafts = config.target, config.draft, vars(asked), _places(config), _drafts(config)
    gpus = asked.gpus and (asked.gpus if ":" in asked.gpus else f"{asked.gpus}:{target.tensor_parallel}")
    known = {
        "target": _named(target.model),
        "dtype": _dtype(target.quantization, target.dtype),
        "draft": _named(draft.model) if FIRST_POOL in drafts and draft.model != _AUTO else None,
        "draft_dtype": _dtype(draft.quantization, draft.dtype),
        "eagle_head": target.eagle_head if "target" in places else None,
    }
    more_drafts = {
        section: (_named(one.model), _dtype(one.quantization, one.dtype))
        for section, one in drafts.items()
        if section != FIRST_POOL
    }
    draft_ranks = {section: one.tensor_parallel for section, one in drafts.items()}
    filled = {key: known[key] for key in known if given[key] is None}
    return Namespace(**{**given, "gpus": gpus, **filled, "more_drafts": more_drafts, "draft_ranks": draft_ranks})


def judged(sizing: Sizing, config: ClusterConfig) -> Configured:
    """The speed that a configuration allows, and what is better by more than 1 %: by the token, or on as many GPUs."""
    deployment = sizing.deployment
    speed = sizing_of(_as_configured(deployment, config)).cheapest

    def by_price(one: Speed) -> float:
        return one.tokens_per_s / deployment.price(one.draft_gpus)

    better = [
        one
        for one in sizing.speeds
        if by_price(one) > WORTHWHILE_GAIN * by_price(speed)
        or (one.draft_gpus <= speed.draft_gpus and one.tokens_per_s > WORTHWHILE_GAIN * speed.tokens_per_s)
    ]
    return Configured(speed, tuple(sorted(better, key=by_price, reverse=True)))


def _as_configured(deployment: Deployment, config: ClusterConfig) -> Deployment:
    """The deployment with the drafters and limits of a configuration."""
    speculation, drafts = config.speculation, _drafts(config)
    running = min(deployment.concurrency, config.router.max_running)
    most = min(speculation.max_draft_tokens, (speculation.max_rows or MOST_DRAFT_ROWS) // running, MAX_DRAFT_TOKENS)
    places = _places(config)
    return replace(
        deployment,
        concurrency=running,
        pools=tuple(_limited(pool, drafts[pool.section]) for pool in deployment.pools if pool.section in drafts),
        head=deployment.head if "target" in places else None,
        cpu_acceptance=deployment.cpu_acceptance if "router" in places else None,
        draft_tokens=None,
        most_draft_tokens=most,
        head_levels=config.target.eagle_depth + 1,  # the root's children, and a level for each expanded one
    )


def _limited(pool: DraftPool, options: DraftPoolOptions) -> DraftPool:
    return replace(
        pool,
        most_levels=options.gamma,
        outcomes=_AHEAD_ON_GPUS if options.ahead is None else options.ahead,
        min_workers=max(1, options.workers),
        max_workers=max(1, options.most_workers),
    )


def _drafts(config: ClusterConfig) -> dict[str, DraftConfig | DraftModelConfig]:
    """The draft models that the configuration's drafters ask, by section."""
    drafters, first = config.speculation.drafters, config.draft
    drafts: dict[str, DraftConfig | DraftModelConfig] = {}
    if {_AUTO, DRAFT_MODEL, OUROBOROS} & set(drafters) and first.model != _NONE and first.most_workers:
        drafts[FIRST_POOL] = first
    if drafters and _NONE not in drafters:
        drafts |= {f"more_drafts.{name}": options for name, options in config.more_drafts.items()}
    return drafts


def _places(config: ClusterConfig) -> set[str]:
    """Where the configuration drafts beside draft workers, as `DraftSource.place`."""
    named = [source_named(name) for name in config.speculation.drafters]
    places: set[str] = {one.place for one in named if one is not None}
    if _AUTO in config.speculation.drafters:
        places |= {"router", "target"}
    if config.target.eagle_head == _NONE:
        places -= {"target"}
    return places


def _named(model: str) -> str:
    name = PurePosixPath(model).name
    return model if known_model(name) is None else name


def _dtype(quantization: str, dtype: str) -> str:
    """auto stands for bfloat16, in which almost all checkpoints are published."""
    if quantization != _NONE:
        return quantization
    return "bfloat16" if dtype == _AUTO else dtype
