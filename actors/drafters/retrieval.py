"""Drafts from corpora: what followed the longest suffix of the sequence in them.

After REST (He et al. 2023) with the automaton of SAM-Decoding (Hu et al. 2024) in place of a suffix array. Corpora are
built by `paceline corpus build`, memory-mapped and shared by all sequences.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.draft_tree import DraftTree
from actors.drafters._match_options import Alpha, LenBias, LenThreshold, MatchOptions, NPredicts
from actors.drafters._options import Floor
from actors.drafters._tree_growth import FLOOR, LEN_THRESHOLD, MIN_CONTINUATION, TopK, TreeGrowth
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.errors import ModelError
from actors.messages import GenerationRequest
from cache_service.automata.corpus_index import open_index
from cache_service.automata.static_automaton import StaticAutomaton, warm_up
from cache_service.automata.suffix_automaton import Cursor
from cache_service.automata.tree_options import TOP_CONTINUATIONS
from cache_service.errors import CorpusError


@dataclass(slots=True)
class _Walk:
    """Position of a sequence in every corpus."""

    num_tokens: int
    cursors: list[Cursor]


class RetrievalDrafter(CpuDrafter):
    """Drafts a tree of the most frequent continuations, from the corpus with the longest match first."""

    name = "retrieval"

    def __init__(
        self,
        automata: Sequence[StaticAutomaton] = (),
        *,
        len_threshold: LenThreshold = LEN_THRESHOLD,
        len_bias: LenBias = 0,
        n_predicts: NPredicts = None,
        alpha: Alpha = None,
        top_k: TopK = TOP_CONTINUATIONS,
        min_continuation: int = MIN_CONTINUATION,
        floor: Floor = FLOOR,
    ) -> None:
        """automata: from `open_corpora`; may be empty. Other options: see MatchOptions and TreeGrowth."""
        self._automata = tuple(automata)
        self._growth = TreeGrowth(
            MatchOptions(len_threshold, len_bias, n_predicts, alpha),
            top_k=top_k,
            min_continuation=min_continuation,
            floor=floor,
        )
        self._walks: dict[int, _Walk] = {}
        if self._automata:
            warm_up()

    def may_draft_for(self, request: GenerationRequest) -> bool:
        return bool(self._automata)

    def forget(self, seq_id: int) -> None:
        self._walks.pop(seq_id, None)

    def memory_bytes(self) -> int:
        """Bytes held for sequences. The corpora are file mappings."""
        return sum(64 + 64 * len(walk.cursors) for walk in self._walks.values())

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if not self._automata:
            return DraftTree.empty()
        walk = self._walks.get(context.seq_id)
        if walk is None or walk.num_tokens != context.start:
            walk = self._walks[context.seq_id] = _Walk(0, [Cursor()] * len(self._automata))
        new = context.tokens[walk.num_tokens :]
        walk.cursors = [
            automaton.advance(cursor, new) for automaton, cursor in zip(self._automata, walk.cursors, strict=True)
        ]
        walk.num_tokens = len(context.tokens)

        found = zip(walk.cursors, self._automata, strict=True)
        longest_first = sorted(found, key=lambda match: match[0].length, reverse=True)
        return self._growth.grow(longest_first, context.max_nodes)


def open_corpora(
    corpora: Sequence[str | os.PathLike[str]], tokenizer_fingerprint: str | None = None
) -> tuple[StaticAutomaton, ...]:
    """corpora: directories made by `paceline corpus build`; tokenizer_fingerprint: the target's, None: unknown.

    Raises ModelError for a corpus that cannot be used, or that was made with another tokenizer.
    """
    try:
        return tuple(open_index(Path(corpus), tokenizer_fingerprint).automaton for corpus in corpora)
    except CorpusError as error:
        raise ModelError(f"corpus {error}") from None
