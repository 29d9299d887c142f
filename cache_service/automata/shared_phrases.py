"""Phrases and successors of a token in the shared cache, read directly from the automata of its namespaces.

There is no table of its own to build, bound, or purge.
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

# Probability that the token after a match of this length is right; length 0 is not used.
_ACCEPTANCE = np.array([0.0, 0.60, 0.66, 0.70, 0.77, 0.80, 0.85, 0.88, 0.92, 0.95], np.float32)
_FLOOR = 0.03
_NOWHERE = Cursor()


class SharedPhrases:
    """Reads the index in the drafting thread, without waiting and without state between calls."""

    def __init__(self, index: AutomataIndex) -> None:
        self._index = index
        self._options = TreeOptions(_ACCEPTANCE, _FLOOR)
        static_automaton.warm_up()
        suffix_automaton.warm_up_documents()

    def follow(self, namespaces: Iterable[str]) -> None:
        """Begin to index these namespaces."""
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
        """Add continuations of the longest known suffix of `last_tokens` (int32 [n >= 1]) to a draft tree; see
        `StaticAutomaton.grow_tree` for the arrays, `count` and the result."""
        tree = token_ids, parents, confidence
        for namespace in namespaces:
            known = self._index.automata(namespace)
            if known is None:
                continue
            side = known.tail.enter()
            try:
                count = self._grow(side.automaton, last_tokens, tree, count)
            finally:
                known.tail.leave(side)
            if known.base is not None:
                count = self._grow(known.base, last_tokens, tree, count)
        return count

    def behind(
        self, namespaces: Iterable[str], last_tokens: npt.NDArray[np.int32], length: int, count: int
    ) -> list[Phrase]:
        """Up to `count` phrases of at most `length` tokens that followed the longest known suffix of `last_tokens`
        (int32 [n >= 1]), by falling expected number of accepted tokens."""
        room = 2 * length * count
        token_ids, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        size = self.grow(namespaces, last_tokens, token_ids=token_ids, parents=parents, confidence=confidence, count=0)
        nodes = zip(token_ids[:size].tolist(), parents[:size].tolist(), confidence[:size].tolist(), strict=True)
        return _phrases(nodes, length, count)

    def _grow(
        self,
        automaton: StaticAutomaton | SuffixAutomaton,
        last_tokens: npt.NDArray[np.int32],
        tree: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]],
        count: int,
    ) -> int:
        token_ids, parents, confidence = tree
        if count == len(token_ids) or not len(automaton):
            return count
        cursor = automaton.advance(_NOWHERE, last_tokens)
        return automaton.grow_tree(
            cursor, self._options, token_ids=token_ids, parents=parents, confidence=confidence, count=count
        )


def _phrases(nodes: Iterable[tuple[int, int, float]], length: int, count: int) -> list[Phrase]:
    """The best paths of a tree of (token, parent, confidence), cut to `length` tokens; none is a prefix of another."""
    paths: list[Phrase] = []
    hopes: list[float] = []
    whole: dict[Phrase, float] = {}
    for token, parent, chance in nodes:
        above, hope = (paths[parent], hopes[parent]) if parent >= 0 else ((), 0.0)
        if len(above) < length:
            whole.pop(above, None)
            above, hope = (*above, token), hope + chance
            whole[above] = hope
        paths.append(above)
        hopes.append(hope)
    return sorted(whole, key=lambda path: -whole[path])[:count]
