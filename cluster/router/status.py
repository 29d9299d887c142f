"""How a router tells its readiness and liveness."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from actors.pool_names import FIRST_POOL
from cluster.routing.router_status import RouterStatus

if TYPE_CHECKING:
    from cluster.router.connections import Connections
    from cluster.router.driver import RouterDriver


def router_status(
    driver: RouterDriver | None, connections: Connections, build_progress: Path | None = None
) -> RouterStatus:
    """driver: None until a target group has connected. build_progress: file with the progress of the draft model's
    build, if this machine builds it."""
    obstacle = _obstacle(driver, connections)
    return RouterStatus(
        ready=obstacle is None,
        live=driver is None or driver.failure is None,
        detail=obstacle or _drafting(connections, build_progress),
        max_model_len=None if driver is None else driver.core.max_model_len,
    )


def _drafting(connections: Connections, build_progress: Path | None) -> str:
    told = f"{connections.num_draft_links} draft workers"
    if FIRST_POOL not in connections.draft_models() and build_progress is not None:
        with contextlib.suppress(OSError, ValueError):  # the build is over, or is writing
            return f"{told}; the draft model is being built: {build_progress.read_text(encoding='utf-8')}"
    return told


def _obstacle(driver: RouterDriver | None, connections: Connections) -> str | None:
    """Why the router takes no requests, None if it does."""
    if driver is not None and driver.failure is not None:
        return f"rounds have stopped: {driver.failure}"
    if driver is not None and driver.is_draining:
        return "draining"
    if connections.is_standby:
        return "standing by for a target group"
    if driver is None or not driver.has_target:
        return "waiting for the target group"
    return "the target group is leaving" if connections.is_leaving else None
