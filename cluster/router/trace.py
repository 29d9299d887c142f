"""A round's trace for people: what each source proposed, what was verified and accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from actors.draft_tree import depths_of
from actors.messages import TokenChunk, VerifyResult
from cluster.router.emission import sources_of
from cluster.router.round import Round, RoundEntry, RouterEvent


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of all its sequences. Counts are by source; a node that several sources proposed counts as verified and
    accepted only for the one that was most sure of it."""

    num_sequences: int
    rows: int  # computed by the target: prompt, last tokens and draft nodes
    proposed: dict[str, int]
    verified: dict[str, int]
    accepted: dict[str, int]  # only what was emitted: nothing after a stop token
    num_emitted: int
    # Nodes that a drafter required and nobody guessed are left out of these two.
    rejected: tuple[int, ...]  # draft tokens that were verified and not accepted
    depths: tuple[tuple[int, int], ...]  # (depth of the deepest node, accepted nodes) by sequence with verified drafts
    draft_s: float  # drafting (with the head's for the next round), merging and choosing
    verify_s: float


def trace_round(
    round: Round,
    result: VerifyResult,
    events: Iterable[RouterEvent],
    *,
    source_names: SequenceOf[str],
    draft_s: float,
    verify_s: float,
) -> RoundTrace:
    """source_names: by source index; events: of the whole round, which has been committed."""
    proposed: Counter[str] = Counter()
    verified: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    rejected: list[int] = []
    depths: list[tuple[int, int]] = []
    paths = {verdict.seq_id: set(verdict.path.tolist()) for verdict in result.verdicts}
    for entry in round.entries:
        for source, tree in entry.proposals:
            proposed[source_names[source]] += len(tree.token_ids)
        if entry.chain is not None:
            proposed[source_names[entry.chain_source]] += len(entry.chain)
        verified.update(sources_of(round, entry, list(range(entry.num_verified)), source_names))
        path = paths.get(entry.seq_id, set())
        nodes = [node for node in range(entry.num_verified) if node in path or _is_guess(round, entry, node)]
        rejected.extend(int(entry.tree.token_ids[node]) for node in nodes if node not in path)
        if nodes:
            depths.append((int(depths_of(entry.tree.parents[: entry.num_verified])[nodes].max()), len(path)))
    num_emitted = 0
    for event in events:
        if isinstance(event, TokenChunk):
            num_emitted += len(event.token_ids)
            accepted.update(source for source in event.sources if source in source_names)
    return RoundTrace(
        num_sequences=len(round.entries),
        rows=result.rows,
        proposed=proposed,
        verified=verified,
        accepted=accepted,
        num_emitted=num_emitted,
        rejected=tuple(rejected),
        depths=tuple(depths),
        draft_s=draft_s,
        verify_s=verify_s,
    )


def format_trace(trace: RoundTrace, number: int) -> str:
    """One line; `number`: shown as the round's number."""
    parts = [f"round {number}", f"{trace.rows} rows"]
    if trace.num_sequences != 1:
        parts.append(f"{trace.num_sequences} sequences")
    for what, counts in (("proposed", trace.proposed), ("verified", trace.verified), ("accepted", trace.accepted)):
        listed = ", ".join(f"{source} {count}" for source, count in counts.items() if count)
        parts.append(f"{what} {listed or 0}")
    parts.append(f"emitted {trace.num_emitted}")
    parts.append(f"drafting {trace.draft_s * 1000:.1f} ms, verifying {trace.verify_s * 1000:.1f} ms")
    return " | ".join(parts)


def _is_guess(round: Round, entry: RoundEntry, node: int) -> bool:
    if entry.num_chain:
        return True
    assert round.chosen is not None
    return bool(round.chosen.nodes["sources"][entry.node_start + node])
