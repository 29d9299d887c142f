"""What a configuration allows of the ways to draft, to be compared with the best."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from actors.drafters.registry import source_named
from cluster.config import MOST_DRAFT_ROWS, ClusterConfig
from cluster.deploy.size.estimate import MAX_DRAFT_TOKENS, WORTHWHILE_GAIN, Deployment, Sizing, Speed, sizing_of
from cluster.deploy.size.model_shape import MODELS

_AHEAD_ON_GPUS = 8  # draft.ahead where it is left open
_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Configured:
    speed: Speed  # the cheapest that the configuration allows
    better: tuple[Speed, ...]  # ways of the same sizing that beat it, the best by the token first


def fill_in(asked: Namespace, config: ClusterConfig) -> Namespace:
    """The command's options, completed by a configuration: models, dtypes and number of GPUs that are None there are
    taken from here, except models that the configuration's drafters do not use. A directory stands for the known model
    of its name, if there is one."""
    target, draft, given, places = config.target, config.draft, vars(asked), _places(config)
    gpus = asked.gpus and (asked.gpus if ":" in asked.gpus else f"{asked.gpus}:{target.tensor_parallel}")
    known = {
        "target": _named(target.model),
        "dtype": _dtype(target.quantization, target.dtype),
        "draft": _named(draft.model) if "draft_worker" in places and draft.model != _AUTO else None,
        "draft_dtype": _dtype(draft.quantization, draft.dtype),
        "eagle_head": target.eagle_head if "target" in places else None,
    }
    return Namespace(**{**given, "gpus": gpus, **{key: known[key] for key in known if given[key] is None}})


def judged(sizing: Sizing, config: ClusterConfig) -> Configured:
    """The speed that a configuration allows, and what is better by more than 1 %: by the token, or on as many GPUs."""
    deployment = sizing.deployment
    speed = sizing_of(_as_configured(deployment, config)).cheapest

    def by_price(one: Speed) -> float:
        return one.tokens_per_s / deployment.price(one.draft_workers)

    better = [
        one
        for one in sizing.speeds
        if by_price(one) > WORTHWHILE_GAIN * by_price(speed)
        or (one.draft_workers <= speed.draft_workers and one.tokens_per_s > WORTHWHILE_GAIN * speed.tokens_per_s)
    ]
    return Configured(speed, tuple(sorted(better, key=by_price, reverse=True)))


def _as_configured(deployment: Deployment, config: ClusterConfig) -> Deployment:
    """The deployment with the drafters and limits of a configuration."""
    speculation, draft = config.speculation, config.draft
    running = min(deployment.concurrency, config.router.max_running)
    most = min(speculation.max_draft_tokens, (speculation.max_rows or MOST_DRAFT_ROWS) // running, MAX_DRAFT_TOKENS)
    places = _places(config)
    return replace(
        deployment,
        concurrency=running,
        drafter=deployment.drafter if "draft_worker" in places else None,
        head=deployment.head if "target" in places else None,
        cpu_acceptance=deployment.cpu_acceptance if "router" in places else None,
        draft_tokens=None,
        most_draft_tokens=most,
        most_levels=draft.gamma,
        head_levels=config.target.eagle_depth + 1,  # the root's children, and a level for each expanded one
        outcomes=_AHEAD_ON_GPUS if draft.ahead is None else draft.ahead,
        min_workers=max(1, draft.workers),
        max_workers=max(1, draft.most_workers),
    )


def _places(config: ClusterConfig) -> set[str]:
    """Where the configuration drafts, as `DraftSource.place`."""
    named = [source_named(name) for name in config.speculation.drafters]
    places: set[str] = {one.place for one in named if one is not None}
    if _AUTO in config.speculation.drafters:
        places |= {"router", "draft_worker", "target"}
    if config.draft.model == _NONE or not config.draft.most_workers:
        places -= {"draft_worker"}
    if config.target.eagle_head == _NONE:
        places -= {"target"}
    return places


def _named(model: str) -> str:
    name = PurePosixPath(model).name
    return name if name.lower() in MODELS else model


def _dtype(quantization: str, dtype: str) -> str:
    """auto stands for bfloat16, in which almost all checkpoints are published."""
    if quantization != _NONE:
        return quantization
    return "bfloat16" if dtype == _AUTO else dtype
