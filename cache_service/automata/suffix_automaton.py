"""An online suffix automaton over token ids in flat arrays, compiled with numba.

The automaton of a text accepts exactly its substrings (Blumer et al., "The smallest automaton recognizing the subwords
of a text", Theoretical Computer Science 40, 1985). Here it answers one question after every token: what is the longest
suffix of the text that also occurred earlier, and what followed it there? That suffix is the suffix link of the state
of the whole text, so no second cursor is needed.

Layout. The text begins with a separator, so no prefix of it ever recurs. State 0 is the empty string; state i > 0 is
the text's first i tokens: its length is i, its only transition is by text[i] to state i + 1, and neither needs
storage. So such a state costs a token and a link, 8 bytes. All other states are clones, written ~row: a row of 28 bytes
with one transition inline. About one state of ten has more; those live in one open-addressing table of 16-byte slots,
chained by clone, because a split copies them. On token streams that makes 34-40 bytes a token, spare room included.

A SEPARATOR always stands behind the last token, so that drafts end there.

Documents that grow in pieces. `append` can continue any document of the text. After each of its pieces comes a slot
with SEPARATOR; when the document continues elsewhere in the text, the slot says where, as _JUMP - place. So the text is
a set of strings that grow at their ends, each after its own separator, and the automaton is that of their prefix
tree (Mohri, Moreno and Weinstein, "General suffix automaton construction algorithm and space bounds", Theoretical
Computer Science 410, 2009). A prefix state's number is then no longer its length, but still more than any match has.

Not thread-safe: one writer, and no reader while it writes. The kernels release the GIL.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from cache_service.automata.tree_kernels import (
    LENGTH,
    LINK,
    confidence_left,
    depths_of,
    length_of,
    link_of,
    place_node,
)
from cache_service.automata.tree_options import FALLBACKS, TOP_CONTINUATIONS, BranchOptions, TreeOptions
from cache_service.splitmix64 import hash_pair

SEPARATOR = -1
"""A token that ends a document: no match and no draft ever crosses it."""

MAX_TOKENS = 2**30
"""Tokens one automaton can hold; state ids and positions are int32."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_NO_STATE = np.int32(-(2**31))  # link of state 0
_NO_TOKEN = np.int32(-1)
_JUMP = -2

# Columns of a clone's row.
_LINK, _LENGTH, _TOKEN, _NEXT, _END, _HEAD, _COUNT = LINK, LENGTH, 2, 3, 4, 5, 6
_CLONE_COLUMNS = 7
# _TOKEN, _NEXT: the inline transition. _END: how many tokens the text had when the state's strings were last seen.
# _HEAD: token of the first transition kept in the table, or _NO_TOKEN. _COUNT: how often they were seen by then.

# Columns of a table slot; a slot is free while its target is 0, since no transition leads to the empty string.
_SLOT_SOURCE, _SLOT_TOKEN, _SLOT_TARGET, _SLOT_CHAIN = 0, 1, 2, 3
_SLOT_COLUMNS = 4
# _SLOT_CHAIN: token of the next transition of the same clone, or _NO_TOKEN. State 0 is never split and has no chain.

# Entries of the counters.
_TOKENS, _CLONES, _SLOTS = 0, 1, 2

# A state's last occurrence and count are refreshed for this many states along the suffix links of each position: text
# has chains of 3-6, so there they are exact; only repetitive text has longer ones, and the bound keeps it linear.
_REFRESHED_LINKS = 8

# Where a draft looks for continuations that begin with another token: transitions of the matched state (newest first),
# and shorter suffixes.
_BRANCH_TRANSITIONS = 8
_BRANCH_LINKS = 8

# Transitions of a state that are looked at for its most frequent continuations, those that are new first.
_SCANNED_TRANSITIONS = 64

MAX_BRANCHES = _BRANCH_TRANSITIONS + 2
"""Branches that a draft can have: the last continuation, an inline one, those of the table."""

# Given that what followed a match last is wrong, what else followed it is right about half as often as a lone match of
# that length (measured on greedy answers of SmolLM2 to Spec-Bench prompts: 0.12 at length 1, 0.3 beyond).
_SECOND_CHOICE = np.float32(0.5)


class Cursor(NamedTuple):
    """Where a foreign text stands in an automaton: its longest suffix that occurs there has this state and length."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """Suffix automaton of a growing text. Tokens are int32, >= 0; SEPARATOR ends a document."""

    __slots__ = ("_clones", "_counts", "_links", "_table", "_text")

    def __init__(self, reserve: int = 0) -> None:
        """reserve: tokens to make room for at once; any number may follow."""
        size = max(reserve, 15) + 2
        self._text: Int32Array = np.empty(size, np.int32)
        self._links: Int32Array = np.empty(size + 1, np.int32)
        self._text[:2] = SEPARATOR
        self._links[:2] = _NO_STATE, 0
        self._clones: Int32Array = np.empty((size // 4 + 4, _CLONE_COLUMNS), np.int32)
        self._table: Int32Array = np.zeros((size // 2 + 8, _SLOT_COLUMNS), np.int32)
        self._counts: Int64Array = np.array([1, 0, 0], np.int64)

    def __len__(self) -> int:
        """Tokens so far, separators included."""
        return int(self._counts[_TOKENS]) - 1

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated, spare capacity included."""
        arrays = (self._text, self._links, self._clones, self._table, self._counts)
        return sum(array.nbytes for array in arrays)

    def extend(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append tokens, integers [n], amortised O(1) each. Raises ValueError for ids outside [-1, 2**31 - 1]."""
        self._take(tokens)
        self._clones, self._table = _extend(
            self._text, self._links, self._clones, self._table, self._counts, len(tokens), int(self._counts[_TOKENS])
        )

    def append(
        self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer], after: npt.NDArray[np.integer]
    ) -> Int64Array:
        """Append pieces of documents, in any interleaving, and return where each ends, int64 [pieces].

        tokens [n] >= 0: all pieces; lengths [pieces], each >= 1, sum n; after [pieces]: the end of the piece that this
        one continues, ~i for the end of piece i of the same call, 0 for a new document. A piece whose predecessor is
        already continued begins a new document. Raises ValueError for other arguments, and if `extend` has left a
        document without a separator behind it; then appends nothing.
        """
        size, count = len(self) + 1, len(tokens)
        if self._text[size - 1] != SEPARATOR:
            raise ValueError(f"the text ends with token {self._text[size - 1]}; pieces can only follow a separator")
        if len(lengths) != len(after) or (len(lengths) and lengths.min() < 1) or lengths.sum() != count:
            raise ValueError(f"lengths are {lengths[:10]} for {count} tokens; they must be >= 1 and add up")
        if len(after) and (after.max() >= size or (after < ~np.arange(len(after)) + 1).any()):
            raise ValueError(f"after is {after[:10]}; pieces go on from ends below {size} or from earlier pieces")
        _check_ids(tokens, 0)
        self._reserve(size + count + len(lengths))
        ends = np.empty(len(lengths), np.int64)
        self._clones, self._table = _append(
            self._text, self._links, self._clones, self._table, self._counts,
            np.array(tokens, dtype=np.int32), np.array(lengths, dtype=np.int64), np.array(after, dtype=np.int64), ends,
        )  # fmt: skip
        return ends

    def extend_and_draft(
        self,
        tokens: npt.NDArray[np.integer],
        max_nodes: int,
        options: BranchOptions,
    ) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Append tokens and draft a continuation, in one kernel call.

        The first branch is what followed the most recent earlier occurrence of the longest matching suffix. Further
        branches from the root, with other first tokens, are what else followed that suffix, and what followed a shorter
        one. A continuation that reaches the end of the text repeats from its own start, as in periodic text.

        Returns token ids int32 [k], parents int32 [k] (-1: root) and confidence float32 [k], k <= max_nodes.
        """
        self._take(tokens)
        room = max(max_nodes, 0)
        token_ids = np.empty(room, np.int32)
        parents = np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        self._clones, self._table, count = _extend_and_draft(
            self._text,
            self._links,
            self._clones,
            self._table,
            self._counts,
            len(tokens),
            options.acceptance,
            options.floor,
            options.len_threshold,
            options.len_bias,
            -1.0 if options.alpha is None else float(options.alpha),
            min(options.branches, MAX_BRANCHES),
            options.by_frequency,
            token_ids,
            parents,
            confidence,
        )
        return token_ids[:count], parents[:count], confidence[:count]

    def grow_tree(
        self,
        cursor: Cursor,
        options: TreeOptions,
        token_ids: Int32Array,
        parents: Int32Array,
        confidence: Float32Array,
        count: int,
    ) -> int:
        """Like `StaticAutomaton.grow_tree`; of equally frequent continuations, the newest comes first.

        The cursor must have been advanced, even if by no tokens, since the text last grew.
        """
        return int(
            _grow_tree(
                self._text, self._links, self._clones, self._table, cursor.state, cursor.length,
                options.acceptance, options.floor, options.prior, options.width, options.min_match,
                options.len_bias, options.min_continuation, token_ids, parents, confidence, count,
            )
        )  # fmt: skip

    def advance(self, cursor: Cursor, tokens: npt.NDArray[np.integer]) -> Cursor:
        """Move a cursor of another text over its next tokens, integers [n], amortised O(1) each.

        A cursor stays valid while the automaton grows.
        """
        # A fresh copy: numba would compile a second version for read-only arrays.
        state, length = _advance(
            self._text, self._links, self._clones, self._table, self._counts, cursor.state, cursor.length,
            np.array(tokens, dtype=np.int32),
        )  # fmt: skip
        return Cursor(int(state), int(length))

    def states(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Copies of the text with the separator before it, the links of its prefixes from state 0 on, and the links and
        lengths of the clones by row. The link of state 0 is that state."""
        size, rows = int(self._counts[_TOKENS]), int(self._counts[_CLONES])
        links = self._links[: size + 1].copy()
        links[0] = 0
        return self._text[:size].copy(), links, self._clones[:rows, _LINK].copy(), self._clones[:rows, _LENGTH].copy()

    def transitions(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Sources, tokens and targets of the transitions of clones and state 0, int32, in no order."""
        sources = ~np.arange(int(self._counts[_CLONES]), dtype=np.int32)
        inline = self._clones[: len(sources), _TOKEN] >= 0  # a separator is kept there too, and is no transition
        sources, clones = sources[inline], self._clones[: len(sources)][inline]
        slots = self._table[self._table[:, _SLOT_TARGET] != 0]
        return (
            np.concatenate([sources, slots[:, _SLOT_SOURCE]]),
            np.concatenate([clones[:, _TOKEN], slots[:, _SLOT_TOKEN]]),
            np.concatenate([clones[:, _NEXT], slots[:, _SLOT_TARGET]]),
        )

    def _take(self, tokens: npt.NDArray[np.integer]) -> None:
        """Copy tokens behind the text, where the kernels find them."""
        _check_ids(tokens, SEPARATOR)
        size = len(self) + 1
        self._reserve(size + len(tokens) + 1)
        self._text[size : size + len(tokens)] = tokens

    def _reserve(self, count: int) -> None:
        """Room for a text of `count` tokens, the separators before and behind it included."""
        size = len(self) + 1
        if count > MAX_TOKENS:
            raise ValueError(f"tokens would be {count}; one automaton holds {MAX_TOKENS}")
        if count > len(self._text):
            room = max(count, size + size // 8) + 16
            self._text = _resized(self._text, size, room)
            self._links = _resized(self._links, size + 1, room + 1)


def warm_up() -> None:
    """Compile the kernels of one growing text, or load them from numba's cache, so that no request pays for it."""
    automaton = SuffixAutomaton()
    tokens = np.array([1, 2, 1, 2, 3], dtype=np.int32)
    automaton.extend(tokens)
    automaton.extend_and_draft(tokens, 4, BranchOptions(np.full(4, 0.5, np.float32), 0.1))
    automaton.advance(Cursor(), tokens)


def warm_up_documents() -> None:
    """Compile the kernels for documents that grow in pieces, or load them from numba's cache."""
    automaton = SuffixAutomaton()
    automaton.append(np.array([1, 2, 3], np.int32), np.array([3]), np.array([0]))
    cursor = automaton.advance(Cursor(), np.array([1], np.int32))
    automaton.grow_tree(
        cursor,
        TreeOptions(np.full(4, 0.5, np.float32)),
        token_ids=np.empty(2, np.int32),
        parents=np.empty(2, np.int32),
        confidence=np.empty(2, np.float32),
        count=0,
    )


def _check_ids(tokens: npt.NDArray[np.integer], lowest: int) -> None:
    if len(tokens) and (tokens.min() < lowest or tokens.max() > np.iinfo(np.int32).max):
        raise ValueError(f"tokens range from {tokens.min()} to {tokens.max()}; they must be in [{lowest}, 2**31 - 1]")


def _resized(array: Int32Array, used: int, room: int) -> Int32Array:
    larger = np.empty(room, np.int32)
    larger[:used] = array[:used]
    return larger


@njit(cache=True, nogil=True)
def _locate(table, state, token):  # type: ignore[no-untyped-def]
    """Slot of a transition, or ~(the free slot where it belongs). Linear probing over any table size."""
    size = np.uint64(table.shape[0])
    slot = np.int64(((hash_pair(state, token) >> np.uint64(32)) * size) >> np.uint64(32))
    while table[slot, _SLOT_TARGET] != 0:
        if table[slot, _SLOT_SOURCE] == state and table[slot, _SLOT_TOKEN] == token:
            return slot
        slot += 1
        if slot == table.shape[0]:
            slot = np.int64(0)
    return ~slot


@njit(cache=True, nogil=True)
def _with_room(table, used):  # type: ignore[no-untyped-def]
    """The table, or a larger copy when one more slot would fill it beyond four fifths."""
    size = table.shape[0]
    if (used + 1) * 5 <= size * 4:
        return table
    larger = np.zeros((size + size // 4 + 8, _SLOT_COLUMNS), np.int32)
    for slot in range(size):
        if table[slot, _SLOT_TARGET] != 0:
            larger[~_locate(larger, table[slot, _SLOT_SOURCE], table[slot, _SLOT_TOKEN])] = table[slot]
    return larger


@njit(cache=True, nogil=True)
def _end(clones, state):  # type: ignore[no-untyped-def]
    return state if state >= 0 else clones[~state, _END]


@njit(cache=True, nogil=True)
def _occurrences(clones, state):  # type: ignore[no-untyped-def]
    return np.int32(1) if state >= 0 else clones[~state, _COUNT]


@njit(cache=True, nogil=True)
def _following(text, place):  # type: ignore[no-untyped-def]
    """Where the text at `place` continues: at `place` itself, or where a link slot at that place points."""
    token = text[place]
    return np.int64(place) if token >= _NO_TOKEN else np.int64(_JUMP) - token


@njit(cache=True, nogil=True)
def _target(text, clones, table, size, state, token):  # type: ignore[no-untyped-def]
    """Where a state goes by a token >= 0, or 0 for nowhere."""
    if state > 0:
        if state >= size:
            return np.int32(0)
        place = _following(text, state)
        return np.int32(place + 1) if text[place] == token else np.int32(0)
    if state < 0:
        row = ~state
        if clones[row, _TOKEN] == token:
            return clones[row, _NEXT]
        if clones[row, _HEAD] < 0:
            return np.int32(0)
    slot = _locate(table, state, token)
    return table[slot, _SLOT_TARGET] if slot >= 0 else np.int32(0)


@njit(cache=True, nogil=True)
def _redirect(clones, table, state, token, target):  # type: ignore[no-untyped-def]
    """Change where an existing transition leads, from a clone or state 0."""
    if state < 0 and clones[~state, _TOKEN] == token:
        clones[~state, _NEXT] = target
    else:
        table[_locate(table, state, token), _SLOT_TARGET] = target


@njit(cache=True, nogil=True)
def _add(clones, table, counts, state, token, target):  # type: ignore[no-untyped-def]
    """A new transition, of a clone or state 0, in a table that has room."""
    chain = _NO_TOKEN
    if state < 0:
        chain = clones[~state, _HEAD]
        clones[~state, _HEAD] = token
    slot = ~_locate(table, state, token)
    table[slot, _SLOT_SOURCE] = state
    table[slot, _SLOT_TOKEN] = token
    table[slot, _SLOT_TARGET] = target
    table[slot, _SLOT_CHAIN] = chain
    counts[_SLOTS] += 1


@njit(cache=True, nogil=True)
def _extend(text, links, clones, table, counts, count, before):  # type: ignore[no-untyped-def]
    """Take in the next count tokens of the text, which go on from prefix state `before`.

    Returns clones and table, which may have been replaced.
    """
    before = np.int64(before)
    for _ in range(count):
        size = counts[_TOKENS]
        token = text[size]
        previous = before
        current = np.int32(size + 1)
        before = np.int64(current)
        counts[_TOKENS] = size + 1
        if token < 0:
            links[current] = 0
            continue

        # The suffixes of the text before this token are now seen at its end. Done one token late, so that a match
        # finds the occurrence before its own.
        state = links[previous]
        for _ in range(_REFRESHED_LINKS):
            if state == 0:
                break
            clones[~state, _END] = previous
            clones[~state, _COUNT] += 1
            state = clones[~state, _LINK]

        # Shorter and shorter suffixes get a transition to the new state, until one has a transition by this token.
        state = links[previous]
        target = np.int32(0)
        while state != _NO_STATE:
            target = _target(text, clones, table, size, state, token)
            if target != 0:
                break
            table = _with_room(table, counts[_SLOTS])
            _add(clones, table, counts, state, token, current)
            state = link_of(links, clones, state)
        if state == _NO_STATE:
            links[current] = 0
            continue
        length = length_of(clones, state) + 1
        if length == length_of(clones, target):
            links[current] = target
            continue

        # The target stands for longer strings too, which do not end here: split it.
        row = counts[_CLONES]
        if row == clones.shape[0]:
            larger = np.empty((row + row // 8 + 8, _CLONE_COLUMNS), np.int32)
            larger[:row] = clones
            clones = larger
        counts[_CLONES] = row + 1
        clone = np.int32(~row)
        clones[row, _LENGTH] = length
        clones[row, _END] = _end(clones, target)
        clones[row, _COUNT] = _occurrences(clones, target)
        clones[row, _HEAD] = _NO_TOKEN
        links[current] = clone
        if target > 0:
            place = _following(text, target)
            clones[row, _TOKEN] = text[place]
            clones[row, _NEXT] = place + 1
            clones[row, _LINK] = links[target]
            links[target] = clone
        else:
            clones[row, _TOKEN] = clones[~target, _TOKEN]
            clones[row, _NEXT] = clones[~target, _NEXT]
            clones[row, _LINK] = clones[~target, _LINK]
            clones[~target, _LINK] = clone
            by = clones[~target, _HEAD]
            while by >= 0:
                table = _with_room(table, counts[_SLOTS])
                slot = _locate(table, target, by)
                _add(clones, table, counts, clone, by, table[slot, _SLOT_TARGET])
                by = table[slot, _SLOT_CHAIN]
        while state != _NO_STATE and _target(text, clones, table, size, state, token) == target:
            _redirect(clones, table, state, token, clone)
            state = link_of(links, clones, state)
    text[counts[_TOKENS]] = SEPARATOR
    return clones, table


@njit(cache=True, nogil=True)
def _append(text, links, clones, table, counts, tokens, lengths, after, ends):  # type: ignore[no-untyped-def]
    """Take in pieces of documents. Fills ends; returns clones and table, which may have been replaced."""
    begin = 0
    for piece in range(len(lengths)):
        size = counts[_TOKENS]
        before = after[piece] if after[piece] >= 0 else ends[~after[piece]]
        if before == 0 or text[before] != SEPARATOR:
            before = size
        elif before == size - 1:
            size = before  # its slot is the last of the text: go on in place
            counts[_TOKENS] = size
        else:
            text[before] = _JUMP - size
        end = size + lengths[piece]
        text[size:end] = tokens[begin : begin + lengths[piece]]
        clones, table = _extend(text, links, clones, table, counts, lengths[piece], before)
        begin += lengths[piece]
        ends[piece] = end
        links[end + 1] = 0
        counts[_TOKENS] = end + 1
    return clones, table


@njit(cache=True, nogil=True)
def _advance(text, links, clones, table, counts, state, length, tokens):  # type: ignore[no-untyped-def]
    size = counts[_TOKENS]
    state = np.int32(state)
    # The state may have been split since: the matched string then belongs to a suffix link.
    while state != 0 and length_of(clones, link_of(links, clones, state)) >= length:
        state = link_of(links, clones, state)
    for token in tokens:
        if token < 0:
            state = np.int32(0)
            length = 0
            continue
        while True:
            target = _target(text, clones, table, size, state, token)
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
def _continuations(text, clones, table, state, begins, times):  # type: ignore[no-untyped-def]
    """Where a clone was last followed by each of its tokens, the last one of all first, and how often by each.

    Returns how many there are; looks at a few transitions only.
    """
    begins[0] = clones[~state, _END]
    last = text[begins[0]]
    times[0] = _occurrences(clones, _target(text, clones, table, len(text), state, last))
    count = 1
    token = clones[~state, _TOKEN]
    target = clones[~state, _NEXT]
    following = clones[~state, _HEAD]
    for _ in range(1 + _BRANCH_TRANSITIONS):
        if token >= 0 and token != last:
            begins[count] = np.int64(_end(clones, target)) - 1
            times[count] = _occurrences(clones, target)
            count += 1
        if following < 0:
            break
        slot = _locate(table, state, following)
        token = following
        target = table[slot, _SLOT_TARGET]
        following = table[slot, _SLOT_CHAIN]
    return count


@njit(cache=True, nogil=True)
def _extend_and_draft(  # type: ignore[no-untyped-def]
    text, links, clones, table, counts, count, acceptance, floor, len_threshold, len_bias, alpha, max_branches,
    by_frequency, token_ids, parents, confidence,
):  # fmt: skip
    clones, table = _extend(text, links, clones, table, counts, count, counts[_TOKENS])
    size = counts[_TOKENS]
    state = links[size]
    if state == 0 or clones[~state, _LENGTH] - len_bias < len_threshold:
        return clones, table, 0
    length = clones[~state, _LENGTH] - len_bias
    room = len(token_ids)
    if 0 <= alpha * length < room:
        room = min(room, 1 + int(alpha * length))
    most = len(acceptance) - 1
    if room == 0 or text[clones[~state, _END]] < 0:
        return clones, table, 0

    # Branches that begin with different tokens: what followed the match, and what followed a shorter suffix.
    begins = np.zeros(MAX_BRANCHES, np.int64)
    lengths = np.full(MAX_BRANCHES, length, np.int64)
    sure = np.zeros(MAX_BRANCHES, np.float32)
    times = np.zeros(MAX_BRANCHES, np.int64)
    found = _continuations(text, clones, table, state, begins, times)
    total = max(times.sum(), np.int64(clones[~state, _COUNT]))
    left = np.float32(1)
    branches = 0
    for _ in range(min(found, max(max_branches - 1, min(max_branches, 2)))):
        # The last one of all comes first in any case unless frequency decides.
        best = branches
        if branches > 0 or by_frequency:
            for other in range(branches + 1, found):
                more = times[other] - times[best] if by_frequency else 0
                if more > 0 or (more == 0 and begins[other] > begins[best]):
                    best = other
        begins[branches], begins[best] = begins[best], begins[branches]
        times[branches], times[best] = times[best], times[branches]
        step = acceptance[min(length, most)]
        if by_frequency:
            sure[branches] = step * np.float32(times[branches]) / np.float32(total)
        else:
            sure[branches] = left * step * (_SECOND_CHOICE if branches else np.float32(1))
        left -= sure[branches]
        branches += 1
    if branches < max_branches:
        for _ in range(_BRANCH_LINKS):
            state = clones[~state, _LINK]
            if state == 0 or clones[~state, _LENGTH] - len_bias < len_threshold:
                break
            begin = np.int64(clones[~state, _END])
            token = text[begin]
            is_new = token >= 0
            for branch in range(branches):
                is_new = is_new and token != text[begins[branch]]
            if is_new:
                begins[branches] = begin
                lengths[branches] = clones[~state, _LENGTH] - len_bias
                sure[branches] = left * acceptance[min(lengths[branches], most)]
                branches += 1
                break

    # Confidence falls along every branch: always take the surest next node, until none is sure enough or room is used.
    depths = np.zeros(MAX_BRANCHES, np.int64)
    last = np.full(MAX_BRANCHES, -1, np.int32)
    taken = 0
    while taken < room:
        best = 0
        for branch in range(1, branches):
            if sure[branch] > sure[best]:
                best = branch
        if sure[best] < floor or sure[best] == 0:
            break
        begin = begins[best]
        token_ids[taken] = text[begin + depths[best] % (size - begin)]
        parents[taken] = last[best]
        confidence[taken] = sure[best]
        last[best] = taken
        depths[best] += 1
        if text[begin + depths[best] % (size - begin)] < 0:
            sure[best] = 0
        sure[best] *= acceptance[min(lengths[best] + depths[best], most)]
        taken += 1
    return clones, table, taken


@njit(cache=True, nogil=True)
def _add_candidates(  # type: ignore[no-untyped-def]
    text, clones, table, state, length, node, sure, acceptance, prior, width, ids, scores, used
):  # fmt: skip
    """Put the most frequent continuations of a state behind the first `used` candidates, of equal ones the newest.

    ids int32 [candidates, 3]: node that would be the parent, token, state. Returns how many candidates there are then.
    """
    step = sure * acceptance[min(length, len(acceptance) - 1)] / (_occurrences(clones, state) + prior / length)
    if state > 0:
        place = _following(text, state)
        if text[place] >= 0:
            ids[used, 0], ids[used, 1], ids[used, 2] = node, text[place], place + 1
            scores[used] = step
            used += 1
        return used
    first = used
    token = clones[~state, _TOKEN]
    target = clones[~state, _NEXT]
    following = clones[~state, _HEAD]
    for _ in range(_SCANNED_TRANSITIONS):
        if token >= 0:
            score = np.float32(step * min(_occurrences(clones, target), _occurrences(clones, state)))
            slot = used
            while slot > first and (
                score > scores[slot - 1]
                or (score == scores[slot - 1] and _end(clones, target) > _end(clones, ids[slot - 1, 2]))
            ):
                slot -= 1
            if slot < first + width:
                last = min(used, first + width - 1)
                for other in range(last, slot, -1):
                    ids[other] = ids[other - 1]
                    scores[other] = scores[other - 1]
                ids[slot, 0], ids[slot, 1], ids[slot, 2] = node, token, target
                scores[slot] = score
                used = last + 1
        if following < 0:
            break
        where = _locate(table, state, following)
        token = following
        target = table[where, _SLOT_TARGET]
        following = table[where, _SLOT_CHAIN]
    return used


@njit(cache=True, nogil=True)
def _grow_tree(  # type: ignore[no-untyped-def]
    text, links, clones, table, state, length, acceptance, floor, prior, width, min_match, len_bias,
    min_continuation, token_ids, parents, confidence, count,
):  # fmt: skip
    """Like the static automaton's, but the most frequent continuations are searched during the walk."""
    room = len(token_ids)
    state = np.int32(state)
    width = min(width, TOP_CONTINUATIONS)
    depths, at_depth = depths_of(parents, count, room)
    ids = np.empty(((room + 1) * width, 3), np.int32)
    scores = np.empty((room + 1) * width, np.float32)
    for fallback in range(1 + FALLBACKS):
        length -= len_bias
        if state == 0 or length < min_match or count >= room or (fallback > 0 and count >= min_continuation):
            break
        known = count
        left = confidence_left(parents, confidence, count)
        used = _add_candidates(text, clones, table, state, length, -1, left, acceptance, prior, width, ids, scores, 0)
        while count < room and used > 0:
            best = np.argmax(scores[:used])
            score = scores[best]
            if score <= 0 or score < floor:
                break
            parent, token, target = ids[best, 0], ids[best, 1], ids[best, 2]
            used -= 1
            ids[best] = ids[used]
            scores[best] = scores[used]
            depth = depths[parent + 1] + 1
            child = place_node(
                parent, token, score, known, width, token_ids, parents, confidence, depths, at_depth, count
            )  # fmt: skip
            if child < 0:
                continue
            count = max(count, child + 1)
            if used + width <= len(scores):
                used = _add_candidates(
                    text, clones, table, target, length + depth, child, score, acceptance, prior, width, ids, scores,
                    used,
                )  # fmt: skip
        state = link_of(links, clones, state)
        length = np.int64(length_of(clones, state))
    return count
