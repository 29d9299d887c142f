"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): the target finds phrases while it verifies drafts.

In every round the target computes, after the last token, a window of guesses far ahead, which improve from round to
round, and phrases that the window has found earlier, as drafts. No draft model is needed. The window's own rows are
hardly ever accepted, so they are required nodes instead of proposals.

`ouroboros` uses the same window and pool on a draft model. The window takes the target's likeliest token at each row
at any temperature; verification decides what is emitted.

If the pool has too few phrases for a token, the rest come from the shared cache: what followed the token in the
namespaces that the sequence may read. Those are not inserted into the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters._options import between
from actors.drafters.contract import CpuDrafter, DraftContext, Outcome, VerifiedRows
from actors.lookahead.phrase_pool import Phrase, PhrasePool
from actors.lookahead.shares import SharesByNamespace, initial_shares, share_after
from actors.lookahead.token_trie import ROOT, TokenTrie
from actors.lookahead.window import MAX_LOOKAHEAD_LEVEL, LookaheadWindow
from cache_service.automata.automata_index import AutomataIndex
from cache_service.automata.shared_phrases import SharedPhrases

_PHRASE_BYTES, _TOKEN_BYTES = 360, 40  # measured bytes of a phrase, without and for each of its tokens


@dataclass(slots=True)
class _Asked:
    """The window's rows that the target was asked to compute, as a tree after the last token."""

    last_token: int
    trie: TokenTrie
    ends: list[int]  # nodes at which the window's columns end


@dataclass(slots=True)
class _State:
    """State of one sequence."""

    pool: PhrasePool
    scope: str  # its key in the pool
    window: LookaheadWindow
    shares: np.ndarray  # acceptance shares of its namespace
    tried: list[Phrase] = field(default_factory=list)  # proposed after the last token, the newest first
    asked: _Asked | None = None


class LookaheadDrafter(CpuDrafter):
    """Proposes phrases of a pool, and requires the rows of the window that finds them."""

    name = "lookahead"
    num_successors = 1  # the window follows the likeliest token

    def __init__(
        self,
        *,
        window_size: Annotated[int, between(1, 64)] = 5,
        lookahead_level: Annotated[int, between(2, MAX_LOOKAHEAD_LEVEL)] = 5,
        guess_set_size: int = 5,
        keep_phrases: bool = True,
        pool_phrases: Annotated[int, between(1, 1 << 20)] = 1 << 16,
        index: AutomataIndex | None = None,
    ) -> None:
        """window_size: columns of the window, W. lookahead_level: N; phrases have N - 1 tokens. guess_set_size: G,
        phrases kept for a token and tried in a round; -1: the pool keeps all, and W are tried. keep_phrases: share the
        pool between the requests of a namespace. pool_phrases: limit of a pool, half a kilobyte each. index: the shared
        cache, if there is one.

        Raises ValueError for a guess_set_size out of range.
        """
        if guess_set_size != -1 and not 1 <= guess_set_size <= 64:
            raise ValueError(f"guess_set_size is {guess_set_size}; it must be from 1 to 64, or -1")
        self.most_required = LookaheadWindow.most_nodes(window_size, lookahead_level)
        self._width, self._level = window_size, lookahead_level
        self._phrase_length = lookahead_level - 1
        self._per_token = guess_set_size
        self._num_guesses = window_size if guess_set_size == -1 else guess_set_size
        self._pool_phrases = pool_phrases
        self._kept = self._new_pool() if keep_phrases else None
        self._shared = None if index is None else SharedPhrases(index)
        self._states: dict[int, _State] = {}
        first = np.tile(initial_shares(self._phrase_length), (self._num_guesses, 1))
        self._shares = SharesByNamespace(first.copy)  # by place among the phrases tried

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Update the acceptance shares by the emitted text, whether the phrases were verified or not."""
        for outcome in outcomes:
            state = self._states.get(outcome.seq_id)
            if state is None or not state.tried:
                continue
            emitted = outcome.emitted.tolist()
            for shares, phrase in zip(state.shares, state.tried, strict=False):
                for depth, (guess, token) in enumerate(zip(phrase, emitted, strict=False)):
                    shares[depth] = share_after(shares[depth], guess == token)
                    if guess != token:
                        break
            state.tried = []

    def remember(self, rows: VerifiedRows) -> None:
        """Advance the windows whose rows have been computed."""
        if not len(rows.parents):  # rows of a prompt
            return
        for seq_id in dict.fromkeys(rows.sequences.tolist()):
            state = self._states.get(seq_id)
            if state is not None and state.asked is not None:
                self._advance(state, state.asked, rows, np.flatnonzero(rows.sequences == seq_id))
                state.asked = None

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace's phrases and the acceptance shares of its phrases."""
        if self._kept is not None:
            self._kept.drop_scope(namespace)
        self._shares.drop_namespace(namespace)

    def memory_bytes(self) -> int:
        """Estimated bytes of the phrases, which take nearly all of the memory."""
        pools = [self._kept] if self._kept is not None else [state.pool for state in self._states.values()]
        return sum(map(len, pools)) * (_PHRASE_BYTES + _TOKEN_BYTES * self._phrase_length)

    def _new_pool(self) -> PhrasePool:
        return PhrasePool(self._phrase_length, self._per_token, self._pool_phrases)

    def _propose_one(self, context: DraftContext) -> DraftTree:
        state = self._states.get(context.seq_id)
        if state is None or not context.start:
            state = self._states[context.seq_id] = self._new_state(context)
        state.pool.insert_text(state.scope, context.tokens, len(context.tokens) - context.start)
        last_token = int(context.tokens[-1])
        state.tried = state.pool.newest(state.scope, last_token, self._num_guesses)
        if self._shared is not None and len(state.tried) < self._num_guesses:
            self._fill_up(self._shared, context, state.tried)
        chances = state.shares.cumprod(axis=1).tolist()
        trie, confidence = _likeliest(state.tried, chances, context.max_nodes)
        num_guesses = len(trie)
        state.asked = None
        if self.most_required <= context.max_required and state.window.depth <= context.max_depth:
            state.asked = _Asked(last_token, trie, state.window.add_to(trie, ROOT))
        required = _with_ancestors(trie, state.asked.ends) if state.asked is not None else None
        confidence += [0.0] * (len(trie) - num_guesses)
        return DraftTree(*trie.arrays(), np.array(confidence, np.float32), required=required)

    def _fill_up(self, shared: SharedPhrases, context: DraftContext, tried: list[Phrase]) -> None:
        namespaces = context.shared_namespaces
        if not context.start:
            shared.follow(namespaces)
        found = shared.behind(namespaces, context.tokens[-1:], self._phrase_length, self._num_guesses)
        others = [phrase for phrase in found if phrase not in tried]
        tried += others[: self._num_guesses - len(tried)]

    def _new_state(self, context: DraftContext) -> _State:
        prompt = context.tokens[: max(1, context.num_prompt_tokens)]
        window = LookaheadWindow(self._width, self._level, prompt, context.sampling.seed)
        shares = self._shares.of(context.namespace)
        if self._kept is None:
            return _State(self._new_pool(), "", window, shares)
        return _State(self._kept, context.namespace, window, shares)

    def _advance(self, state: _State, asked: _Asked, rows: VerifiedRows, own: np.ndarray) -> None:
        """own: indices of the sequence's rows."""
        parents, tokens = rows.parents[own].tolist(), rows.contexts[own, -1].tolist()
        row_of = dict(zip(zip(parents, tokens, strict=True), own.tolist(), strict=True))
        root = row_of.get((-1, asked.last_token))
        if root is None:
            return
        node_rows: dict[int, int] = {ROOT: root}
        for node, (parent, token) in enumerate(zip(asked.trie.parents, asked.trie.tokens, strict=True)):
            row = row_of.get((node_rows[parent], token)) if parent in node_rows else None
            if row is not None:
                node_rows[node] = row
        if any(node not in node_rows for node in asked.ends):
            return
        behind = rows.token_ids[[node_rows[node] for node in asked.ends], 0].tolist()
        for token, phrase in state.window.advance(asked.last_token, behind):
            state.pool.insert(state.scope, token, phrase)


def _likeliest(phrases: list[Phrase], chances: list[list[float]], count: int) -> tuple[TokenTrie, list[float]]:
    """The likeliest `count` nodes of the phrases, with equal beginnings merged, and their probabilities.

    chances: for each phrase and depth, the probability that the phrase is right up to there.
    """
    trie = TokenTrie()
    likely: list[float] = []
    for phrase, chance in zip(phrases, chances, strict=False):
        for node, share in zip(trie.add(ROOT, phrase), chance, strict=False):  # shared phrases may be shorter
            if node == len(likely):
                likely.append(share)
            else:
                likely[node] = max(likely[node], share)
    if len(trie) <= count:
        return trie, likely
    # The sort is stable and no child is likelier than its parent, so parents of kept nodes are kept.
    kept = sorted(sorted(range(len(trie)), key=lambda node: -likely[node])[:count])
    fewer, place = TokenTrie(), {ROOT: ROOT}
    for node in kept:
        (place[node],) = fewer.add(place[trie.parents[node]], [trie.tokens[node]])
    return fewer, [likely[node] for node in kept]


def _with_ancestors(trie: TokenTrie, nodes: list[int]) -> np.ndarray:
    """bool [nodes of the trie]: the given nodes and all their ancestors."""
    wanted = [False] * len(trie)
    for node in nodes:
        while node != ROOT and not wanted[node]:
            wanted[node] = True
            node = trie.parents[node]
    return np.array(wanted, np.bool_)
