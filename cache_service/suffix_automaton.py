"""An online suffix automaton over token ids in flat arrays, compiled with numba.

The automaton of a text accepts exactly its substrings (Blumer et al., "The smallest automaton recognizing the subwords
of a text", Theoretical Computer Science 40, 1985). Here it answers one question after every token: what is the longest
suffix of the text that also occurred earlier, and what followed it there? That suffix is the suffix link of the state
of the whole text, so no second cursor is needed.

Layout. State 0 is the empty string, state i > 0 the text's first i tokens: its length is i, and its first transition,
by text[i] to state i + 1, needs no storage. So such a state costs a token and a link, 8 bytes. All other states are
clones, written ~row, and have a row of 24 bytes with one transition inline. Nine states of ten have a single
transition; the others live in one open-addressing table of 16-byte slots. On token streams that is 24-36 bytes a token.

Not thread-safe: one writer, and no reader while it writes. The kernels release the GIL.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

SEPARATOR = -1
"""A token that ends a document: no match and no draft ever crosses it."""

MAX_TOKENS = 2**31 - 2**16
"""Tokens one automaton can hold; state ids are int32."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_NO_STATE = np.int32(-(2**31))  # link of state 0
_NO_TOKEN = np.int32(-1)

# Columns of a clone's row.
_LINK, _LENGTH, _TOKEN, _NEXT, _END, _HEAD = 0, 1, 2, 3, 4, 5
_CLONE_COLUMNS = 6
# _TOKEN, _NEXT: the inline transition. _END: how many tokens the text had when the state's strings were last seen.
# _HEAD: token of the first transition kept in the table, or _NO_TOKEN.

# Columns of a table slot; a slot is free while its target is 0, since no transition leads to the empty string.
_SLOT_SOURCE, _SLOT_TOKEN, _SLOT_TARGET, _SLOT_CHAIN = 0, 1, 2, 3
_SLOT_COLUMNS = 4
# _SLOT_CHAIN: token of the next transition of the same state, or _NO_TOKEN. A clone's chain starts in its row, that of
# any other state (rare: a whole prefix of the text must have recurred) in a slot of its own with token _NO_TOKEN.

# Entries of the counters.
_TOKENS, _CLONES, _SLOTS = 0, 1, 2

# A state's last occurrence is refreshed for this many states along the suffix links of each position: text has chains
# of 3-6, so there it is exact; only repetitive text has longer ones, and the bound keeps it linear.
_REFRESHED_LINKS = 8

# Shorter suffixes looked at for a continuation that begins with another token.
_BRANCH_LINKS = 8


class Cursor(NamedTuple):
    """Where a foreign text stands in an automaton: its longest suffix that occurs there has this state and length."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """Suffix automaton of a growing text. Tokens are int32, >= 0; SEPARATOR ends a document."""

    __slots__ = ("_clones", "_counts", "_links", "_table", "_text")

    def __init__(self, reserve: int = 0) -> None:
        """reserve: tokens to make room for at once; any number may follow."""
        size = max(reserve, 16)
        self._text: Int32Array = np.empty(size, np.int32)
        self._links: Int32Array = np.empty(size + 1, np.int32)
        self._links[0] = _NO_STATE
        self._clones: Int32Array = np.empty((size // 4 + 4, _CLONE_COLUMNS), np.int32)
        self._table: Int32Array = np.zeros((size // 2 + 8, _SLOT_COLUMNS), np.int32)
        self._counts: Int64Array = np.zeros(3, np.int64)

    def __len__(self) -> int:
        """Tokens so far, separators included."""
        return int(self._counts[_TOKENS])

    @property
    def num_states(self) -> int:
        """At most 2 n - 1 for n >= 2 tokens without separators."""
        return 1 + len(self) + int(self._counts[_CLONES])

    @property
    def num_transitions(self) -> int:
        """At most 3 n - 4 for n >= 3 tokens without separators. Takes O(n): a figure for tests and reports."""
        return int(_count_transitions(self._text, self._clones, self._table, self._counts))

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated, spare capacity included."""
        arrays = (self._text, self._links, self._clones, self._table, self._counts)
        return sum(array.nbytes for array in arrays)

    @property
    def tokens(self) -> Int32Array:
        """The text, a read-only view, int32 [n]. Valid until the next extend."""
        view = self._text[: len(self)]
        view.flags.writeable = False
        return view

    def extend(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append tokens, integers [n], amortised O(1) each. Raises ValueError for ids outside [-1, 2**31 - 1]."""
        self._take(tokens)
        self._clones, self._table = _extend(
            self._text, self._links, self._clones, self._table, self._counts, len(tokens)
        )

    def match(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred earlier in it, as (length, end), (0, 0) if there is none.

        text[end - length:end] equals the suffix, end < n, and text[end] is what followed. The occurrence is the most
        recent one (see _REFRESHED_LINKS), but the first one for a suffix that is a whole prefix of the text.
        """
        length, end = _match(self._links, self._clones, self._counts)
        return int(length), int(end)

    def extend_and_draft(
        self,
        tokens: npt.NDArray[np.integer],
        max_nodes: int,
        acceptance: Float32Array,
        floor: float,
    ) -> tuple[Int32Array, Int32Array, Float32Array]:
        """Append tokens and guess what comes next, in one kernel call.

        The guess is what followed the most recent earlier occurrence of the longest matching suffix, and as a second
        branch from the root what followed a shorter suffix where that began with another token. A continuation that
        reaches the end of the text goes on with its own start, as a period would.

        acceptance: float32 [m], m >= 1, in [0, 1]; acceptance[min(length, m - 1)] is the probability that the token
        after a match of that length is right. floor: nodes with less confidence are left out.
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
            acceptance,
            floor,
            token_ids,
            parents,
            confidence,
        )
        return token_ids[:count], parents[:count], confidence[:count]

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

    def continuation(self, state: int, count: int) -> Int32Array:
        """Up to count tokens that followed the last seen occurrence of a state, int32; stops at separator and end."""
        size = len(self)
        begin = state if state >= 0 else int(self._clones[~state, _END])
        following = self._text[begin : min(begin + max(count, 0), size)]
        stops = np.flatnonzero(following < 0)
        return following[: stops[0]].copy() if len(stops) else following.copy()

    def check_integrity(self) -> str | None:
        """What is wrong with the structure, in words, or None. O(n)."""
        code, where = _check(self._text, self._links, self._clones, self._table, self._counts)
        return None if code == 0 else f"{_FAULTS[code]} (at {where})"

    def _take(self, tokens: npt.NDArray[np.integer]) -> None:
        """Copy tokens behind the text, where the kernels find them."""
        count = len(tokens)
        size = len(self)
        if tokens.dtype != np.int32 and count and (tokens.min() < SEPARATOR or tokens.max() > np.iinfo(np.int32).max):
            raise ValueError(f"tokens range from {tokens.min()} to {tokens.max()}; they must be in [-1, 2**31 - 1]")
        if size + count > MAX_TOKENS:
            raise ValueError(f"tokens would be {size + count}; one automaton holds {MAX_TOKENS}")
        if size + count > len(self._text):
            room = max(size + count, size + size // 4) + 16
            self._text = _resized(self._text, size, room)
            self._links = _resized(self._links, size + 1, room + 1)
        self._text[size : size + count] = tokens


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, so that no request pays for it."""
    automaton = SuffixAutomaton()
    tokens = np.array([1, 2, 1, 2, 3], dtype=np.int32)
    automaton.extend(tokens)
    automaton.extend_and_draft(tokens, 4, np.full(4, 0.5, np.float32), 0.1)
    automaton.match()
    automaton.advance(Cursor(), tokens)


def _resized(array: Int32Array, used: int, room: int) -> Int32Array:
    larger = np.empty(room, np.int32)
    larger[:used] = array[:used]
    return larger


@njit(cache=True, nogil=True)
def _locate(table, state, token):  # type: ignore[no-untyped-def]
    """Slot of a transition, or ~(the free slot where it belongs). Linear probing over any table size."""
    size = np.uint64(table.shape[0])
    key = (np.uint64(np.uint32(state)) << np.uint64(32)) | np.uint64(np.uint32(token))
    key *= np.uint64(0x9E3779B97F4A7C15)
    key ^= key >> np.uint64(32)
    key *= np.uint64(0xD6E8FEB86659FD93)
    slot = np.int64(((key >> np.uint64(32)) * size) >> np.uint64(32))
    while table[slot, _SLOT_TARGET] != 0:
        if table[slot, _SLOT_SOURCE] == state and table[slot, _SLOT_TOKEN] == token:
            return slot
        slot += 1
        if slot == table.shape[0]:
            slot = np.int64(0)
    return ~slot


@njit(cache=True, nogil=True)
def _put(table, state, token, target, chain):  # type: ignore[no-untyped-def]
    slot = ~_locate(table, state, token)
    table[slot, _SLOT_SOURCE] = state
    table[slot, _SLOT_TOKEN] = token
    table[slot, _SLOT_TARGET] = target
    table[slot, _SLOT_CHAIN] = chain


@njit(cache=True, nogil=True)
def _with_room(table, used):  # type: ignore[no-untyped-def]
    """The table, or a larger copy when two more slots would fill it beyond four fifths."""
    size = table.shape[0]
    if (used + 2) * 5 <= size * 4:
        return table
    larger = np.zeros((size + size // 4 + 8, _SLOT_COLUMNS), np.int32)
    for slot in range(size):
        if table[slot, _SLOT_TARGET] != 0:
            _put(
                larger,
                table[slot, _SLOT_SOURCE],
                table[slot, _SLOT_TOKEN],
                table[slot, _SLOT_TARGET],
                table[slot, _SLOT_CHAIN],
            )
    return larger


@njit(cache=True, nogil=True)
def _length(clones, state):  # type: ignore[no-untyped-def]
    return state if state >= 0 else clones[~state, _LENGTH]


@njit(cache=True, nogil=True)
def _link(links, clones, state):  # type: ignore[no-untyped-def]
    return links[state] if state >= 0 else clones[~state, _LINK]


@njit(cache=True, nogil=True)
def _end(clones, state):  # type: ignore[no-untyped-def]
    return state if state >= 0 else clones[~state, _END]


@njit(cache=True, nogil=True)
def _head(clones, table, state):  # type: ignore[no-untyped-def]
    """Token of the first transition that a state has in the table, or _NO_TOKEN."""
    if state < 0:
        return clones[~state, _HEAD]
    slot = _locate(table, state, _NO_TOKEN)
    return table[slot, _SLOT_CHAIN] if slot >= 0 else _NO_TOKEN


@njit(cache=True, nogil=True)
def _target(text, clones, table, size, state, token):  # type: ignore[no-untyped-def]
    """Where a state goes by a token >= 0, or 0 for nowhere."""
    if state >= 0:
        if state < size and text[state] == token:
            return np.int32(state + 1)
    else:
        row = ~state
        if clones[row, _TOKEN] == token:
            return clones[row, _NEXT]
        if clones[row, _HEAD] < 0:
            return np.int32(0)
    slot = _locate(table, state, token)
    return table[slot, _SLOT_TARGET] if slot >= 0 else np.int32(0)


@njit(cache=True, nogil=True)
def _redirect(clones, table, state, token, target):  # type: ignore[no-untyped-def]
    """Change where an existing transition leads. That of a text state to its successor never changes."""
    if state < 0 and clones[~state, _TOKEN] == token:
        clones[~state, _NEXT] = target
    else:
        table[_locate(table, state, token), _SLOT_TARGET] = target


@njit(cache=True, nogil=True)
def _add(clones, table, counts, state, token, target):  # type: ignore[no-untyped-def]
    """A new transition beside a state's inline one; the table must have room for two slots."""
    if state < 0:
        _put(table, state, token, target, clones[~state, _HEAD])
        clones[~state, _HEAD] = token
        counts[_SLOTS] += 1
        return
    slot = _locate(table, state, _NO_TOKEN)
    if slot >= 0:
        first = table[slot, _SLOT_CHAIN]
        table[slot, _SLOT_CHAIN] = token
    else:
        first = _NO_TOKEN
        _put(table, state, _NO_TOKEN, np.int32(1), token)
        counts[_SLOTS] += 1
    _put(table, state, token, target, first)
    counts[_SLOTS] += 1


@njit(cache=True, nogil=True)
def _extend(text, links, clones, table, counts, count):  # type: ignore[no-untyped-def]
    """Take in the next count tokens of the text. Returns clones and table, which may have been replaced."""
    for _ in range(count):
        size = counts[_TOKENS]
        token = text[size]
        current = np.int32(size + 1)
        counts[_TOKENS] = size + 1
        if size == 0 or token < 0:
            links[current] = 0
            continue

        # The suffixes of the text before this token are now seen at its end. Done one token late, so that a match
        # finds the occurrence before its own.
        state = links[size]
        for _ in range(_REFRESHED_LINKS):
            if state == 0 or state == _NO_STATE:
                break
            if state < 0:
                clones[~state, _END] = size
                state = clones[~state, _LINK]
            else:
                state = links[state]

        # Shorter and shorter suffixes get a transition to the new state, until one has a transition by this token.
        state = links[size]
        target = np.int32(0)
        while state != _NO_STATE:
            target = _target(text, clones, table, size, state, token)
            if target != 0:
                break
            table = _with_room(table, counts[_SLOTS])
            _add(clones, table, counts, state, token, current)
            state = _link(links, clones, state)
        if state == _NO_STATE:
            links[current] = 0
            continue
        length = _length(clones, state) + 1
        if length == _length(clones, target):
            links[current] = target
            continue

        # The target stands for longer strings too, which do not end here: split it.
        row = counts[_CLONES]
        if row == clones.shape[0]:
            larger = np.empty((row + row // 4 + 8, _CLONE_COLUMNS), np.int32)
            larger[:row] = clones
            clones = larger
        counts[_CLONES] = row + 1
        clone = np.int32(~row)
        clones[row, _LENGTH] = length
        clones[row, _END] = _end(clones, target)
        clones[row, _HEAD] = _NO_TOKEN
        if target >= 0:
            clones[row, _TOKEN] = text[target]
            clones[row, _NEXT] = target + 1
            clones[row, _LINK] = links[target]
            links[target] = clone
        else:
            clones[row, _TOKEN] = clones[~target, _TOKEN]
            clones[row, _NEXT] = clones[~target, _NEXT]
            clones[row, _LINK] = clones[~target, _LINK]
            clones[~target, _LINK] = clone
        links[current] = clone
        by = _head(clones, table, target)
        while by >= 0:
            table = _with_room(table, counts[_SLOTS])
            slot = _locate(table, target, by)
            following = table[slot, _SLOT_CHAIN]
            _add(clones, table, counts, clone, by, table[slot, _SLOT_TARGET])
            by = following
        while state != _NO_STATE and _target(text, clones, table, size, state, token) == target:
            _redirect(clones, table, state, token, clone)
            state = _link(links, clones, state)
    return clones, table


@njit(cache=True, nogil=True)
def _match(links, clones, counts):  # type: ignore[no-untyped-def]
    size = counts[_TOKENS]
    if size == 0:
        return np.int64(0), np.int64(0)
    state = links[size]
    return np.int64(_length(clones, state)), np.int64(_end(clones, state))


@njit(cache=True, nogil=True)
def _advance(text, links, clones, table, counts, state, length, tokens):  # type: ignore[no-untyped-def]
    size = counts[_TOKENS]
    state = np.int32(state)
    # The state may have been split since: the matched string then belongs to a suffix link.
    while state != 0 and _length(clones, _link(links, clones, state)) >= length:
        state = _link(links, clones, state)
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
            state = _link(links, clones, state)
            length = _length(clones, state)
    return np.int64(state), np.int64(length)


@njit(cache=True, nogil=True)
def _extend_and_draft(  # type: ignore[no-untyped-def]
    text, links, clones, table, counts, count, acceptance, floor, token_ids, parents, confidence
):
    clones, table = _extend(text, links, clones, table, counts, count)
    size = counts[_TOKENS]
    room = len(token_ids)
    if size == 0 or room == 0:
        return clones, table, 0
    state = links[size]
    if state == 0:
        return clones, table, 0
    most = len(acceptance) - 1

    # The longest match, and the longest shorter one whose continuation begins otherwise.
    length = np.int64(_length(clones, state))
    begin = np.int64(_end(clones, state))
    if text[begin] < 0:
        return clones, table, 0
    other_length = np.int64(0)
    other_begin = np.int64(0)
    for _ in range(_BRANCH_LINKS):
        state = _link(links, clones, state)
        if state == 0 or state == _NO_STATE:
            break
        candidate = np.int64(_end(clones, state))
        if text[candidate] >= 0 and text[candidate] != text[begin]:
            other_length = np.int64(_length(clones, state))
            other_begin = candidate
            break

    # Both branches lose confidence with depth: take the surer next node of the two until the room is used.
    depth, other_depth = 0, 0
    parent, other_parent = -1, -1
    sure = acceptance[min(length, most)]
    other_sure = np.float32(0)
    if other_length > 0:
        other_sure = (np.float32(1) - sure) * acceptance[min(other_length, most)]
    taken = 0
    while taken < room:
        if sure >= other_sure:
            if sure < floor:
                break
            token_ids[taken] = text[begin + depth % (size - begin)]
            parents[taken] = parent
            confidence[taken] = sure
            parent = taken
            depth += 1
            if text[begin + depth % (size - begin)] < 0:
                sure = np.float32(0)
            sure *= acceptance[min(length + depth, most)]
        else:
            if other_sure < floor:
                break
            token_ids[taken] = text[other_begin + other_depth % (size - other_begin)]
            parents[taken] = other_parent
            confidence[taken] = other_sure
            other_parent = taken
            other_depth += 1
            if text[other_begin + other_depth % (size - other_begin)] < 0:
                other_sure = np.float32(0)
            other_sure *= acceptance[min(other_length + other_depth, most)]
        taken += 1
    return clones, table, taken


@njit(cache=True, nogil=True)
def _count_transitions(text, clones, table, counts):  # type: ignore[no-untyped-def]
    total = 0
    for position in range(counts[_TOKENS]):
        if text[position] >= 0:
            total += 1
    for row in range(counts[_CLONES]):
        if clones[row, _TOKEN] >= 0:
            total += 1
    for slot in range(table.shape[0]):
        if table[slot, _SLOT_TARGET] != 0 and table[slot, _SLOT_TOKEN] >= 0:
            total += 1
    return total


_FAULTS = {
    1: "counters exceed their arrays",
    2: "a suffix link leads to no state",
    3: "a suffix link leads to a string that is not shorter",
    4: "a suffix link leads to a string that is not a suffix",
    5: "a last occurrence lies outside the text",
    6: "a transition leads to no state",
    7: "a transition leads to a string that is not longer",
    8: "a transition leads to a string that does not end with its token",
    9: "a transition cannot be found under its own key",
    10: "the table does not hold as many slots as counted",
    11: "a chain of transitions is broken or does not hold all of them",
}
_COMPARED_TOKENS = 32  # of a string, when an occurrence is compared with another


@njit(cache=True, nogil=True)
def _is_state(counts, state):  # type: ignore[no-untyped-def]
    return state <= counts[_TOKENS] if state >= 0 else ~state < counts[_CLONES]


@njit(cache=True, nogil=True)
def _check(text, links, clones, table, counts):  # type: ignore[no-untyped-def]
    size = counts[_TOKENS]
    rows = counts[_CLONES]
    if size > len(text) or size >= len(links) or rows > clones.shape[0] or counts[_SLOTS] > table.shape[0]:
        return 1, size
    for row in range(rows):
        if clones[row, _END] < clones[row, _LENGTH] or clones[row, _END] > size:
            return 5, ~row
    for index in range(1, size + 1 + rows):
        state = index if index <= size else ~(index - size - 1)
        link = _link(links, clones, state)
        if link == _NO_STATE or not _is_state(counts, link):
            return 2, state
        shorter = _length(clones, link)
        if shorter >= _length(clones, state):
            return 3, state
        for back in range(1, min(shorter, _COMPARED_TOKENS) + 1):
            if text[_end(clones, link) - back] != text[_end(clones, state) - back]:
                return 4, state

    slots = 0
    headed = 0
    for slot in range(table.shape[0]):
        if table[slot, _SLOT_TARGET] != 0:
            slots += 1
            source = table[slot, _SLOT_SOURCE]
            if not _is_state(counts, source) or _locate(table, source, table[slot, _SLOT_TOKEN]) != slot:
                return 9, slot
            if table[slot, _SLOT_TOKEN] < 0:
                headed += 1
    if slots != counts[_SLOTS]:
        return 10, slots
    chained = 0
    for index in range(size + 1 + rows):
        state = index if index <= size else ~(index - size - 1)
        token = _head(clones, table, state)
        inline = state < 0
        while inline or token >= 0:
            if inline:
                by, target = clones[~state, _TOKEN], clones[~state, _NEXT]
            else:
                slot = _locate(table, state, token)
                if slot < 0 or chained > slots:
                    return 11, state
                by, target = token, table[slot, _SLOT_TARGET]
                token = table[slot, _SLOT_CHAIN]
                chained += 1
            inline = False
            if target == 0 or not _is_state(counts, target):
                return 6, state
            if _length(clones, target) <= _length(clones, state):
                return 7, state
            if text[_end(clones, target) - 1] != by:
                return 8, state
    if chained + headed != slots:
        return 11, size
    return 0, 0
