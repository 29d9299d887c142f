"""Calls that wait until there is something new for their caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Call:
    kind: str
    wake: Callable[[], None]


class Waiting:
    """One call of each caller; an earlier one ends with the next."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}  # by caller, the one that has waited longest first

    async def wait(self, caller: str, kind: str, limit_s: float) -> None:
        """Until the caller is woken, or for `limit_s` seconds."""
        self.wake(caller)
        woken = asyncio.Event()
        call = self._calls[caller] = _Call(kind, woken.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await woken.wait()
        finally:
            if self._calls.get(caller) is call:
                del self._calls[caller]

    def note(self, caller: str, kind: str, wake: Callable[[], None]) -> None:
        """A call that waits elsewhere, until the caller is woken. The caller has no other."""
        self._calls[caller] = _Call(kind, wake)

    def wake(self, caller: str) -> None:
        call = self._calls.pop(caller, None)
        if call is not None:
            call.wake()

    def wake_all(self) -> None:
        for caller in list(self._calls):
            self.wake(caller)

    def wake_first(self, kind: str, may_be_woken: Callable[[str], bool]) -> None:
        """Wake the caller of a kind that has waited longest, among those that may be woken."""
        found = (caller for caller, call in self._calls.items() if call.kind == kind and may_be_woken(caller))
        caller = next(found, None)
        if caller is not None:
            self.wake(caller)
