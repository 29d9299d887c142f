"""What the shared cache knows to follow a token: the table of phrases by their first token, and its first column, the
token's successors.

No table is made: the automata of a namespace have the state of every token, and from there what followed it, the most
frequent first. So there is nothing to build, to bound, to replace with the index or to forget with a namespace; what
is asked for is read where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cache_service.automata import static_automaton, suffix_automaton
from cache_service.automata.automata_index import AutomataIndex
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import Cursor, SuffixAutomaton
from cache_service.automata.tree_options import TreeOptions

Phrase = tuple[int, ...]

# Chance that a text goes on as after the same last token, or the last few, elsewhere; by their number (0 is not used).
_ACCEPTANCE = np.array([0.0, 0.60, 0.66, 0.70, 0.77, 0.80, 0.85, 0.88, 0.92, 0.95], np.float32)
_FLOOR = 0.03
_NOWHERE = Cursor()


class SharedPhrases:
    """Reads the index in the thread that drafts; nothing waits, and nothing is kept from one call to the next."""

    def __init__(self, index: AutomataIndex) -> None:
        self._index = index
        self._options = TreeOptions(_ACCEPTANCE, _FLOOR)
        static_automaton.warm_up()
        suffix_automaton.warm_up_documents()

    def follow(self, namespaces: Iterable[str]) -> None:
        """These will be asked for: begin to learn what they hold."""
        for namespace in namespaces:
            self._index.follow(namespace)

    def grow(
        self,
        namespaces: Iterable[str],
        last_tokens: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        parents: npt.NDArray[np.int32],
        confidence: npt.NDArray[np.float32],
        count: int,
    ) -> int:
        """Add what followed the longest end of `last_tokens` that is known, int32 [n >= 1], to a tree of `count` nodes;
        returns how many it has then. The arrays are as of `StaticAutomaton.grow_tree`."""
        for namespace in namespaces:
            known = self._index.automata(namespace)
            if known is None:
                continue
            side = known.tail.enter()
            try:
                count = self._grow(side.automaton, last_tokens, token_ids, parents, confidence, count)
            finally:
                known.tail.leave(side)
            if known.base is not None:
                count = self._grow(known.base, last_tokens, token_ids, parents, confidence, count)
        return count

    def behind(
        self, namespaces: Iterable[str], last_tokens: npt.NDArray[np.int32], length: int, count: int
    ) -> list[Phrase]:
        """Up to `count` phrases of at most `length` tokens that followed the longest end of `last_tokens` that is
        known, int32 [n >= 1], those first of which most tokens may be hoped for."""
        room = 2 * length * count
        token_ids, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        size = self.grow(namespaces, last_tokens, token_ids, parents, confidence, 0)
        return _phrases(token_ids[:size].tolist(), parents[:size].tolist(), confidence[:size].tolist(), length, count)

    def _grow(
        self,
        automaton: StaticAutomaton | SuffixAutomaton,
        last_tokens: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        parents: npt.NDArray[np.int32],
        confidence: npt.NDArray[np.float32],
        count: int,
    ) -> int:
        if count == len(token_ids) or not len(automaton):
            return count
        cursor = automaton.advance(_NOWHERE, last_tokens)
        return automaton.grow_tree(cursor, self._options, token_ids, parents, confidence, count)


def _phrases(tokens: list[int], parents: list[int], sure: list[float], length: int, count: int) -> list[Phrase]:
    """The best paths of a tree, cut to `length` tokens; none is the beginning of another."""
    paths: list[Phrase] = []
    hopes: list[float] = []
    whole: dict[Phrase, float] = {}
    for token, parent, chance in zip(tokens, parents, sure, strict=True):
        above, hope = (paths[parent], hopes[parent]) if parent >= 0 else ((), 0.0)
        if len(above) < length:
            whole.pop(above, None)
            above, hope = (*above, token), hope + chance
            whole[above] = hope
        paths.append(above)
        hopes.append(hope)
    return sorted(whole, key=lambda path: -whole[path])[:count]
