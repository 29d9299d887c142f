"""Drafts from the shared cache: what followed the longest suffix of the sequence in what the cluster has generated.

Each namespace that the sequence may read has a base, an automaton as that of the drafter retrieval (He et al., "REST",
2023; Hu et al., "SAM Decoding", 2024), and a tail that grows while it is drafted from. Both are made and replaced in
the background; a draft takes them as they are and waits for nothing. Without an index nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.draft_tree import DraftTree
from actors.drafters._match_options import MatchOptions
from actors.drafters._options import Floor
from actors.drafters.contract import DraftContext, Outcome
from cache_service import static_automaton, suffix_automaton
from cache_service.automata import AutomataIndex
from cache_service.live_tail import LiveTail, Side
from cache_service.static_automaton import StaticAutomaton
from cache_service.suffix_automaton import Cursor, SuffixAutomaton
from cache_service.tree_options import TOP_CONTINUATIONS, TreeOptions

# Chance that the cache goes on as the target does after a match of the given length, by length (index 0 is not used):
# that of the drafter retrieval for the base. The planner calibrates it further online.
_ACCEPTANCE = np.array(
    [0.0, 0.60, 0.66, 0.70, 0.77, 0.80, 0.85, 0.88, 0.92, 0.94, 0.95, 0.96, 0.97, 0.97, 0.97, 0.97, 0.98],
    dtype=np.float32,
)

_FLOOR = 0.03
_LEN_THRESHOLD = 2
_MIN_CONTINUATION = 64  # see the drafter retrieval

# Tokens of a sequence that are walked through an automaton that is new to it: longer matches say no more.
_MOST_MATCHED = 64
# A tail that has grown may know a longer suffix than the cursor's: matches shorter than this are made anew.
_RENEWED = 16
_NOWHERE = Cursor()


@dataclass(slots=True)
class _Place:
    """Where a sequence stands in one automaton."""

    num_tokens: int = -1  # that have been walked; -1: none, and the first ones need not be
    version: int = 0  # of the tail
    cursor: Cursor = _NOWHERE


@dataclass(slots=True)
class _Walk:
    """Where a sequence stands in all of them, by their serial numbers."""

    num_tokens: int = 0
    places: dict[int, _Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a namespace has to offer this round."""

    base: StaticAutomaton | None
    base_serial: int
    tail: LiveTail
    side: Side
    tail_serial: int


class CacheDrafter:
    """Drafts a tree of what followed, from the automaton with the longest match first."""

    name = "cache"

    def __init__(
        self,
        index: AutomataIndex | None,
        *,
        match: MatchOptions | None = None,
        top_k: int = TOP_CONTINUATIONS,
        min_continuation: int = _MIN_CONTINUATION,
        acceptance: npt.NDArray[np.float32] = _ACCEPTANCE,
        floor: Floor = _FLOOR,
    ) -> None:
        """top_k: nodes at most at one depth, in 1 to TOP_CONTINUATIONS; min_continuation: trees with fewer nodes also
        take what followed shorter suffixes and in other automata; acceptance: float32 [m], by match length; floor:
        least confidence."""
        if not 1 <= top_k <= TOP_CONTINUATIONS:
            raise ValueError(f"top_k is {top_k}; it must be in 1 to {TOP_CONTINUATIONS}")
        self._index = index
        self._match = match or MatchOptions(len_threshold=_LEN_THRESHOLD)
        self._tree = TreeOptions(
            acceptance=acceptance,
            floor=floor,
            width=top_k,
            min_match=self._match.len_threshold,
            len_bias=self._match.len_bias,
            min_continuation=min_continuation,
        )
        self._walks: dict[int, _Walk] = {}
        if index is not None:
            static_automaton.warm_up()
            suffix_automaton.warm_up_documents()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        if self._index is None:
            return [DraftTree.empty()] * len(contexts)
        opened: dict[str, _Opened | None] = {}
        try:
            return [self._propose_one(self._index, context, opened) for context in contexts]
        finally:
            for namespace in opened.values():
                if namespace is not None:
                    namespace.tail.leave(namespace.side)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: what was emitted comes back through the shared cache, and with the next proposal."""

    def forget(self, seq_id: int) -> None:
        self._walks.pop(seq_id, None)

    def memory_bytes(self) -> int:
        """Bytes held for sequences; the automata belong to the index."""
        return sum(128 + 256 * len(walk.places) for walk in self._walks.values())

    def _propose_one(self, index: AutomataIndex, context: DraftContext, opened: dict[str, _Opened | None]) -> DraftTree:
        namespaces = context.shared_namespaces
        if not namespaces:
            return DraftTree.empty()
        walk = self._walks.get(context.seq_id)
        if walk is None or walk.num_tokens != context.start:
            walk = self._walks[context.seq_id] = _Walk()
            for namespace in namespaces:
                index.follow(namespace)
        walk.num_tokens = len(context.tokens)
        room = self._match.room(context.max_nodes)
        if room == 0:
            return DraftTree.empty()

        places: dict[int, _Place] = {}
        found: list[tuple[Cursor, StaticAutomaton | SuffixAutomaton]] = []
        for namespace in namespaces:
            if namespace not in opened:
                opened[namespace] = _open(index, namespace)
            known = opened[namespace]
            if known is None:
                continue
            for automaton, serial, version in (
                (known.side.automaton, known.tail_serial, known.side.version),
                (known.base, known.base_serial, 0),
            ):
                if automaton is None or not len(automaton):
                    continue
                place = places[serial] = walk.places.get(serial) or _Place()
                _catch_up(place, automaton, version, context.tokens)
                if place.cursor.length - self._match.len_bias >= self._match.len_threshold:
                    found.append((place.cursor, automaton))
        walk.places = places  # those of automata that have been replaced go
        if not found:
            return DraftTree.empty()
        found.sort(key=lambda match: match[0].length, reverse=True)  # the nearest namespace first among equals
        return self._grow(found, self._match.room_for(found[0][0].length, room))

    def _grow(self, found: list[tuple[Cursor, StaticAutomaton | SuffixAutomaton]], room: int) -> DraftTree:
        token_ids, parents = np.empty(room, np.int32), np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        count, options = 0, self._tree
        for cursor, automaton in found:
            count = automaton.grow_tree(cursor, options, token_ids, parents, confidence, count)
            if count >= min(room, max(options.min_continuation, 1)):
                break
        return DraftTree(token_ids[:count], parents[:count], confidence[:count]) if count else DraftTree.empty()


def _open(index: AutomataIndex, namespace: str) -> _Opened | None:
    automata = index.automata(namespace)
    if automata is None:
        return None
    tail = automata.tail
    return _Opened(automata.base, automata.base_serial, tail, tail.enter(), automata.tail_serial)


def _catch_up(
    place: _Place, automaton: StaticAutomaton | SuffixAutomaton, version: int, tokens: npt.NDArray[np.int32]
) -> None:
    count = len(tokens)
    if place.num_tokens < 0:
        place.num_tokens = max(0, count - _MOST_MATCHED)
    elif place.version != version and place.cursor.length < _RENEWED:
        place.num_tokens, place.cursor = max(0, count - _RENEWED), _NOWHERE
    if place.num_tokens != count or place.version != version:
        place.cursor = automaton.advance(place.cursor, tokens[place.num_tokens :])
        place.num_tokens, place.version = count, version


def create_drafter(
    *,
    index: AutomataIndex | None = None,
    len_threshold: int = _LEN_THRESHOLD,
    len_bias: int = 0,
    n_predicts: int | None = None,
    alpha: float | None = None,
    top_k: int = TOP_CONTINUATIONS,
    min_continuation: int = _MIN_CONTINUATION,
    floor: Floor = _FLOOR,
) -> CacheDrafter:
    """index: what the process knows of the shared cache; None: nothing, and nothing is drafted."""
    match = MatchOptions(len_threshold, len_bias, n_predicts, alpha)
    return CacheDrafter(index, match=match, top_k=top_k, min_continuation=min_continuation, floor=floor)
