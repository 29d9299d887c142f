"""The drafters that a cluster's configuration names, and what it must have for them."""

from __future__ import annotations

from actors.drafters.registry import DRAFT_MODEL, EAGLE, OUROBOROS, expand_drafters, source_of_pool
from actors.errors import InvalidRequest
from cluster.config import ClusterConfig

_FIELD = "speculation.drafters"


def named_drafters(config: ClusterConfig) -> tuple[str, ...]:
    """The distinct drafters, in order; () for none.

    Raises InvalidRequest for names of no drafter, for a head that there is not, for drafters that all lack their draft
    model, and where drafters are named but not that of a further draft model, whose workers would idle.
    """
    has_head = config.target.eagle_head != "none"
    names = expand_drafters(
        config.speculation.drafters,
        has_head=has_head,
        pools=tuple(config.more_drafts),
        field=_FIELD,
    )
    if EAGLE in names and not has_head:
        raise InvalidRequest(_FIELD, EAGLE, "target.eagle_head must name a head to use it")
    if names and {*names} <= {DRAFT_MODEL, OUROBOROS} and (config.draft.model == "none" or not config.draft.workers):
        limit = "draft.model must name a model, and draft.workers be at least 1, to use it alone"
        raise InvalidRequest(_FIELD, ", ".join(names), limit)
    for pool in config.more_drafts if names else ():
        source = source_of_pool(pool)
        if source not in names:
            limit = f"it must include {source}, or auto, for more_drafts.{pool} to be used"
            raise InvalidRequest(_FIELD, ", ".join(names), limit)
    return names
