"""Drafts of the target's EAGLE or MTP head.

The head drafts the next round at the end of this one. Its trees come with the target's result, and are proposed if
nothing has been committed since.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.draft_tree import DraftTree
from actors.messages import VerifyResult
from cluster.router.draft_depth import DraftCosts
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry

_MOST_NEW_IN_A_ROW = 64  # results of new shapes; a head records 32 shapes, each of which is new twice


class HeadDrafting:
    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._new_in_a_row = 0  # results of new shapes, since the last that was of none

    def ask(self, round: Round, costs_of: Callable[[Round, float], DraftCosts]) -> None:
        """Have the head draft the next round of sequences that emit, if that pays. It sees prompts in any case;
        otherwise it could not start drafting later. costs_of: returns the costs of drafts that the next round verifies,
        by what such rounds emit a second."""
        asking = []
        for entry in round.entries:
            sequence = entry.sequence
            # This round emits at least one token, and the next round's last token is the target's own.
            most = min(sequence.drafts.max_tokens, sequence.num_left - 2)
            if sequence.drafts.sources.head is None or most < 1:
                continue
            if entry.rows > 1 or not entry.emits:
                entry.head_nodes = 0
            if entry.emits and entry.max_nodes:
                asking.append((entry, most))
        if asking and round.traffic.head_wait.pays(round.size.num_emitting):
            round.asked.head = True
            tokens_per_s = round.traffic.head_wait.tokens_per_s(round.size.num_emitting) or 0.0
            costs, depth = costs_of(round, tokens_per_s), round.traffic.head_depth
            round.asked.head_min_confidence = depth.min_confidence(costs.row_price)
            round.asked.head_worth = depth.worth(costs)
            # The first tokens of the trees come of the forward that reads the round's own.
            round.asked.head_levels = depth.paying_levels(costs, len(asking), max(most for _, most in asking)) - 1
            for entry, most in asking:
                entry.head_nodes = most

    def propose(self, round: Round) -> None:
        """Propose the trees that came with the last result."""
        for entry in round.entries:
            source, most = entry.sequence.drafts.sources.head, entry.max_nodes
            tree = _tree_of(entry)
            if tree is not None and source is not None and most:
                # The likeliest nodes come first, so the first nodes are the best tree of that size.
                self._proposals.add(entry, source, tree.first(most), max_nodes=most)

    def note_shape(self, round: Round, result: VerifyResult) -> None:
        """Learn no times from this round if the head's shape was new, unless its shapes always are. Call it with every
        result, before times are learnt."""
        if result.head_forwards or result.head_is_new_shape:
            self._new_in_a_row = self._new_in_a_row + 1 if result.head_is_new_shape else 0
            round.asked.is_new_shape |= 0 < self._new_in_a_row <= _MOST_NEW_IN_A_ROW

    def observe(self, round: Round, emitted: list[Emitted], result: VerifyResult) -> None:
        """Learn how likely the head's nodes are right and what its levels cost, and keep the result's trees for the
        next round. Call it when the round's tokens are committed."""
        for index, first, _ in emitted:
            entry = round.entries[index]
            if (tree := _tree_of(entry)) is not None:
                round.traffic.head_depth.observe_tree(tree, entry.sequence.tokens(first))
        only_drafted = all(entry.rows <= 1 for entry in round.entries if entry.head_nodes >= 0)  # no prompts
        if only_drafted and not round.asked.is_new_shape:
            is_parallel = result.head_is_parallel
            round.traffic.head_depth.observe_answer(result.head_s, result.head_forwards, is_parallel=is_parallel)
        self._keep(round, result)

    def _keep(self, round: Round, result: VerifyResult) -> None:
        if not result.drafts or len(result.drafted_seq_ids) != len(result.drafts):
            return
        asked = {entry.seq_id: entry for entry in round.entries if entry.head_nodes > 0}
        for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
            entry = asked.pop(seq_id, None)
            if entry is not None and entry.sequence.num_tokens > entry.num_tokens:  # it emitted
                entry.sequence.drafts.head_tree = tree
                entry.sequence.drafts.head_length = entry.sequence.num_tokens


def _tree_of(entry: RoundEntry) -> DraftTree | None:
    """The tree that the head grew after the tokens that the round began with."""
    drafts = entry.sequence.drafts
    return drafts.head_tree if drafts.head_length == entry.num_tokens else None
