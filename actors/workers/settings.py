"""Settings of a target group and a draft worker. Imports no engine: the Serve replica of a group needs none."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.engine.options import RoundLimits
from actors.models.source import ModelSource
from actors.options import DraftPoolOptions, TargetGroupOptions
from actors.pool_names import FIRST_POOL


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of a target group; the same on all of its ranks."""

    source: ModelSource
    options: TargetGroupOptions  # with the device chosen, and eagle_head "none" where there is no head
    fingerprint: str = ""  # fingerprint of the model's weights
    limits: RoundLimits = field(default_factory=RoundLimits)  # of the routers' rounds


@dataclass(frozen=True, slots=True)
class DraftSettings:
    source: ModelSource
    options: DraftPoolOptions  # with the device chosen; `ahead` None is 0
    target: ModelSource | None = None  # for its tokenizer; None: the vocabularies are equal
    pool: str = FIRST_POOL  # the pool that its worker belongs to
    needs_lookahead: bool = False  # it drafts for ouroboros, too
