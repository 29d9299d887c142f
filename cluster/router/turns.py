"""A few places that tenants take turns to use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """At most so many at a time; who waits is let in by tenants in turn, so that one that asks often delays nobody else
    for long. Belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    async def enter(self, tenant: str) -> None:
        """Wait for a place, which is given back with `leave`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn has come just now
                self.leave()
            raise

    def leave(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
