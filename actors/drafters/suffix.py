"""Drafts what followed the longest suffix that occurred earlier in the sequence's own prompt or output.

One suffix automaton a sequence (compare Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024).
Confidence and length of a draft grow with the length of the match.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters._match_options import Alpha, LenBias, LenThreshold, MatchOptions, NPredicts
from actors.drafters._options import Floor, between
from actors.drafters.contract import CpuDrafter, DraftContext
from cache_service.automata.suffix_automaton import MAX_BRANCHES, SuffixAutomaton, warm_up
from cache_service.automata.tree_options import BranchOptions

# Probability that the token after a match is the target's, by match length (index 0 is unused). Measured in a replay of
# 96 greedy answers of SmolLM2-135M-Instruct to Spec-Bench prompts. The planner calibrates it online.
_ACCEPTANCE = np.array(
    [0.0, 0.25, 0.55, 0.64, 0.68, 0.75, 0.77, 0.79, 0.84, 0.86, 0.87, 0.88, 0.89, 0.90, 0.91, 0.92, 0.94, 0.95, 0.97],
    dtype=np.float32,
)

_FLOOR = 0.03  # below, a node does not pay even where rows are nearly free

# Branches at the root: the last continuation, another continuation of the match, and one of a shorter suffix.
_TOP_K = 3


class SuffixDrafter(CpuDrafter):
    """Drafts the continuation of the longest match, with alternatives at the root."""

    name = "suffix"

    def __init__(
        self,
        *,
        len_threshold: LenThreshold = 1,
        len_bias: LenBias = 0,
        n_predicts: NPredicts = None,
        alpha: Alpha = None,
        top_k: Annotated[int, between(1, MAX_BRANCHES)] = _TOP_K,
        by_frequency: bool = False,
        floor: Floor = _FLOOR,
    ) -> None:
        """top_k: branches at the root; by_frequency: prefer the most frequent continuation to the
        last one; floor: lowest confidence of a node; others: MatchOptions."""
        self._match = MatchOptions(len_threshold, len_bias, n_predicts, alpha)
        self._options = BranchOptions(
            acceptance=_ACCEPTANCE,
            floor=floor,
            len_threshold=len_threshold,
            len_bias=len_bias,
            alpha=alpha,
            branches=top_k,
            by_frequency=by_frequency,
        )
        self._automata: dict[int, SuffixAutomaton] = {}
        warm_up()

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
