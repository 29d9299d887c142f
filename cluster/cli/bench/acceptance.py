"""Acceptance of the drafts of many rounds, by depth and by drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def count_acceptance(traces: Sequence[RoundTrace]) -> Acceptance:
    depths = [pair for trace in traces for pair in trace.depths]
    positions = []
    for position in range(1, max((deepest for deepest, _ in depths), default=0) + 1):
        # A node has all its ancestors beside it, so a tree has nodes at every depth up to its deepest.
        rounds = sum(deepest >= position for deepest, _ in depths)
        reached = sum(accepted >= position for _, accepted in depths)
        positions.append(PositionAcceptance(position, rounds, reached, reached / rounds))
    proposed, verified, accepted = Counter[str](), Counter[str](), Counter[str]()
    for trace in traces:
        proposed.update(trace.proposed)
        verified.update(trace.verified)
        accepted.update(trace.accepted)
    sources = {
        name: SourceAcceptance(
            count, verified[name], accepted[name], accepted[name] / verified[name] if verified[name] else None
        )
        for name, count in sorted(proposed.items())
    }
    return Acceptance(tuple(positions), sources)
