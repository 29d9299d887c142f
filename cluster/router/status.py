"""What a router says of itself when it is asked whether it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cluster.router.connections import Connections
    from cluster.router.driver import RouterDriver


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool  # takes requests
    live: bool  # false: only a restart helps
    detail: str = ""  # for people
    max_model_len: int | None = None  # tokens, prompt and answer together; None: not known yet


def router_status(driver: RouterDriver | None, connections: Connections) -> RouterStatus:
    """driver is None until a target group has said what it is."""
    obstacle = _obstacle(driver, connections)
    return RouterStatus(
        ready=obstacle is None,
        live=driver is None or driver.failure is None,
        detail=obstacle or f"{connections.num_draft_links} draft workers",
        max_model_len=None if driver is None else driver.core.max_model_len,
    )


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
