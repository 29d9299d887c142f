"""Discrete events: a clock that jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Action = Callable[..., object]
_Event = tuple[float, int, Action, tuple[Any, ...]]  # time, order, what happens
_SLOTS_PER_S = 16


class Events:
    """Events of one moment happen in the order in which they were planned, so a run is reproducible."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._order = count()
        # A small heap of what comes soon: one of all events would hardly be in the processor's cache, and slow.
        self._soon: list[_Event] = []
        self._begun = 0  # slots: events before it are in the heap
        self._later: dict[int, list[_Event]] = {}  # by slot

    def at(self, time: float, action: Action, *args: Any) -> None:
        """A time in the past is now."""
        if time < self.now:
            time = self.now
        event = (time, next(self._order), action, args)
        if (slot := int(time * _SLOTS_PER_S)) < self._begun:
            heapq.heappush(self._soon, event)
        elif (later := self._later.get(slot)) is None:
            self._later[slot] = [event]
        else:
            later.append(event)

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def every(self, period_s: float, action: Action) -> None:
        """From one period on, forever."""

        def again() -> None:
            action()
            self.after(period_s, again)

        self.after(period_s, again)

    def run(self, until: float) -> None:
        """All events up to and including `until`, which is the time then."""
        soon = self._soon
        last = until * _SLOTS_PER_S
        while soon or self._begun <= last:
            if not soon:
                soon.extend(self._later.pop(self._begun, ()))
                heapq.heapify(soon)
                self._begun += 1
            elif soon[0][0] > until:
                break
            else:
                self.now, _, action, args = heapq.heappop(soon)
                self.num_done += 1
                action(*args)
        self.now = until


class Server:
    """A process that does one thing after the other, first come, first served."""

    __slots__ = ("_events", "busy_s", "busy_until")

    def __init__(self, events: Events) -> None:
        self._events = events
        self.busy_until = 0.0
        self.busy_s = 0.0

    def take(self, cost_s: float, arrives: float) -> float:
        """Work that arrives then; returns when it is done."""
        self.busy_until = max(self.busy_until, arrives) + cost_s
        self.busy_s += cost_s
        return self.busy_until

    def run(self, cost_s: float, action: Action, *args: Any) -> None:
        """Do this work now or when its turn comes, then the action."""
        self._events.at(self.take(cost_s, self._events.now), action, *args)
