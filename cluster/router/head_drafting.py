"""Drafts of the target's EAGLE head.

The head drafts the next round at the end of this one. Its trees come with the target's result, and are proposed if
nothing has been committed since.
"""

from __future__ import annotations

from actors.messages import VerifyResult
from cluster.router.proposals import Proposals
from cluster.router.round import Round


class HeadDrafting:
    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def ask(self, round: Round) -> None:
        """Have the head draft the next round of sequences that emit, if that pays. It sees prompts in any case;
        otherwise it could not start drafting later."""
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
            for entry, most in asking:
                entry.head_nodes = most

    def propose(self, round: Round) -> None:
        """Propose the trees that came with the last result."""
        for entry in round.entries:
            drafts, most = entry.sequence.drafts, entry.max_nodes
            tree, source = drafts.head_tree, drafts.sources.head
            if tree is None or source is None or not most or not entry.is_coupled:
                continue
            if drafts.head_length == entry.num_tokens:
                # The likeliest nodes come first, so the first nodes are the best tree of that size.
                self._proposals.add(entry, source, tree.first(most), max_nodes=most)

    def keep(self, round: Round, result: VerifyResult) -> None:
        """Keep a result's trees for the next round. Call it when the round's tokens are committed."""
        if not result.drafts or len(result.drafted_seq_ids) != len(result.drafts):
            return
        asked = {entry.seq_id: entry for entry in round.entries if entry.head_nodes > 0}
        for seq_id, tree in zip(result.drafted_seq_ids, result.drafts, strict=True):
            entry = asked.pop(seq_id, None)
            if entry is not None and entry.sequence.num_tokens > entry.num_tokens:  # it emitted
                entry.sequence.drafts.head_tree = tree
                entry.sequence.drafts.head_length = entry.sequence.num_tokens
