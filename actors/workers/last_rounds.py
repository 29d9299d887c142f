"""Each router's last round, which a round sent ahead follows."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from actors.links.server import Peer

_MOST_PEERS = 64

Last = TypeVar("Last")


class LastRounds(Generic[Last]):
    """Those of the routers that were answered last."""

    def __init__(self) -> None:
        self._last: OrderedDict[Peer, Last] = OrderedDict()

    def get(self, peer: Peer) -> Last | None:
        return self._last.get(peer)

    def note(self, peer: Peer, last: Last) -> Peer | None:
        """Keep a router's round. Returns the router whose round made room for it, if one did."""
        self._last[peer] = last
        self._last.move_to_end(peer)
        return self._last.popitem(last=False)[0] if len(self._last) > _MOST_PEERS else None

    def clear(self) -> None:
        """The engine has dropped its sequences."""
        self._last.clear()
