"""Drafts from the sequence's own past: what followed the longest suffix that occurred earlier in prompt or output.

One suffix automaton a sequence (compare Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024).
The length of the match says how far to trust it: confidence and length of a draft grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.draft_tree import DraftTree
from actors.drafters._match_options import MatchOptions
from actors.drafters._options import Floor
from actors.drafters.contract import CpuDrafter, DraftContext
from cache_service.automata.suffix_automaton import MAX_BRANCHES, SuffixAutomaton, warm_up
from cache_service.automata.tree_options import BranchOptions

# Chance that the token after a match of the given length is the target's, by match length (index 0 is not used); every
# accepted token makes the match longer. Measured at the rounds of a replay of 96 greedy answers of
# SmolLM2-135M-Instruct to Spec-Bench prompts; the planner calibrates it further online.
_ACCEPTANCE = np.array(
    [0.0, 0.25, 0.55, 0.64, 0.68, 0.75, 0.77, 0.79, 0.84, 0.86, 0.87, 0.88, 0.89, 0.90, 0.91, 0.92, 0.94, 0.95, 0.97],
    dtype=np.float32,
)

# A node less likely than this is not worth its row even where rows are nearly free; dearer rows are for the planner.
_FLOOR = 0.03

# Branches from the root: what followed the match last, what else followed it, what followed a shorter suffix.
_TOP_K = 3


class SuffixDrafter(CpuDrafter):
    """Drafts the continuation of the longest match, and at the root others that begin otherwise."""

    name = "suffix"

    def __init__(
        self,
        *,
        match: MatchOptions | None = None,
        top_k: int = _TOP_K,
        by_frequency: bool = False,
        acceptance: npt.NDArray[np.float32] = _ACCEPTANCE,
        floor: Floor = _FLOOR,
    ) -> None:
        """top_k: branches at the root, in 1 to MAX_BRANCHES; by_frequency: what followed the match most often comes
        before what followed it last; acceptance: float32 [m], by match length; floor: the least confidence of a node,
        in [0, 1]."""
        if not 1 <= top_k <= MAX_BRANCHES:
            raise ValueError(f"top_k is {top_k}; it must be in 1 to {MAX_BRANCHES}")
        self._match = match or MatchOptions()
        self._options = BranchOptions(
            acceptance=acceptance,
            floor=floor,
            len_threshold=self._match.len_threshold,
            len_bias=self._match.len_bias,
            alpha=self._match.alpha,
            branches=top_k,
            by_frequency=by_frequency,
        )
        self._automata: dict[int, SuffixAutomaton] = {}
        warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._propose_one(context) for context in contexts]

    def forget(self, seq_id: int) -> None:
        self._automata.pop(seq_id, None)

    def memory_bytes(self) -> int:
        return sum(automaton.memory_bytes for automaton in self._automata.values())

    def _propose_one(self, context: DraftContext) -> DraftTree:
        automaton = self._automata.get(context.seq_id)
        if automaton is None or len(automaton) != context.start:
            automaton = self._automata[context.seq_id] = SuffixAutomaton(len(context.tokens) + 64)
        token_ids, parents, confidence = automaton.extend_and_draft(
            context.tokens[len(automaton) :],
            self._match.room(context.max_nodes),
            self._options,
        )
        return DraftTree(token_ids, parents, confidence) if len(token_ids) else DraftTree.empty()


def create_drafter(
    *,
    len_threshold: int = 1,
    len_bias: int = 0,
    n_predicts: int | None = None,
    alpha: float | None = None,
    top_k: int = _TOP_K,
    by_frequency: bool = False,
    floor: Floor = _FLOOR,
) -> SuffixDrafter:
    match = MatchOptions(len_threshold, len_bias, n_predicts, alpha)
    return SuffixDrafter(match=match, top_k=top_k, by_frequency=by_frequency, floor=floor)
