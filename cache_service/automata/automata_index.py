"""A drafter's view of the shared cache: two automata per namespace, which background threads extend and replace."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cache_service.automata.live_tail import LiveTail
from cache_service.automata.static_automaton import StaticAutomaton


class Automata(NamedTuple):
    """The index of one namespace in this process.

    The serial numbers identify base and tail. Whoever keeps cursors keeps the numbers rather than the automata, so that
    replaced automata are freed.
    """

    base: StaticAutomaton | None  # index of the segments; None: there are none, too few, or it is not built yet
    base_serial: int
    tail: LiveTail  # index of later log entries
    tail_serial: int


class AutomataIndex(Protocol):
    """Provides the automata. Neither method waits or raises."""

    def follow(self, namespace: str) -> None:
        """Begin to index a namespace, if not yet done."""
        ...

    def automata(self, namespace: str) -> Automata | None:
        """None: the namespace is not indexed. Valid for this round only."""
        ...
