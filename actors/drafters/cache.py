"""Drafts from the shared cache: what followed the longest suffix of the sequence in the cluster's generated text.

Each namespace that the sequence may read has a base, a static automaton as in the drafter retrieval (He et al., "REST",
2023; Hu et al., "SAM Decoding", 2024), and a tail that grows while it is read. Both are built and replaced in the
background; drafting never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.draft_tree import DraftTree
from actors.drafters._match_options import Alpha, LenBias, LenThreshold, MatchOptions, NPredicts
from actors.drafters._options import Floor
from actors.drafters._tree_growth import FLOOR, LEN_THRESHOLD, MIN_CONTINUATION, Match, TopK, TreeGrowth
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.messages import GenerationRequest
from cache_service.automata import static_automaton, suffix_automaton
from cache_service.automata.automata_index import Automata, AutomataIndex
from cache_service.automata.live_tail import Side
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import Cursor, SuffixAutomaton
from cache_service.automata.tree_options import TOP_CONTINUATIONS

_MOST_MATCHED = 64  # last tokens of a sequence that are matched in an automaton new to it
_RENEWED = 16  # shorter matches are repeated when the tail has grown: it may hold a longer suffix now
_NOWHERE = Cursor()


@dataclass(slots=True)
class _Place:
    """Position of a sequence in one automaton."""

    num_tokens: int = -1  # tokens matched so far; -1: new, only the last _MOST_MATCHED will be
    version: int = 0  # the tail's version
    cursor: Cursor = _NOWHERE


@dataclass(slots=True)
class _Walk:
    """Positions of a sequence in all automata, by their serial numbers."""

    num_tokens: int = 0
    places: dict[int, _Place] = field(default_factory=dict)


_Opened = tuple[Automata, Side]  # a namespace's automata in this round, and the side of its tail to read


class CacheDrafter(CpuDrafter):
    """Drafts a tree of continuations, from the automaton with the longest match first."""

    name = "cache"

    def __init__(
        self,
        index: AutomataIndex | None = None,
        *,
        len_threshold: LenThreshold = LEN_THRESHOLD,
        len_bias: LenBias = 0,
        n_predicts: NPredicts = None,
        alpha: Alpha = None,
        top_k: TopK = TOP_CONTINUATIONS,
        min_continuation: int = MIN_CONTINUATION,
        floor: Floor = FLOOR,
    ) -> None:
        """index: without one nothing is drafted. Other options: see MatchOptions and TreeGrowth."""
        self._index = index
        self._growth = TreeGrowth(
            MatchOptions(len_threshold, len_bias, n_predicts, alpha),
            top_k=top_k,
            min_continuation=min_continuation,
            floor=floor,
        )
        self._walks: dict[int, _Walk] = {}
        if index is not None:
            static_automaton.warm_up()
            suffix_automaton.warm_up_documents()

    def may_draft_for(self, request: GenerationRequest) -> bool:
        return self._index is not None and request.cache != "off"

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        if self._index is None:
            return [DraftTree.empty()] * len(contexts)
        opened: dict[str, _Opened | None] = {}
        try:
            return [self._draft_one(self._index, context, opened) for context in contexts]
        finally:
            for known in opened.values():
                if known is not None:
                    known[0].tail.leave(known[1])

    def forget(self, seq_id: int) -> None:
        self._walks.pop(seq_id, None)

    def memory_bytes(self) -> int:
        """Bytes held for sequences. The automata belong to the index."""
        return sum(128 + 256 * len(walk.places) for walk in self._walks.values())

    def _draft_one(self, index: AutomataIndex, context: DraftContext, opened: dict[str, _Opened | None]) -> DraftTree:
        namespaces = context.shared_namespaces
        if not namespaces:
            return DraftTree.empty()
        walk = self._walks.get(context.seq_id)
        if walk is None or walk.num_tokens != context.start:
            walk = self._walks[context.seq_id] = _Walk()
            for namespace in namespaces:
                index.follow(namespace)
        walk.num_tokens = len(context.tokens)
        if self._growth.match.room(context.max_nodes) == 0:
            return DraftTree.empty()

        places: dict[int, _Place] = {}
        found: list[Match] = []
        for namespace in namespaces:
            if namespace not in opened:
                opened[namespace] = _open(index, namespace)
            known = opened[namespace]
            if known is None:
                continue
            automata, side = known
            for automaton, serial, version in (
                (side.automaton, automata.tail_serial, side.version),
                (automata.base, automata.base_serial, 0),
            ):
                if automaton is None or not len(automaton):
                    continue
                place = places[serial] = walk.places.get(serial) or _Place()
                _catch_up(place, automaton, version, context.tokens)
                if self._growth.match.room_for(place.cursor.length, context.max_nodes):
                    found.append((place.cursor, automaton))
        walk.places = places  # drops the positions in replaced automata
        if not found:
            return DraftTree.empty()
        found.sort(key=lambda match: match[0].length, reverse=True)  # the nearest namespace first among equals
        return self._growth.grow(found, context.max_nodes)


def _open(index: AutomataIndex, namespace: str) -> _Opened | None:
    automata = index.automata(namespace)
    return None if automata is None else (automata, automata.tail.enter())


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
