"""What routers have said of themselves, and which of them have the first block of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.routing.router_load import RouterLoad
from cluster.routing.warm_blocks import WarmBlocks

_MOST_FIRST_BLOCKS = 65_536  # whose holders are kept


@dataclass(slots=True)
class HeardRouter:
    """What a router has said of itself."""

    load: RouterLoad | None = None  # None: it takes no requests
    heard_at: float = 0.0
    num_heard: int = 0  # news so far
    num_gateways: int = 1
    warm: WarmBlocks = field(default_factory=WarmBlocks)


class HeardRouters:
    """Routers by id. All are looked at only for a first block that was not asked for lately."""

    def __init__(self) -> None:
        self.by_id: dict[str, HeardRouter] = {}
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()  # by first block: all that may have it

    def forget(self, router_id: str) -> None:
        del self.by_id[router_id]

    def use(self, router_id: str, blocks: Sequence[int], *, is_assumed: bool = False) -> None:
        """The router has these blocks, or will have them; the last one stays longest."""
        self.by_id[router_id].warm.use(blocks, is_assumed=is_assumed)
        for block in blocks:
            if (holders := self._holders.get(block)) is not None:
                holders[router_id] = None

    def holders(self, first_block: int) -> list[str]:
        """Routers that have the first block of a prompt; from now on they are kept."""
        routers, asked = self.by_id, self._holders.get(first_block)
        if asked is None:
            found = [one for one, known in routers.items() if first_block in known.warm]
        else:
            found = [one for one in asked if one in routers and first_block in routers[one].warm]
        if asked is None or len(found) < len(asked):
            self._holders[first_block] = dict.fromkeys(found)
        self._holders.move_to_end(first_block)
        if len(self._holders) > _MOST_FIRST_BLOCKS:
            self._holders.popitem(last=False)
        return found
