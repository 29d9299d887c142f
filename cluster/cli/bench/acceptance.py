"""Acceptance of the drafts of many rounds, by depth and by drafter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cluster.router.trace import RoundTrace


@dataclass(frozen=True, slots=True)
class PositionAcceptance:
    """One draft depth. A round counts once for each of its sequences."""

    position: int  # 1: right after the committed tokens
    rounds: int  # that verified a node at this depth
    reached: int  # of these, those with an accepted path at least as long
    share: float  # reached / rounds


@dataclass(frozen=True, slots=True)
class SourceAcceptance:
    """Draft nodes of one drafter; accepted ones after a stop token do not count, as in `RoundTrace`."""

    proposed: int
    verified: int
    accepted: int
    share: float | None  # accepted / verified; None: none was verified


@dataclass(frozen=True, slots=True)
class Acceptance:
    by_position: tuple[PositionAcceptance, ...]  # from 1 to the greatest verified depth
    by_source: dict[str, SourceAcceptance]


class AcceptanceCounter:
    def __init__(self) -> None:
        self._deepest: Counter[int] = Counter()  # sequences by the depth of their deepest node
        self._accepted_depth: Counter[int] = Counter()  # sequences by the length of their accepted path
        self._proposed: Counter[str] = Counter()
        self._verified: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    def add(self, trace: RoundTrace) -> None:
        self._deepest.update(deepest for deepest, _ in trace.depths)
        self._accepted_depth.update(accepted for _, accepted in trace.depths)
        self._proposed.update(trace.proposed)
        self._verified.update(trace.verified)
        self._accepted.update(trace.accepted)

    def result(self) -> Acceptance:
        positions = []
        for position in range(1, max(self._deepest, default=0) + 1):
            # A node has all its ancestors beside it, so a tree has nodes at every depth up to its deepest.
            rounds = sum(count for depth, count in self._deepest.items() if depth >= position)
            reached = sum(count for depth, count in self._accepted_depth.items() if depth >= position)
            positions.append(PositionAcceptance(position, rounds, reached, reached / rounds))
        sources = {}
        for source, proposed in sorted(self._proposed.items()):
            verified, accepted = self._verified[source], self._accepted[source]
            sources[source] = SourceAcceptance(proposed, verified, accepted, accepted / verified if verified else None)
        return Acceptance(tuple(positions), sources)
