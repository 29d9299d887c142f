"""A table of the target's next-token probabilities by context, the last 0 to 4 tokens; compiled with numba.

Every row that a target computes tells how probable each next token is, not only which token was emitted. The table
sums these probabilities by context, and predicts from a mixture of all known contexts, the longest first
(interpolation as in Jelinek and Mercer, "Interpolated estimation of Markov source parameters from sparse data", 1980).
Plain n-gram counts are the special case in which every row is certain of one token.

Layout. Flat arrays, 64 bytes per context: a 64-bit hash of its tokens, up to 8 successors with summed probability, the
number of rows added, the number of drafted tokens accepted there, and when it was last used. Buckets have 8 slots. A
context can only be in the bucket that its hash names, so a lookup reads one cache line of keys and never probes
further. In a full bucket, the least useful context is evicted. So there are no tombstones, and the size is fixed until
`grow` is called. Counts are bounded, so that older rows fade.

A growing table moves some thousand slots with each call to one of twice its size. Rows learnt meanwhile for moved
contexts go into both, and the larger table replaces the smaller one when all slots are moved. Moving all slots at once
would take milliseconds, mostly for memory that is touched for the first time.

A context of two or more tokens is stored only if the context one token shorter was known before: until that one recurs,
both would predict the same, and most contexts never recur. On greedy answers this halves the contexts, with the same
drafts.

Tables merge by addition, so replicas may exchange their counts in any order. The order makes no difference at all where
no context has more than 8 successors, fades, or is evicted.

Not thread-safe: one writer, and no reader while it writes. The kernels release the GIL.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from cache_service.splitmix64 import STEP, finalize_uint64

MAX_ORDER = 4
"""Tokens of the longest context."""

MAX_SUCCESSORS = 8
"""Successors of one context."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

SLOT_BYTES = 64
"""Bytes of one context."""

_BUCKET = 8  # slots: their keys fill one cache line
_UNIT = 2048  # probability 1, and one row, in masses and counts
_MOST = 65_535  # what a mass or count can hold

_NO_TOKENS = np.uint64(0x2545F4914F6CDD1D)  # hash of the context of no tokens

MIN_BYTES = _BUCKET * SLOT_BYTES
"""Smallest size of a table."""

MAX_BYTES = 2**32 * MIN_BYTES
"""Largest size of a table: 32 bits of the hash name the bucket."""

# Columns of a slot's use.
_COUNT, _EARNED, _SEEN = 0, 1, 2
_USE_COLUMNS = 4  # the last one is spare: it makes a slot 64 bytes

# Rows that one accepted token weighs, when a context is to be evicted.
_EARNED_WEIGHT = 4

# Entries of the counters.
_CONTEXTS, _CLOCK, _SINCE_TICK, _EVICTED = 0, 1, 2, 3
_COUNTERS = 4
# _CLOCK: ticks when a quarter of the slots has been filled anew; an unused context's utility halves with every tick.

# A context of k tokens and n rows gets the share n / (n + hesitation[k]) of what longer contexts leave of the mixture,
# and remembers about window[k] rows. Both are small because a row holds a whole distribution, and recent rows of the
# same text predict best. Tuned on a replay of 10 greedy answers of SmolLM2-135M-Instruct to Spec-Bench prompts, with
# the rows of rejected drafts. The window of the empty context matters most: with 64, 2 to 4 % fewer tokens a round are
# drafted than with 16; without that context, a tenth of a token less.
_HESITATION = np.array([4.0, 0.5, 0.5, 0.5, 0.5], dtype=np.float32)
_WINDOW = np.array([16, 8, 8, 8, 8], dtype=np.int64)

_MAGIC = b"PACENGRM"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQI")  # magic, version, order, entries, CRC-32 of what follows
HEADER_BYTES = _HEADER.size

# Slots moved by each call while a table grows, and more for each row or context in the call, so that the smaller table
# does not overflow meanwhile.
_MOVED_AT_ONCE = 4096
_MOVED_BY_ROW = 4
ENTRY_BYTES = 8 + 4 * MAX_SUCCESSORS + 2 * MAX_SUCCESSORS + 2 + 2
"""Size of one context in an export."""


class Entries(NamedTuple):
    """Copies of contexts, for deltas and parts."""

    keys: npt.NDArray[np.uint64]  # [n]
    tokens: Int32Array  # [n, 8]
    masses: npt.NDArray[np.uint16]  # [n, 8]; 0: no successor here
    use: npt.NDArray[np.uint16]  # [n, 2]: rows in 1/2048, earned tokens

    def rows(self, which: slice | npt.NDArray[np.int64]) -> Entries:
        return Entries(self.keys[which], self.tokens[which], self.masses[which], self.use[which])


def at_most(entries: Entries, num_rows: float) -> Entries:
    """The same contexts, with counts scaled down to at most `num_rows` rows each."""
    count = entries.use[:, _COUNT].astype(np.int64)
    most = np.minimum(count, max(1, round(num_rows * _UNIT)))
    masses = (entries.masses * most[:, None] // np.maximum(count, 1)[:, None]).astype(np.uint16)
    use = np.stack([most.astype(np.uint16), entries.use[:, _EARNED]], axis=1)
    return Entries(entries.keys, entries.tokens, masses, use)


class SoftNgramTable:
    """Soft n-gram counts in a number of bytes that only `grow` changes. Tokens are int32, >= 0."""

    __slots__ = (
        "__weakref__", "_counters", "_delta", "_keys", "_larger", "_masses", "_num_moved", "_order", "_tokens", "_use",
    )  # fmt: skip

    def __init__(self, budget_bytes: int, order: int = 3, *, delta_bytes: int = 0) -> None:
        """budget_bytes: for all contexts, including delta_bytes for what was learnt since `take_delta` (0: no delta);
        order: tokens of the longest context. Raises ValueError."""
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order is {order}; it must be in [1, {MAX_ORDER}]")
        if delta_bytes != 0 and delta_bytes < MIN_BYTES:
            raise ValueError(f"delta_bytes is {delta_bytes}; it must be 0 or at least {MIN_BYTES}")
        if not MIN_BYTES <= budget_bytes - delta_bytes <= MAX_BYTES:
            raise ValueError(
                f"budget_bytes is {budget_bytes}; less {delta_bytes} delta_bytes it must be in"
                f" [{MIN_BYTES}, {MAX_BYTES}]"
            )
        slots = (budget_bytes - delta_bytes) // MIN_BYTES * _BUCKET
        self._order = order
        self._keys = np.zeros(slots, np.uint64)
        self._tokens = np.zeros((slots, MAX_SUCCESSORS), np.int32)
        self._masses = np.zeros((slots, MAX_SUCCESSORS), np.uint16)
        self._use = np.zeros((slots, _USE_COLUMNS), np.uint16)
        self._counters = np.zeros(_COUNTERS, np.int64)
        self._delta = SoftNgramTable(delta_bytes, order) if delta_bytes else None
        self._larger: SoftNgramTable | None = None  # replaces this table when all slots are moved
        self._num_moved = 0  # slots

    def __len__(self) -> int:
        """Contexts held."""
        return int(self._counters[_CONTEXTS])

    @property
    def num_slots(self) -> int:
        """Capacity in contexts, if they are spread evenly over the buckets."""
        return len(self._keys)

    @property
    def order(self) -> int:
        return self._order

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated; pages that were never touched take no memory."""
        return self.num_slots * SLOT_BYTES + sum(
            other.memory_bytes for other in (self._delta, self._larger) if other is not None
        )

    @property
    def is_growing(self) -> bool:
        return self._larger is not None

    def learn(
        self,
        contexts: npt.NDArray[np.integer],
        token_ids: npt.NDArray[np.integer],
        probs: npt.NDArray[np.floating],
        weight: float = 1.0,
        *,
        for_export: bool = True,
    ) -> None:
        """Add rows. contexts int [rows, width]: the last tokens, oldest first, -1 where there are none; token_ids and
        probs [rows, k]: successors, most probable first, of which those beyond a sum of 1 and ids below 0 are ignored;
        weight: in (0, 1], rows that each counts for; for_export: also add them to the delta. Raises ValueError."""
        shapes = contexts.shape, token_ids.shape, probs.shape
        if [len(shape) for shape in shapes] != [2, 2, 2] or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
            raise ValueError(f"contexts, token_ids and probs are {shapes}; they must be (n, w), (n, k) and (n, k)")
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight is {weight}; it must be in (0, 1]")
        # Fresh copies: numba would compile another version for other layouts and read-only arrays.
        rows = np.array(contexts, np.int32, order="C"), np.array(token_ids, np.int32, order="C")
        mass = np.array(probs, np.float32, order="C")
        units = max(1, round(_UNIT * weight))
        orders = np.full(len(contexts), -1, np.int64)
        _learn(*self._arrays, *rows, mass, units, self._order, orders, self.num_slots)
        if self._delta is not None and for_export:
            _learn(*self._delta._arrays, *rows, mass, units, self._order, orders, self._delta.num_slots)
        if self._larger is not None:
            _learn(*self._larger._arrays, *rows, mass, units, self._order, orders, 2 * self._num_moved)
            self._move_some(self._larger, len(contexts))

    def grow(self) -> None:
        """Begin to double the capacity; every later `learn` and `merge_entries` moves some slots. The delta keeps its
        size. No effect while the table grows already. Raises ValueError beyond MAX_BYTES."""
        if self._larger is not None:
            return
        num_bytes = 2 * len(self._keys) * SLOT_BYTES
        if num_bytes > MAX_BYTES:
            raise ValueError(f"twice {num_bytes // 2} bytes are too many; the most is {MAX_BYTES}")
        self._larger, self._num_moved = SoftNgramTable(num_bytes, self._order), 0
        self._larger._counters[_CLOCK] = self._counters[_CLOCK]

    def finish_growth(self) -> None:
        """Move all remaining slots at once."""
        while self._larger is not None:
            self._move_some(self._larger, 0)

    def _move_some(self, larger: SoftNgramTable, num_rows: int) -> None:
        wanted = self._num_moved + _MOVED_AT_ONCE + _MOVED_BY_ROW * num_rows
        end = min(len(self._keys), wanted + -wanted % _BUCKET)  # whole buckets: kernels compare buckets with it
        arrays = self._keys, self._tokens, self._masses, self._use
        _spread(self._num_moved, end, *arrays, *larger._arrays)
        self._num_moved = end
        counters = self._counters.copy()  # both use one clock
        counters[_CONTEXTS] = len(larger)
        larger._counters[:] = counters
        if end == len(self._keys):
            self._keys, self._tokens, self._masses, self._use, self._counters = larger._arrays
            self._larger = None

    def draft(
        self, last_tokens: npt.NDArray[np.integer], max_nodes: int, floor: float = 0.0
    ) -> tuple[Int32Array, Int32Array, Float32Array]:
        """The most probable continuations of last_tokens (ints [n]; the last `order` are used) as a tree, most probable
        node first. floor: nodes less probable are left out.

        Returns token ids int32 [k], parents int32 [k] (-1: root) and confidence float32 [k], k <= max_nodes.
        """
        room = max(max_nodes, 0)
        token_ids = np.empty(room, np.int32)
        parents = np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        count = _draft(
            self._keys, self._tokens, self._masses, self._use, _HESITATION, self._last(last_tokens),
            float(floor), token_ids, parents, confidence,
        )  # fmt: skip
        return token_ids[:count], parents[:count], confidence[:count]

    def credit(self, tokens: npt.NDArray[np.integer], num_accepted: int) -> None:
        """Credit the contexts that predicted accepted draft tokens: the last num_accepted of tokens (ints [n]). The
        tokens before them are context."""
        accepted = max(0, min(num_accepted, len(tokens)))
        text = np.array(tokens[max(0, len(tokens) - accepted - self._order) :], np.int32)
        _credit(*self._arrays, text, accepted, self._order, self.num_slots)
        if self._larger is not None:
            _credit(*self._larger._arrays, text, accepted, self._order, 2 * self._num_moved)
        if self._delta is not None:  # their rows have just been learnt, so it has them
            _credit(*self._delta._arrays, text, accepted, self._order, self._delta.num_slots)

    def take_delta(self) -> SoftNgramTable | None:
        """A table of the counts that were learnt here (not merged) since the last call; None if there are none. Costs
        as much as creating an empty table. Counts that did not fit into delta_bytes are missing, the least used ones
        first."""
        delta = self._delta
        if delta is None or not len(delta):
            return None
        self._delta = SoftNgramTable(delta.memory_bytes, self._order)
        return delta

    @property
    def num_untaken(self) -> int:
        """Contexts in the delta."""
        return len(self._delta) if self._delta is not None else 0

    def merge_entries(self, entries: Entries) -> None:
        """Add contexts of a table of this order."""
        _merge(*self._arrays, *entries, self.num_slots)
        if self._larger is not None:
            _merge(*self._larger._arrays, *entries, 2 * self._num_moved)
            self._move_some(self._larger, len(entries.keys))

    def entries(self) -> Entries:
        """Copies of all contexts."""
        slots = np.flatnonzero(self._keys)
        use = np.ascontiguousarray(self._use[slots, :2])
        return Entries(self._keys[slots], self._tokens[slots], self._masses[slots], use)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self._keys, self._tokens, self._masses, self._use, self._counters

    def _last(self, tokens: npt.NDArray[np.integer]) -> Int32Array:
        """The last tokens, oldest first, int32 [order]; -1 where there are none."""
        last = np.full(self._order, -1, np.int32)
        known = tokens[-self._order :]
        last[self._order - len(known) :] = known
        return last


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, so that no request pays for it."""
    table = SoftNgramTable(2 * MIN_BYTES, 2, delta_bytes=MIN_BYTES)
    tokens = np.array([[1, 2], [2, 1]], np.int32)
    table.learn(tokens, tokens, np.full((2, 2), 0.5, np.float32))
    table.draft(tokens[0], 4)
    table.credit(tokens[0], 1)
    table.merge_entries(table.entries())
    table.grow()
    table.credit(tokens[0], 1)
    table.learn(tokens, tokens, np.full((2, 2), 0.5, np.float32))


def encode_entries(order: int, entries: Entries) -> bytes:
    """Contexts of a table of this order as bytes."""
    body = b"".join(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes() for array in entries)
    return _HEADER.pack(_MAGIC, _VERSION, order, len(entries.keys), zlib.crc32(body)) + body


def decode_entries(data: bytes, order: int, name: str = "delta") -> Entries:
    """Raises ValueError, which begins with `name`, for bytes that `encode_entries` did not make for this order."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{name}: {len(data)} bytes; the header alone has {_HEADER.size}")
    magic, version, found, count, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"{name}: begins with {magic!r}; a table of soft n-grams begins with {_MAGIC!r}")
    if version != _VERSION:
        raise ValueError(f"{name}: version is {version}; this program reads version {_VERSION}")
    if found != order:
        raise ValueError(f"{name}: order is {found}; this table's is {order}")
    if len(data) - _HEADER.size != count * ENTRY_BYTES:
        raise ValueError(f"{name}: {len(data)} bytes; {count} contexts take {_HEADER.size + count * ENTRY_BYTES}")
    if zlib.crc32(memoryview(data)[_HEADER.size :]) != checksum:
        raise ValueError(f"{name}: the checksum differs; the bytes were damaged")
    arrays = []
    offset = _HEADER.size
    for dtype, columns in (("<u8", 1), ("<i4", MAX_SUCCESSORS), ("<u2", MAX_SUCCESSORS), ("<u2", 2)):
        array = np.frombuffer(data, dtype, count * columns, offset).astype(np.dtype(dtype).newbyteorder("="))
        arrays.append(array if columns == 1 else array.reshape(count, columns))
        offset += count * columns * np.dtype(dtype).itemsize
    entries = Entries(*arrays)
    fault = _fault_of(entries)
    if fault is not None:
        raise ValueError(f"{name}: {fault}")
    return entries


def _fault_of(entries: Entries) -> str | None:
    """Why no table can hold these entries, or None."""
    named = entries.masses > 0
    if not entries.keys.all():
        return "a context has no hash"
    if (entries.tokens[named] < 0).any():
        return "a successor is below 0"
    if (entries.use[:, _COUNT] == 0).any():
        return "a context was never learnt"
    if (entries.masses > entries.use[:, :1]).any():
        return "a successor has more than all of its context's probability"
    ordered = np.sort(np.where(named, entries.tokens, -1 - np.arange(MAX_SUCCESSORS, dtype=np.int32)), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "a context names a successor twice"
    return None


@njit(cache=True, nogil=True, inline="always")
def _lengthened(key, token):  # type: ignore[no-untyped-def]
    """Hash of a context with one more token before it; never 0, which marks free slots."""
    key = finalize_uint64((key ^ np.uint64(np.uint32(token))) + np.uint64(STEP))
    return key if key != 0 else np.uint64(1)


@njit(cache=True, nogil=True, inline="always")
def _first_slot(keys, key):  # type: ignore[no-untyped-def]
    """First slot of the bucket that the hash names."""
    return np.int64(((key >> np.uint64(32)) * np.uint64(len(keys) // _BUCKET)) >> np.uint64(32)) * _BUCKET


@njit(cache=True, nogil=True, inline="always")
def _find(keys, key):  # type: ignore[no-untyped-def]
    """Slot of a context, or ~(first slot of its bucket)."""
    first = _first_slot(keys, key)
    for slot in range(first, first + _BUCKET):
        if keys[slot] == key:
            return slot
    return ~first


@njit(cache=True, nogil=True)
def _spread(  # type: ignore[no-untyped-def]
    first, end, keys, tokens, masses, use, new_keys, new_tokens, new_masses, new_use, new_counters
):
    """Copy the contexts of slots first to end into arrays twice as long. A bucket's contexts go to two buckets that get
    no others."""
    for slot in range(first, end):
        if keys[slot] != 0:
            place = ~_find(new_keys, keys[slot])
            while new_keys[place] != 0:
                place += 1
            new_keys[place] = keys[slot]
            new_counters[_CONTEXTS] += 1
            for i in range(MAX_SUCCESSORS):
                new_tokens[place, i] = tokens[slot, i]
                new_masses[place, i] = masses[slot, i]
            for i in range(_USE_COLUMNS):
                new_use[place, i] = use[slot, i]


@njit(cache=True, nogil=True)
def _claim(keys, masses, use, counters, key, first, newcomer):  # type: ignore[no-untyped-def]
    """A cleared slot of the bucket for a new context: a free one, or that of the context with least utility. -1: all
    have more utility than the new one."""
    clock = np.uint16(counters[_CLOCK] & 0xFFFF)
    best = first
    least = np.int64(2**62)
    start = np.int64(key & np.uint64(_BUCKET - 1))  # so that ties are not always broken at the same slot
    for step in range(_BUCKET):
        slot = first + ((start + step) & (_BUCKET - 1))
        if keys[slot] == 0:
            best = slot
            break
        idle = min(np.int64(np.uint16(clock - use[slot, _SEEN])), np.int64(40))
        worth = _utility(np.int64(use[slot, _COUNT]), np.int64(use[slot, _EARNED])) >> idle
        if worth < least:
            least = worth
            best = slot
    if keys[best] == 0:
        counters[_CONTEXTS] += 1
    else:
        if newcomer < least:
            return np.int64(-1)
        counters[_EVICTED] += 1
    counters[_SINCE_TICK] += 1
    if counters[_SINCE_TICK] * 4 > len(keys):
        counters[_SINCE_TICK] = 0
        counters[_CLOCK] += 1
    keys[best] = key
    masses[best, :] = 0
    use[best, _COUNT] = 0
    use[best, _EARNED] = 0
    use[best, _SEEN] = clock
    return best


@njit(cache=True, nogil=True, inline="always")
def _utility(count, earned):  # type: ignore[no-untyped-def]
    return count + _EARNED_WEIGHT * _UNIT * earned


@njit(cache=True, nogil=True, inline="always")
def _fade(masses, use, slot, count):  # type: ignore[no-untyped-def]
    """Scale a context down to a smaller count."""
    had = np.int64(use[slot, _COUNT])
    use[slot, _COUNT] = np.uint16(count)
    for i in range(MAX_SUCCESSORS):
        masses[slot, i] = np.uint16(np.int64(masses[slot, i]) * count // had)


@njit(cache=True, nogil=True, inline="always")
def _halve(masses, use, slot):  # type: ignore[no-untyped-def]
    use[slot, _COUNT] >>= np.uint16(1)
    for i in range(MAX_SUCCESSORS):
        masses[slot, i] >>= np.uint16(1)


@njit(cache=True, nogil=True, inline="always")
def _rank(mass, token):  # type: ignore[no-untyped-def]
    """Orders successors by mass, then by token, so that the result of a merge does not depend on its direction."""
    return (np.int64(mass) << 32) | (np.int64(0x7FFFFFFF) - np.int64(token))


@njit(cache=True, nogil=True, inline="always")
def _add_known(tokens, masses, slot, token, mass):  # type: ignore[no-untyped-def]
    """Add mass to a successor of the context; returns whether it has this successor."""
    for i in range(MAX_SUCCESSORS):
        if tokens[slot, i] == token and masses[slot, i] > 0:
            masses[slot, i] += np.uint16(mass)
            return True
    return False


@njit(cache=True, nogil=True, inline="always")
def _add_new(tokens, masses, slot, token, mass):  # type: ignore[no-untyped-def]
    """Put a new successor into a free place, or replace the least one if that has less mass."""
    place = 0
    for i in range(1, MAX_SUCCESSORS):
        if _rank(masses[slot, i], tokens[slot, i]) < _rank(masses[slot, place], tokens[slot, place]):
            place = i
    if _rank(mass, token) > _rank(masses[slot, place], tokens[slot, place]):
        tokens[slot, place] = token
        masses[slot, place] = np.uint16(mass)


@njit(cache=True, nogil=True)
def _learn(keys, tokens, masses, use, counters, contexts, token_ids, probs, units, order, orders, end):  # type: ignore[no-untyped-def]
    """Add rows of weight `units`. orders: int64 [rows], the longest context that each row is added to; -1 is replaced
    by the longest one to be stored. end: slots from there on are not changed."""
    width = contexts.shape[1]
    row_mass = np.zeros(token_ids.shape[1], np.int64)
    for row in range(len(contexts)):
        left = units
        for i in range(len(row_mass)):
            row_mass[i] = 0
            if token_ids[row, i] >= 0 and probs[row, i] > 0.0:
                row_mass[i] = min(np.int64(min(probs[row, i], np.float32(1.0)) * units + 0.5), left)
                left -= row_mass[i]
        is_told = orders[row] >= 0
        longest = orders[row] if is_told else min(order, width)
        key = _NO_TOKENS
        for k in range(longest + 1):
            if k > 0:
                if contexts[row, width - k] < 0:
                    break
                key = _lengthened(key, contexts[row, width - k])
            if _first_slot(keys, key) >= end:
                continue
            slot = _find(keys, key)
            is_new = slot < 0
            if is_new:
                slot = _claim(keys, masses, use, counters, key, ~slot, np.int64(2**62))
            most = _WINDOW[k] * _UNIT
            if np.int64(use[slot, _COUNT]) + units > most:
                _fade(masses, use, slot, most - units)
            use[slot, _COUNT] += np.uint16(units)
            use[slot, _SEEN] = np.uint16(counters[_CLOCK] & 0xFFFF)
            for i in range(len(row_mass)):
                if row_mass[i] > 0 and not _add_known(tokens, masses, slot, token_ids[row, i], row_mass[i]):
                    _add_new(tokens, masses, slot, token_ids[row, i], row_mass[i])
            orders[row] = k
            if is_new and k > 0 and not is_told:
                break


@njit(cache=True, nogil=True)
def _merge(keys, tokens, masses, use, counters, new_keys, new_tokens, new_masses, new_use, end):  # type: ignore[no-untyped-def]
    for entry in range(len(new_keys)):
        if _first_slot(keys, new_keys[entry]) >= end:
            continue
        count, earned = np.int64(new_use[entry, _COUNT]), np.int64(new_use[entry, _EARNED])
        slot = _find(keys, new_keys[entry])
        if slot < 0:
            slot = _claim(keys, masses, use, counters, new_keys[entry], ~slot, _utility(count, earned))
            if slot < 0:
                continue
        # Halve both sides, so that a row weighs the same in both.
        shift = np.uint16(np.int64(use[slot, _COUNT]) + count > _MOST)
        if shift:
            _halve(masses, use, slot)
        use[slot, _COUNT] += new_use[entry, _COUNT] >> shift
        use[slot, _EARNED] = np.uint16(min(np.int64(use[slot, _EARNED]) + earned, np.int64(_MOST)))
        use[slot, _SEEN] = np.uint16(counters[_CLOCK] & 0xFFFF)
        # Known successors first, so that none is replaced before its masses are added up.
        is_added = np.zeros(MAX_SUCCESSORS, np.bool_)
        for i in range(MAX_SUCCESSORS):
            mass = new_masses[entry, i] >> shift
            is_added[i] = mass == 0 or _add_known(tokens, masses, slot, new_tokens[entry, i], mass)
        for i in range(MAX_SUCCESSORS):
            if not is_added[i]:
                _add_new(tokens, masses, slot, new_tokens[entry, i], new_masses[entry, i] >> shift)


@njit(cache=True, nogil=True)
def _credit(keys, tokens, masses, use, counters, text, num_accepted, order, end):  # type: ignore[no-untyped-def]
    for at in range(len(text) - num_accepted, len(text)):
        key = _NO_TOKENS
        for k in range(min(order, at) + 1):
            if k > 0:
                if text[at - k] < 0:
                    break
                key = _lengthened(key, text[at - k])
            if _first_slot(keys, key) >= end:
                continue
            slot = _find(keys, key)
            if slot < 0:
                continue
            for i in range(MAX_SUCCESSORS):
                if tokens[slot, i] == text[at] and masses[slot, i] > 0:
                    use[slot, _EARNED] = np.uint16(min(np.int64(use[slot, _EARNED]) + 1, np.int64(_MOST)))
                    use[slot, _SEEN] = np.uint16(counters[_CLOCK] & 0xFFFF)


@njit(cache=True, nogil=True)
def _predict(keys, tokens, masses, use, hesitation, context, length, ids, chances):  # type: ignore[no-untyped-def]
    """The mixture of all known contexts that end `context` (newest token first, `length` of them) into ids and
    chances; returns how many successors it has."""
    slots = np.empty(MAX_ORDER + 1, np.int64)
    key = _NO_TOKENS
    slots[0] = _find(keys, key)
    for k in range(length):
        key = _lengthened(key, context[k])
        slots[k + 1] = _find(keys, key)
    count = 0
    left = np.float32(1.0)
    for k in range(length, -1, -1):
        slot = slots[k]
        if slot < 0:
            continue
        rows = np.float32(use[slot, _COUNT])
        share = left / (rows + hesitation[k] * _UNIT)  # fraction of one unit of mass
        left -= share * rows
        for i in range(MAX_SUCCESSORS):
            if masses[slot, i] == 0:
                continue
            place = count
            for j in range(count):
                if ids[j] == tokens[slot, i]:
                    place = j
                    break
            if place == count:
                ids[count] = tokens[slot, i]
                chances[count] = 0.0
                count += 1
            chances[place] += share * np.float32(masses[slot, i])
    return count


@njit(cache=True, nogil=True, inline="always")
def _push(heap_chance, heap_token, heap_parent, size, chance, token, parent):  # type: ignore[no-untyped-def]
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if heap_chance[above] >= chance:
            break
        heap_chance[at] = heap_chance[above]
        heap_token[at] = heap_token[above]
        heap_parent[at] = heap_parent[above]
        at = above
    heap_chance[at] = chance
    heap_token[at] = token
    heap_parent[at] = parent


@njit(cache=True, nogil=True, inline="always")
def _drop_top(heap_chance, heap_token, heap_parent, size):  # type: ignore[no-untyped-def]
    """Remove the top of a heap of `size` + 1 items."""
    chance, token, parent = heap_chance[size], heap_token[size], heap_parent[size]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and heap_chance[below + 1] > heap_chance[below]:
            below += 1
        if chance >= heap_chance[below]:
            break
        heap_chance[at] = heap_chance[below]
        heap_token[at] = heap_token[below]
        heap_parent[at] = heap_parent[below]
        at = below
    heap_chance[at] = chance
    heap_token[at] = token
    heap_parent[at] = parent


@njit(cache=True, nogil=True)
def _draft(  # type: ignore[no-untyped-def]
    keys, tokens, masses, use, hesitation, last, floor, token_ids, parents, confidence
):
    """Best-first: the most probable node not yet in the tree joins it, and its successors become candidates."""
    room = len(token_ids)
    order = len(last)
    most = MAX_SUCCESSORS * (order + 1)
    heap_chance = np.empty(room * most, np.float32)
    heap_token = np.empty(room * most, np.int32)
    heap_parent = np.empty(room * most, np.int32)
    size = 0
    context = np.empty(MAX_ORDER, np.int32)
    ids = np.empty(most, np.int32)
    chances = np.empty(most, np.float32)
    node = -1
    count = 0
    chance = np.float32(1.0)
    while count < room:
        # The last tokens of this node, newest first: up the tree, then back from its root.
        length = 0
        at = node
        while at >= 0 and length < order:
            context[length] = token_ids[at]
            length += 1
            at = parents[at]
        back = order - 1
        while length < order and back >= 0 and last[back] >= 0:
            context[length] = last[back]
            length += 1
            back -= 1
        for i in range(_predict(keys, tokens, masses, use, hesitation, context, length, ids, chances)):
            child = min(chance * chances[i], chance)
            if child >= floor and child > 0.0:
                _push(heap_chance, heap_token, heap_parent, size, child, ids[i], node)
                size += 1
        if size == 0:
            break
        chance = heap_chance[0]
        token_ids[count] = heap_token[0]
        parents[count] = heap_parent[0]
        confidence[count] = chance
        node = count
        count += 1
        size -= 1
        _drop_top(heap_chance, heap_token, heap_parent, size)
    return count
