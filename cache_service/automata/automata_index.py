"""What a drafter sees of the shared cache: for each namespace two automata, swapped and extended behind its back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cache_service.automata.live_tail import LiveTail
from cache_service.automata.static_automaton import StaticAutomaton


class Automata(NamedTuple):
    """All that a process knows of one namespace.

    The serial numbers say which base and tail it is, in this process: what a cursor stands in. Who keeps a number, not
    an automaton, lets go of it when it is replaced.
    """

    base: StaticAutomaton | None  # index of the segments; None where there are none, too few, or it is not built yet
    base_serial: int
    tail: LiveTail  # index of what came later
    tail_serial: int


class AutomataIndex(Protocol):
    """Where a drafter finds them. Neither method waits for anything or raises."""

    def follow(self, namespace: str) -> None:
        """Begin to learn what a namespace holds, if that has not begun."""
        ...

    def automata(self, namespace: str) -> Automata | None:
        """None: nothing is known of that namespace. For this round only: the next may find others."""
        ...
