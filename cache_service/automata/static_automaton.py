"""A suffix automaton of a finished corpus: read-only flat arrays that live in memory or in a mapped file.

Made from the online automaton once all text is known (Blumer et al. 1985; for drafting: Hu et al., "SAM Decoding",
2024, and He et al., "REST", 2023). It knows for every string of the corpus how often it occurs, and for every state its
most frequent continuations, so that a draft tree grows best first without counting anything.

Layout. States are those of the online automaton: 0 is the empty string, i > 0 the first i tokens, ~row a clone. A
state i > 0 occurs once, since the text begins with a separator, and its one transition is the text itself; so it costs
a token and a link. A clone costs a row of 16 bytes and 8 bytes a transition. A clone's transitions begin with its
TOP_CONTINUATIONS most frequent ones, most frequent first; the others follow by token. That makes 23 bytes a token of
source text. A suffix array with its text takes 8, but a step in it is a binary search with a cache miss a probe, and it
knows no most frequent continuations; here a token of a match costs 0.2 us.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from numba import njit

from cache_service.automata.suffix_automaton import SEPARATOR, Cursor, SuffixAutomaton
from cache_service.automata.tree_kernels import (
    LENGTH,
    LINK,
    confidence_left,
    depths_of,
    length_of,
    link_of,
    place_node,
)
from cache_service.automata.tree_options import FALLBACKS, TOP_CONTINUATIONS, TreeOptions

MAX_TOKEN_ID = 2**22 - 1
"""Largest token id: the transitions of the empty string are a table by token."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

# Columns of a clone's row. The row after the last one holds only where the edges end.
_LINK, _LENGTH, _COUNT, _FIRST_EDGE = LINK, LENGTH, 2, 3
_TOKEN, _TARGET = 0, 1  # columns of an edge

_SHAPES: dict[str, tuple[int, ...]] = {"text": (), "links": (), "clones": (4,), "edges": (2,), "root": ()}


class StaticAutomaton:
    """Suffix automaton of a corpus. Safe to read from any number of threads."""

    __slots__ = ("_clones", "_edges", "_links", "_root", "_text")

    def __init__(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """arrays: see `arrays`; not copied. Raises ValueError for other names, shapes or dtypes.

        Their contents are trusted: call `check_integrity` for arrays from outside.
        """
        if set(arrays) != set(_SHAPES):
            raise ValueError(f"arrays are {sorted(arrays)}; they must be {sorted(_SHAPES)}")
        for name, tail in _SHAPES.items():
            array = arrays[name]
            if array.dtype != np.int32 or array.ndim != 1 + len(tail) or array.shape[1:] != tail or not len(array):
                raise ValueError(f"array {name} is {array.dtype} {array.shape}; it must be int32 with rows {tail}")
        if len(arrays["links"]) != len(arrays["text"]) + 1:
            raise ValueError(
                f"links are {len(arrays['links'])} for {len(arrays['text'])} tokens; they must be one more"
            )
        self._text, self._links, self._clones, self._edges, self._root = (_frozen(arrays[name]) for name in _SHAPES)

    @staticmethod
    def freeze(automaton: SuffixAutomaton) -> StaticAutomaton:
        """The same automaton with occurrence counts, O(n log n), mostly without the GIL. Raises ValueError for ids
        above MAX_TOKEN_ID and for automata with appended documents."""
        text, links, clone_links, lengths = automaton.states()
        if int(text.min()) < SEPARATOR:
            raise ValueError("the automaton has appended documents; only one made by `extend` can be frozen")
        source, token, target = automaton.transitions()
        highest = int(text.max(initial=0))
        if highest > MAX_TOKEN_ID:
            raise ValueError(f"a token id is {highest}; a corpus holds ids up to {MAX_TOKEN_ID}")
        root = np.zeros(highest + 1, np.int32)
        from_root = source == 0
        root[token[from_root]] = target[from_root]
        source, token, target = ~source[~from_root], token[~from_root], target[~from_root]
        if len(source) >= 2**31:
            raise ValueError(f"the corpus has {len(source)} transitions; one index holds {2**31 - 1}: split the corpus")

        rows = len(lengths)
        clones = np.zeros((rows + 1, 4), np.int32)
        clones[:rows, _LINK] = clone_links
        clones[:rows, _LENGTH] = lengths
        _count(clones, source, links)
        # A state's count is the sum over the states whose suffix links lead to it, so longer strings come first.
        _add_up(clones, np.argsort(-lengths, kind="stable"))
        edges = np.zeros((max(len(source), 1), 2), np.int32)
        _place_edges(clones, edges, source, token, target)
        return StaticAutomaton({"text": text, "links": links, "clones": clones, "edges": edges, "root": root})

    @property
    def arrays(self) -> dict[str, Int32Array]:
        """The automaton as read-only int32 arrays, from which `StaticAutomaton` makes an equal one."""
        return dict(zip(_SHAPES, (self._text, self._links, self._clones, self._edges, self._root), strict=True))

    def __len__(self) -> int:
        """Tokens, separators between documents included."""
        return len(self._text) - 1

    @property
    def memory_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def advance(self, cursor: Cursor, tokens: npt.NDArray[np.integer]) -> Cursor:
        """Move a cursor of another text over its next tokens, integers [n], amortised O(1) each."""
        # A fresh copy: numba would compile a second version for read-only arrays.
        state, length = _advance(
            self._text, self._links, self._clones, self._edges, self._root, cursor.state, cursor.length,
            np.array(tokens, dtype=np.int32),
        )  # fmt: skip
        return Cursor(int(state), int(length))

    def grow_tree(
        self,
        cursor: Cursor,
        options: TreeOptions,
        token_ids: Int32Array,
        parents: Int32Array,
        confidence: Float32Array,
        count: int,
    ) -> int:
        """Add continuations of the matched string to a draft tree, by falling confidence; returns its new node count.

        token_ids int32 [room], parents int32 [room] (-1: root) and confidence float32 [room] hold a tree of `count`
        nodes and are extended in place. New branches share the confidence left by the root's existing children.
        """
        return int(
            _grow_tree(
                self._text, self._links, self._clones, self._edges, cursor.state, cursor.length,
                options.acceptance, options.floor, options.prior, options.width, options.min_match,
                options.len_bias, options.min_continuation, token_ids, parents, confidence, count,
            )
        )  # fmt: skip

    def check_integrity(self) -> str | None:
        """The first fault that could make a walk fail, or None. O(n); accepts any int32 arrays of the right shapes."""
        code, where = _check(self._text, self._links, self._clones, self._edges, self._root)
        return None if code == 0 else f"{_FAULTS[code]} (at {where})"


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, so that no request pays for it."""
    automaton = SuffixAutomaton()
    automaton.extend(np.array([1, 2, 1, 2, 3], dtype=np.int32))
    frozen = StaticAutomaton.freeze(automaton)
    cursor = frozen.advance(Cursor(), np.array([1, 2], np.int32))
    frozen.grow_tree(
        cursor,
        TreeOptions(np.ones(2, np.float32)),
        token_ids=np.empty(2, np.int32),
        parents=np.empty(2, np.int32),
        confidence=np.empty(2, np.float32),
        count=0,
    )
    frozen.check_integrity()


def _frozen(array: npt.NDArray[np.int32]) -> Int32Array:
    """A plain read-only view, so that numba compiles one version for memory and mapped files."""
    view = np.asarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


@njit(cache=True, nogil=True)
def _count(clones, source, links):  # type: ignore[no-untyped-def]
    """Fill in where each clone's edges begin, and of how many prefixes it is the suffix link."""
    for row in source:
        clones[row + 1, _FIRST_EDGE] += 1
    for row in range(clones.shape[0] - 1):
        clones[row + 1, _FIRST_EDGE] += clones[row, _FIRST_EDGE]
    for link in links:
        if link < 0:
            clones[~link, _COUNT] += 1


@njit(cache=True, nogil=True)
def _add_up(clones, order):  # type: ignore[no-untyped-def]
    for row in order:
        link = clones[row, _LINK]
        if link < 0:
            clones[~link, _COUNT] += clones[row, _COUNT]


@njit(cache=True, nogil=True)
def _occurrences(clones, state):  # type: ignore[no-untyped-def]
    return clones[~state, _COUNT] if state < 0 else np.int32(1)


@njit(cache=True, nogil=True)
def _place_edges(clones, edges, source, token, target):  # type: ignore[no-untyped-def]
    """Sort edges by clone; the most frequent come first, the others by token."""
    rows = clones.shape[0] - 1
    free = clones[:, _FIRST_EDGE].copy()
    for index in range(len(source)):
        slot = free[source[index]]
        free[source[index]] = slot + 1
        edges[slot, _TOKEN] = token[index]
        edges[slot, _TARGET] = target[index]
    for row in range(rows):
        begin, end = clones[row, _FIRST_EDGE], clones[row + 1, _FIRST_EDGE]
        top = min(begin + TOP_CONTINUATIONS, end)
        for slot in range(begin, top):
            best = slot
            for other in range(slot + 1, end):
                more = _occurrences(clones, edges[other, _TARGET]) - _occurrences(clones, edges[best, _TARGET])
                if more > 0 or (more == 0 and edges[other, _TOKEN] < edges[best, _TOKEN]):
                    best = other
            for column in range(2):
                edges[slot, column], edges[best, column] = edges[best, column], edges[slot, column]
        if end - top > 1:
            rest = edges[top:end].copy()
            edges[top:end] = rest[np.argsort(rest[:, _TOKEN])]


@njit(cache=True, nogil=True)
def _target(text, clones, edges, root, state, token):  # type: ignore[no-untyped-def]
    """Where a state goes by a token >= 0, or 0 for nowhere."""
    if state > 0:
        return np.int32(state + 1) if state < len(text) and text[state] == token else np.int32(0)
    if state == 0:
        return root[token] if token < len(root) else np.int32(0)
    begin, end = clones[~state, _FIRST_EDGE], clones[~state + 1, _FIRST_EDGE]
    top = min(begin + TOP_CONTINUATIONS, end)
    for slot in range(begin, top):
        if edges[slot, _TOKEN] == token:
            return edges[slot, _TARGET]
    low, high = top, end
    while low < high:
        middle = (low + high) >> 1
        if edges[middle, _TOKEN] < token:
            low = middle + 1
        else:
            high = middle
    return edges[low, _TARGET] if low < end and edges[low, _TOKEN] == token else np.int32(0)


@njit(cache=True, nogil=True)
def _advance(text, links, clones, edges, root, state, length, tokens):  # type: ignore[no-untyped-def]
    state = np.int32(state)
    for token in tokens:
        if token < 0:
            state = np.int32(0)
            length = 0
            continue
        while True:
            target = _target(text, clones, edges, root, state, token)
            if target != 0:
                state = target
                length += 1
                break
            if state == 0:
                length = 0
                break
            state = link_of(links, clones, state)
            length = length_of(clones, state)
    return np.int64(state), np.int64(length)


@njit(cache=True, nogil=True)
def _continuation(text, clones, edges, state, rank):  # type: ignore[no-untyped-def]
    """The rank-th most frequent continuation of a state, as (token, target, occurrences); token -1: there is none."""
    if state > 0:
        if rank == 0 and state < len(text) and text[state] >= 0:
            return text[state], np.int32(state + 1), np.int32(1)
        return np.int32(-1), np.int32(0), np.int32(0)
    slot = clones[~state, _FIRST_EDGE] + rank
    if slot >= clones[~state + 1, _FIRST_EDGE]:
        return np.int32(-1), np.int32(0), np.int32(0)
    target = edges[slot, _TARGET]
    return edges[slot, _TOKEN], target, _occurrences(clones, target)


@njit(cache=True, nogil=True)
def _grow_tree(  # type: ignore[no-untyped-def]
    text, links, clones, edges, state, length, acceptance, floor, prior, width, min_match, len_bias,
    min_continuation, token_ids, parents, confidence, count,
):  # fmt: skip
    room = len(token_ids)
    state = np.int32(state)
    most = len(acceptance) - 1
    width = min(width, TOP_CONTINUATIONS)
    depths, at_depth = depths_of(parents, count, room)

    # Nodes that may get a child: their state, which continuation is next, and how sure that one is.
    nodes = np.empty(room + 1, np.int32)
    states = np.empty(room + 1, np.int32)
    ranks = np.empty(room + 1, np.int32)
    sure = np.empty(room + 1, np.float32)
    scores = np.empty(room + 1, np.float32)
    for fallback in range(1 + FALLBACKS):
        length -= len_bias
        if state == 0 or length < min_match or count >= room or (fallback > 0 and count >= min_continuation):
            break
        known = count
        left = confidence_left(parents, confidence, count)
        nodes[0], states[0], ranks[0], sure[0] = -1, state, 0, left
        _, _, times = _continuation(text, clones, edges, state, 0)
        step = acceptance[min(length, most)] / (_occurrences(clones, state) + prior / length)
        scores[0] = sure[0] * step * times
        used = 1
        while count < room and used <= room:
            best = 0
            for index in range(1, used):
                if scores[index] > scores[best]:
                    best = index
            score = scores[best]
            if score <= 0 or score < floor:
                break
            parent = nodes[best]
            depth = depths[parent + 1] + 1
            token, target, _ = _continuation(text, clones, edges, states[best], ranks[best])
            ranks[best] += 1
            scores[best] = 0
            if ranks[best] < width:
                _, _, times = _continuation(text, clones, edges, states[best], ranks[best])
                longer = length + depth - 1
                step = acceptance[min(longer, most)] / (_occurrences(clones, states[best]) + prior / longer)
                scores[best] = sure[best] * step * times

            child = place_node(
                parent, token, score, known, width, token_ids, parents, confidence, depths, at_depth, count
            )  # fmt: skip
            if child < 0:
                scores[best] = 0
                continue
            count = max(count, child + 1)
            nodes[used], states[used], ranks[used], sure[used] = child, target, 0, score
            _, _, times = _continuation(text, clones, edges, target, 0)
            longer = length + depth
            step = acceptance[min(longer, most)] / (_occurrences(clones, target) + prior / longer)
            scores[used] = score * step * times
            used += 1
        state = link_of(links, clones, state)
        length = length_of(clones, state)
    return count


_FAULTS = {
    1: "a token lies outside the range of ids",
    2: "a suffix link leads to no state",
    3: "a suffix link leads to a string that is not shorter",
    4: "a clone has no length or occurrence",
    5: "the edges of a clone do not follow those of the one before it",
    6: "an edge leads to no state",
    7: "an edge has no token, or stands out of order",
}


@njit(cache=True, nogil=True)
def _check(text, links, clones, edges, root):  # type: ignore[no-untyped-def]
    size = len(text)
    rows = clones.shape[0] - 1
    for index in range(size):
        if text[index] < SEPARATOR or text[index] > MAX_TOKEN_ID:
            return 1, index
    for index in range(1, size + 1 + rows):
        state = index if index <= size else ~(index - size - 1)
        link = link_of(links, clones, state)
        if link > 0 or ~link >= rows:
            return 2, state
        if length_of(clones, link) >= length_of(clones, state):
            return 3, state
    if clones[0, _FIRST_EDGE] != 0 or clones[rows, _FIRST_EDGE] > len(edges):
        return 5, 0
    for row in range(rows):
        if clones[row, _LENGTH] < 1 or clones[row, _COUNT] < 1:
            return 4, ~row
        begin, end = clones[row, _FIRST_EDGE], clones[row + 1, _FIRST_EDGE]
        if begin > end or end > len(edges):
            return 5, ~row
        for slot in range(begin, end):
            target = edges[slot, _TARGET]
            if target == 0 or target > size or ~target >= rows:
                return 6, slot
            if edges[slot, _TOKEN] < 0 or edges[slot, _TOKEN] > MAX_TOKEN_ID:
                return 7, slot
            if slot > begin + TOP_CONTINUATIONS and edges[slot, _TOKEN] <= edges[slot - 1, _TOKEN]:
                return 7, slot
    for token in range(len(root)):
        if root[token] > size or ~root[token] >= rows:
            return 6, token
    return 0, 0
