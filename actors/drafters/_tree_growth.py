"""Grows the draft of a sequence from its matches in automata of other texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters._match_options import MatchOptions
from actors.drafters._options import between
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import Cursor, SuffixAutomaton
from cache_service.automata.tree_options import TOP_CONTINUATIONS, TreeOptions

# Probability that the target continues as the matched text does, by match length (index 0 is unused), for matches that
# occurred often. Measured on 60 held-out files of Python's library with a corpus of the other 680, and the prior of
# TreeOptions for rare matches. The planner calibrates it online.
_ACCEPTANCE = np.array(
    [0.0, 0.60, 0.66, 0.70, 0.77, 0.80, 0.85, 0.88, 0.92, 0.94, 0.95, 0.96, 0.97, 0.97, 0.97, 0.97, 0.98],
    dtype=np.float32,
)

# Nodes below this confidence do not pay even where rows are nearly free. The planner handles expensive rows.
FLOOR = 0.03
LEN_THRESHOLD = 2
# In a replay of the held-out files with 16 nodes, tokens a round are 1.85 for 0, 1.89 for 8 and 1.90 for no limit.
MIN_CONTINUATION = 64
TopK = Annotated[int, between(1, TOP_CONTINUATIONS)]

Match = tuple[Cursor, StaticAutomaton | SuffixAutomaton]


class TreeGrowth:
    """Makes a draft tree from matches."""

    def __init__(self, match: MatchOptions, *, top_k: int, min_continuation: int, floor: float) -> None:
        """top_k: nodes at one depth, 1 to TOP_CONTINUATIONS; min_continuation: trees with fewer nodes are filled from
        shorter suffixes and other automata; floor: lowest confidence of a node."""
        self.match = match
        self._tree = TreeOptions(
            acceptance=_ACCEPTANCE,
            floor=floor,
            width=top_k,
            min_match=self.match.len_threshold,
            len_bias=self.match.len_bias,
            min_continuation=min_continuation,
        )

    def grow(self, longest_first: Sequence[Match], max_nodes: int) -> DraftTree:
        """The draft tree of one or more matches."""
        room = self.match.room_for(longest_first[0][0].length, max_nodes)
        if room == 0:
            return DraftTree.empty()
        token_ids, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        count = 0
        for cursor, automaton in longest_first:
            count = automaton.grow_tree(
                cursor, self._tree, token_ids=token_ids, parents=parents, confidence=confidence, count=count
            )
            if count >= min(room, max(self._tree.min_continuation, 1)):
                break
        return DraftTree(token_ids[:count], parents[:count], confidence[:count]) if count else DraftTree.empty()
