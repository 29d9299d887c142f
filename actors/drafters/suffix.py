"""Drafts from the sequence's own past: what followed the longest suffix that occurred earlier in prompt or output.

One suffix automaton a sequence (compare Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024).
The length of the match says how far to trust it: confidence and length of a draft grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.draft_tree import DraftTree
from actors.drafters.contract import DraftContext, Outcome
from cache_service.suffix_automaton import SuffixAutomaton, warm_up

# Chance that the token after a match of the given length is the target's, by match length (index 0 is not used).
# Measured on greedy answers of SmolLM2-135M-Instruct to Spec-Bench prompts; the planner calibrates it further online.
_ACCEPTANCE = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9], dtype=np.float32)

# A node less likely than this is not worth its row even where rows are nearly free.
_FLOOR = 0.05


class SuffixDrafter:
    """Drafts chains, forked at the root where a shorter suffix was last followed by another token."""

    name = "suffix"

    def __init__(self, *, acceptance: npt.NDArray[np.float32] = _ACCEPTANCE, floor: float = _FLOOR) -> None:
        """acceptance: float32 [m], by match length; floor: the least confidence of a node, in [0, 1]."""
        self._acceptance = acceptance
        self._floor = floor
        self._automata: dict[int, SuffixAutomaton] = {}
        warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._propose_one(context) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the next proposal brings the emitted tokens."""

    def forget(self, seq_id: int) -> None:
        self._automata.pop(seq_id, None)

    def memory_bytes(self) -> int:
        return sum(automaton.memory_bytes for automaton in self._automata.values())

    def _propose_one(self, context: DraftContext) -> DraftTree:
        automaton = self._automata.get(context.seq_id)
        if automaton is None or len(automaton) != context.start:
            automaton = self._automata[context.seq_id] = SuffixAutomaton(len(context.tokens) + 64)
        token_ids, parents, confidence = automaton.extend_and_draft(
            context.tokens[len(automaton) :], context.max_nodes, self._acceptance, self._floor
        )
        return DraftTree(token_ids, parents, confidence) if len(token_ids) else DraftTree.empty()


def create_drafter(*, floor: float = _FLOOR) -> SuffixDrafter:
    return SuffixDrafter(floor=floor)
