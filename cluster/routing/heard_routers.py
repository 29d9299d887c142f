"""What routers have said of themselves, and which of them have the first block of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.routing.prefix_blocks import first_blocks
from cluster.routing.router_load import Ahead
from cluster.routing.warm_blocks import WarmBlocks


@dataclass(slots=True)
class HeardRouter:
    """What a router has said of itself."""

    ahead: Ahead | None = None  # by its last news; None: it takes no requests
    heard_at: float = 0.0
    num_heard: int = 0  # news so far
    num_gateways: int = 1
    warm: WarmBlocks = field(default_factory=WarmBlocks)  # changed by `HeardRouters` alone


class HeardRouters:
    """Routers by id, and an index of all first blocks that any of them has."""

    def __init__(self) -> None:
        self.by_id: dict[str, HeardRouter] = {}
        self._holders: dict[int, dict[str, WarmBlocks]] = {}  # by first block: all that have it

    def forget(self, router_id: str) -> None:
        self.clear(router_id)
        del self.by_id[router_id]

    def clear(self, router_id: str) -> None:
        """The router has no blocks."""
        warm = self.by_id[router_id].warm
        self._lack(router_id, warm)
        warm.clear()

    def use(self, router_id: str, blocks: Sequence[int], *, is_assumed: bool = False) -> None:
        """The router has these blocks, or will have them; the last one stays longest."""
        warm = self.by_id[router_id].warm
        for block in first_blocks(blocks):
            self._holders.setdefault(block, {})[router_id] = warm
        self._lack(router_id, warm.use(blocks, is_assumed=is_assumed))

    def drop_assumed(self, router_id: str, blocks: Sequence[int]) -> None:
        """The router lacks those of the blocks that are only assumed to be there."""
        self._lack(router_id, self.by_id[router_id].warm.drop_assumed(blocks))

    def _lack(self, router_id: str, blocks: Iterable[int]) -> None:
        for block in first_blocks(blocks):
            holders = self._holders[block]
            del holders[router_id]
            if not holders:
                del self._holders[block]

    def holders(self, first_block: int) -> Mapping[str, WarmBlocks]:
        """Routers that have the first block of a prompt, with all that they have."""
        return self._holders.get(first_block, {})
