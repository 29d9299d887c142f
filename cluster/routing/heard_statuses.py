"""What routers say of their readiness in their news, for the gateway's probes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from actors.links.keys import LinkAddress
from cluster.routing.router_status import RouterStatus

_STALE_S = 2.5  # a router says it once a second


class HeardStatuses:
    """The last status of each router that Ray Serve lists."""

    def __init__(self) -> None:
        self.addresses: dict[str, LinkAddress] = {}  # of the listed routers, by id
        self._are_known = False  # whether all listed routers have addresses
        self._heard: dict[str, tuple[RouterStatus, float]] = {}  # by router id

    def follow(self, addresses: Mapping[str, LinkAddress], num_routers: int) -> None:
        """Take what Serve lists now. addresses: of those that have said where they are heard."""
        self.addresses = dict(addresses)
        self._are_known = len(addresses) == num_routers > 0
        self._heard = {router_id: heard for router_id, heard in self._heard.items() if router_id in addresses}

    def hear(self, router_id: str, status: RouterStatus, now: float) -> None:
        if router_id in self.addresses:
            self._heard[router_id] = status, now

    def current(self, now: float) -> list[RouterStatus] | None:
        """The statuses of all listed routers; None: not all have been heard lately, so ask them."""
        if not self._are_known or len(self._heard) < len(self.addresses):
            return None
        if any(now - heard_at > _STALE_S for _, heard_at in self._heard.values()):
            return None
        return [status for status, _ in self._heard.values()]


@cache
def heard_statuses(directory_name: str) -> HeardStatuses:
    """Those of one cluster in this process: its request router, which Serve makes, hears what its gateway reads."""
    return HeardStatuses()
