"""Names of the pools of draft workers, one for each draft model, and of their Serve deployments."""

from __future__ import annotations

FIRST_POOL = "draft"  # the one whose source is draft_model; the source of pool X beside it is draft_model.X
DRAFT_POOL = "DraftPool"  # deployment of the first pool; that of pool X is DraftPool-X
_PREFIX = f"{DRAFT_POOL}-"


def deployment_of(pool: str) -> str:
    """Name of a pool's Serve deployment."""
    return DRAFT_POOL if pool == FIRST_POOL else f"{_PREFIX}{pool}"


def pool_of_deployment(name: str) -> str | None:
    """The pool whose deployment has this name; None: it is no deployment of draft workers."""
    if name == DRAFT_POOL:
        return FIRST_POOL
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
