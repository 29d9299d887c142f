"""What the rows of a batch see, expanded for backends that do not read the arrays of a `PackedBatch` themselves.

A sliding window counts positions, so that a deep node sees as far back as the committed token it may become. A window
of 0 is none.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from actors.engine.batch import PackedBatch


def hidden_slots(
    batch: PackedBatch, sequences: np.ndarray, num_rows: int, num_slots: int, window: int | None
) -> np.ndarray | None:
    """bool [S, num_rows, num_slots]: the logical slots that the rows of some sequences (int64 [S]) do not see; None if
    all rows see all slots.

    Rows and slots after a sequence's own are padding: its rows see slot 0 alone.
    """
    if num_rows == 1 and _sees_all(*_visibility(batch), batch.contexts, sequences, num_slots, window or 0):
        return None  # several rows never see the same: each sees its own slot and none after it
    return _hidden_slots(*_visibility(batch), batch.contexts, sequences, num_rows, num_slots, window or 0)


def visible_slots(batch: PackedBatch, first: int, last: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Physical slots that the rows first to last - 1 see, concatenated, each row's in order of position, int64, and
    int64 [last - first + 1] offsets into them."""
    slots, starts = _visible_slots(
        *_visibility(batch), batch.contexts, batch.block_tables, batch.block_size, first, last, window or 0
    )
    return slots, starts


def visible_bits(batch: PackedBatch, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Which logical slots each row sees: bits of uint8, the lowest first, and int32 [S + 1] offsets of the sequences'
    bytes. The bits of a sequence are those of its rows in turn, one for each slot of its context."""
    sizes = np.diff(batch.first_rows).astype(np.int64) * batch.contexts
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(-(-sizes // 8), out=starts[1:])
    bits = _visible_bits(*_visibility(batch), batch.contexts, starts, window or 0)
    return bits, starts.astype(np.int32)


def _visibility(batch: PackedBatch) -> tuple[np.ndarray, ...]:
    return (
        batch.first_rows,
        batch.tree_starts,
        batch.visible_ends,
        batch.ancestors,
        batch.positions,
        batch.node_positions,
    )


@njit(cache=True, nogil=True)
def _first_visible(position: int, window: int) -> int:
    """The first committed slot in the window of a row: its index is its position."""
    return max(0, position - window + 1) if window > 0 else 0


@njit(cache=True, nogil=True)
def _sees_node(ancestors: np.ndarray, node: int, position: int, node_position: int, window: int) -> bool:
    """ancestors: int64 [words], the row's bits."""
    is_ancestor = (ancestors[node // 64] >> (node % 64)) & 1 == 1
    return is_ancestor and (window == 0 or position - node_position < window)


@njit(cache=True, nogil=True)
def _num_visible(
    row: int,
    sequence: int,
    tree_starts: np.ndarray,
    visible_ends: np.ndarray,
    ancestors: np.ndarray,
    positions: np.ndarray,
    node_positions: np.ndarray,
    context: int,
    window: int,
) -> int:
    count = max(0, visible_ends[row] - _first_visible(positions[row], window))
    for node in range(context - tree_starts[sequence]):
        if _sees_node(ancestors[row], node, positions[row], node_positions[sequence, node], window):
            count += 1
    return count


@njit(cache=True, nogil=True)
def _sees_all(
    first_rows: np.ndarray,
    tree_starts: np.ndarray,
    visible_ends: np.ndarray,
    ancestors: np.ndarray,
    positions: np.ndarray,
    node_positions: np.ndarray,
    contexts: np.ndarray,
    sequences: np.ndarray,
    num_slots: int,
    window: int,
) -> bool:
    """Whether the only row of each sequence sees all of num_slots slots."""
    for s in sequences:
        row, context = first_rows[s], contexts[s]
        seen = _num_visible(row, s, tree_starts, visible_ends, ancestors, positions, node_positions, context, window)
        if seen < num_slots:
            return False
    return True


@njit(cache=True, nogil=True)
def _hidden_slots(
    first_rows: np.ndarray,
    tree_starts: np.ndarray,
    visible_ends: np.ndarray,
    ancestors: np.ndarray,
    positions: np.ndarray,
    node_positions: np.ndarray,
    contexts: np.ndarray,
    sequences: np.ndarray,
    num_rows: int,
    num_slots: int,
    window: int,
) -> np.ndarray:
    hidden = np.ones((len(sequences), num_rows, num_slots), np.bool_)
    for index, s in enumerate(sequences):
        own_rows = first_rows[s + 1] - first_rows[s]
        hidden[index, own_rows:, 0] = False  # without a slot the softmax of a padding row is undefined
        for own in range(own_rows):
            row = first_rows[s] + own
            begin, end = _first_visible(positions[row], window), visible_ends[row]
            if begin < end:
                hidden[index, own, begin:end] = False
            start = tree_starts[s]
            for node in range(contexts[s] - start):
                if _sees_node(ancestors[row], node, positions[row], node_positions[s, node], window):
                    hidden[index, own, start + node] = False
    return hidden


@njit(cache=True, nogil=True)
def _set_bits(bits: np.ndarray, begin: int, end: int) -> None:
    """bits: uint8."""
    while begin < end:
        if begin % 8 == 0 and end - begin >= 8:
            bits[begin // 8] = 255
            begin += 8
        else:
            bits[begin // 8] |= np.uint8(1 << (begin % 8))
            begin += 1


@njit(cache=True, nogil=True)
def _visible_bits(
    first_rows: np.ndarray,
    tree_starts: np.ndarray,
    visible_ends: np.ndarray,
    ancestors: np.ndarray,
    positions: np.ndarray,
    node_positions: np.ndarray,
    contexts: np.ndarray,
    starts: np.ndarray,  # int64 [S + 1]: offsets of the sequences' bytes
    window: int,
) -> np.ndarray:
    bits = np.zeros(starts[-1], np.uint8)
    for s in range(len(contexts)):
        start = tree_starts[s]
        for row in range(first_rows[s], first_rows[s + 1]):
            place = 8 * starts[s] + (row - first_rows[s]) * np.int64(contexts[s])
            _set_bits(bits, place + _first_visible(positions[row], window), place + visible_ends[row])
            for node in range(contexts[s] - start):
                if _sees_node(ancestors[row], node, positions[row], node_positions[s, node], window):
                    _set_bits(bits, place + start + node, place + start + node + 1)
    return bits


@njit(cache=True, nogil=True)
def _visible_slots(  # type: ignore[no-untyped-def]
    first_rows,
    tree_starts,
    visible_ends,
    ancestors,
    positions,
    node_positions,
    contexts,
    block_tables,
    block_size,
    first,
    last,
    window,
):
    """The result of `visible_slots`."""
    starts = np.zeros(last - first + 1, np.int64)
    s = 0
    for row in range(first, last):
        while row >= first_rows[s + 1]:
            s += 1
        starts[row - first + 1] = starts[row - first] + _num_visible(
            row, s, tree_starts, visible_ends, ancestors, positions, node_positions, contexts[s], window
        )
    slots = np.empty(starts[-1], np.int64)
    count = s = 0
    for row in range(first, last):
        while row >= first_rows[s + 1]:
            s += 1
        for slot in range(_first_visible(positions[row], window), visible_ends[row]):
            slots[count] = np.int64(block_tables[s, slot // block_size]) * block_size + slot % block_size
            count += 1
        start = tree_starts[s]
        # Ancestors come in order of depth because parents precede children.
        for node in range(contexts[s] - start):
            if _sees_node(ancestors[row], node, positions[row], node_positions[s, node], window):
                slot = start + node
                slots[count] = np.int64(block_tables[s, slot // block_size]) * block_size + slot % block_size
                count += 1
    return slots, starts
