"""Runs the CPU drafters of a router. An error of one of them costs only its own drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from actors.drafters.contract import CpuDrafter, DraftContext, Outcome, VerifiedRows
from actors.errors import InvalidRequest
from actors.messages import Acceptance, GenerationRequest
from cluster.router.counters import RouterCounters
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence

_Told = TypeVar("_Told")


class CpuDrafting:
    """Drafters are known by their source index."""

    def __init__(self, drafters: Mapping[str, CpuDrafter], proposals: Proposals, counters: RouterCounters) -> None:
        self._drafters = list(drafters.items())
        self._proposals = proposals
        self._counters = counters
        # Most nodes that a drafter requires of a sequence, of those that require any.
        self.most_required = {
            index: drafter.most_required for index, (_, drafter) in enumerate(self._drafters) if drafter.most_required
        }
        # Target predictions a row that drafters want to learn from; 0: none of them learns.
        self.num_successors = max((drafter.num_successors for _, drafter in self._drafters), default=0)

    def that_may_draft_for(self, request: GenerationRequest, drafters: Iterable[int]) -> tuple[int, ...]:
        """Those of these drafters that may ever propose something for the request. Under a grammar none that requires
        rows: these follow tokens that the grammar need not allow."""
        return tuple(
            index
            for index in drafters
            if not (request.grammar and index in self.most_required) and self._may_draft(index, request)
        )

    def _may_draft(self, index: int, request: GenerationRequest) -> bool:
        name, drafter = self._drafters[index]
        try:
            return drafter.may_draft_for(request)
        except Exception:
            self._counters.count_drafter_error(name)
            return True

    def propose(self, round: Round) -> None:
        for index, (name, drafter) in enumerate(self._drafters):
            entries = [
                entry for entry in round.entries if entry.max_nodes and index in entry.sequence.drafts.sources.cpu
            ]
            if entries:
                self._ask(index, name, drafter, entries)

    def _ask(self, index: int, name: str, drafter: CpuDrafter, entries: list[RoundEntry]) -> None:
        most_required = self.most_required.get(index, 0)
        contexts = [_context(entry, index, most_required if entry.max_required else 0) for entry in entries]
        try:
            trees = drafter.propose(contexts)
            if len(trees) != len(entries):
                raise ValueError(f"{len(trees)} trees for {len(entries)} contexts")
        except Exception:
            self._counters.count_drafter_error(name)
            for entry in entries:
                self._forget(index, entry.sequence)
            return
        for entry, context, tree in zip(entries, contexts, trees, strict=True):
            entry.sequence.drafts.cpu_known[index] = entry.num_tokens
            self._proposals.add(entry, index, tree, max_nodes=entry.max_nodes, max_required=context.max_required)

    def observe(
        self, round: Round, emitted: list[Emitted], verified: np.ndarray | None, accepted: np.ndarray | None
    ) -> None:
        """Tell the drafters the round's outcome. verified, accepted: nodes by [entry, source], or None."""
        outcomes: list[list[Outcome]] = [[] for _ in self._drafters]
        none = np.zeros((len(round.entries), len(self._drafters)), np.int32)
        num_verified = (none if verified is None else verified).tolist()
        num_accepted = (none if accepted is None else accepted).tolist()
        for index, first, _ in emitted:
            sequence = round.entries[index].sequence
            tokens = sequence.tokens(first)
            for source in sequence.drafts.sources.cpu:
                outcome = Outcome(sequence.seq_id, num_verified[index][source], num_accepted[index][source], tokens)
                outcomes[source].append(outcome)
        for (name, drafter), told in zip(self._drafters, outcomes, strict=True):
            if told:
                self._guarded(name, drafter.observe, told)

    def remember(self, rows: VerifiedRows) -> None:
        """Show these rows to the drafters that learn from target predictions."""
        for name, drafter in self._drafters:
            if drafter.num_successors:
                self._guarded(name, drafter.remember, rows)

    def drop_namespace(self, namespace: str) -> None:
        for name, drafter in self._drafters:
            self._guarded(name, drafter.drop_namespace, namespace)

    def forget(self, sequence: Sequence) -> None:
        for index in sequence.drafts.sources.cpu:
            self._forget(index, sequence)

    def _forget(self, index: int, sequence: Sequence) -> None:
        sequence.drafts.cpu_known[index] = 0
        name, drafter = self._drafters[index]
        self._guarded(name, drafter.forget, sequence.seq_id)

    def _guarded(self, name: str, call: Callable[[_Told], None], told: _Told) -> None:
        try:
            call(told)
        except Exception:
            self._counters.count_drafter_error(name)


def _context(entry: RoundEntry, index: int, max_required: int) -> DraftContext:
    sequence, request = entry.sequence, entry.sequence.request
    return DraftContext(
        seq_id=entry.seq_id,
        tokens=sequence.tokens(),
        start=sequence.drafts.cpu_known[index],
        num_prompt_tokens=sequence.begin.num_prompt_tokens,
        max_nodes=entry.max_nodes,
        sampling=sequence.begin.sampling,
        namespace=sequence.namespace,
        prediction=request.prediction_token_ids,
        max_required=max_required,
        max_depth=sequence.num_left - 1,
        readable=request.readable,
        reads_cache=request.cache != "off",
        grammar=sequence.grammar,
    )


def least_max_rows(drafters: Iterable[CpuDrafter], acceptance: Acceptance) -> int:
    """The least `max_rows` with which one sequence may have all that these require and a draft beside it."""
    return 1 if acceptance == "rejection" else 1 + sum(drafter.most_required for drafter in drafters)


def check_required_rows(
    drafters: Iterable[CpuDrafter], max_rows: int, acceptance: Acceptance, field: str = "speculation.max_rows"
) -> None:
    """Raises InvalidRequest naming `field` if the drafters' rows of one sequence are more than a round may spend."""
    least = least_max_rows(drafters, acceptance)
    if max_rows < least:
        limit = f"it must be at least {least} for the rows that its drafters require, such as a lookahead window"
        raise InvalidRequest(field, max_rows, limit)
