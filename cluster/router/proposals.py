"""The trust boundary for draft trees: a tree becomes a proposal of its sequence, or is counted as invalid.

Types, lengths and limits are checked here, and chains under rejection completely. The merging kernel checks the values
of the other trees, for all trees of a round at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.draft_tree import DraftTree
from actors.drafters.registry import GRAMMAR, source_named
from cluster.router.counters import RouterCounters
from cluster.router.merged_trees import has_tree_shape
from cluster.router.rejection_chain import is_chain
from cluster.router.round import RoundEntry


class Proposals:
    def __init__(self, names: Sequence[str], vocab_size: int, counters: RouterCounters) -> None:
        """names: source names by index."""
        self._names = names
        # The sources whose tokens are drawn, under rejection.
        found = [source_named(name) for name in names]
        self._draw = {index for index, one in enumerate(found) if one is not None and one.under_rejection == "chain"}
        self._grammar = names.index(GRAMMAR) if GRAMMAR in names else None
        self._vocab_size = vocab_size
        self._counters = counters

    def add(self, entry: RoundEntry, source: int, tree: DraftTree, *, max_nodes: int, max_required: int = 0) -> None:
        """max_nodes: limit of nodes that are not required. Nodes that the sequence's grammar does not allow are left
        out, and what it forces behind the others is added.

        Under rejection, the drafts of draft models are chains with the distributions they were drawn from. Nothing is
        left out of them: which nodes are verified must not depend on their tokens."""
        is_valid = isinstance(tree, DraftTree) and has_tree_shape(tree, max_nodes, max_required)
        is_drawn = not entry.is_coupled and source in self._draw
        if is_valid and is_drawn:
            is_valid = is_chain(tree, self._vocab_size)
        elif is_valid and not entry.is_coupled and tree.probs is not None:
            is_valid = False  # drawn tokens, by a source whose tokens must be certain
        elif is_valid and entry.sequence.grammar is not None:
            is_valid = tree.is_valid(self._vocab_size)
            if is_valid:
                most_added = entry.max_nodes - len(tree) if self._grammar in entry.sequence.drafts.sources.cpu else 0
                tree = entry.sequence.grammar.fitted(tree, max(0, most_added))
        if not is_valid:
            self._counters.invalid_trees[self._names[source]] += 1
        elif is_drawn:
            entry.chain, entry.chain_source = (tree, source) if len(tree.token_ids) else (None, -1)
        elif len(tree.token_ids):
            entry.proposals.append((source, tree))
