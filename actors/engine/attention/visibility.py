"""What the rows of a batch see, expanded for backends that do not read the arrays of a `PackedBatch` themselves.

A sliding window counts positions, so that a deep node sees as far back as the committed token it may become. A window
of 0 is none; -n stands for chunks of n positions, of which a row sees its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from actors.engine.batch import PackedBatch


class _View(NamedTuple):
    """Arrays of a `PackedBatch`, for compiled functions."""

    first_rows: np.ndarray
    contexts: np.ndarray
    tree_starts: np.ndarray
    visible_ends: np.ndarray
    ancestors: np.ndarray
    positions: np.ndarray
    node_positions: np.ndarray
    block_tables: np.ndarray


def hidden_slots(
    batch: PackedBatch, sequences: np.ndarray, num_rows: int, num_slots: int, window: int | None
) -> np.ndarray | None:
    """bool [S, num_rows, num_slots]: the logical slots that the rows of some sequences (int64 [S]) do not see; None if
    all rows see all slots.

    Rows and slots after a sequence's own are padding: its rows see slot 0 alone.
    """
    view = _view(batch)
    if num_rows == 1 and _sees_all(view, sequences, num_slots, window or 0):
        return None  # several rows never see the same: each sees its own slot and none after it
    return _hidden_slots(view, sequences, num_rows, num_slots, window or 0)


def visible_slots(batch: PackedBatch, first: int, last: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Physical slots that the rows first to last - 1 see, concatenated, each row's in order of position, int64, and
    int64 [last - first + 1] offsets into them."""
    slots, starts = _visible_slots(_view(batch), batch.block_size, first, last, window or 0)
    return slots, starts


def visible_bits(batch: PackedBatch, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Bits that say which logical slots each row sees, packed in uint8 from the lowest bit on, and int32 [S + 1]
    offsets of the sequences' bytes. A sequence has one bit for each of its rows and each slot of its context."""
    sizes = np.diff(batch.first_rows).astype(np.int64) * batch.contexts
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(-(-sizes // 8), out=starts[1:])
    bits = _visible_bits(_view(batch), starts, window or 0)
    return bits, starts.astype(np.int32)


def _view(batch: PackedBatch) -> _View:
    return _View(*[getattr(batch, name) for name in _View._fields])


@njit(cache=True, nogil=True)
def _first_visible(view, row, window):  # type: ignore[no-untyped-def]
    """The first position in the window of a row, which is also the index of a committed slot."""
    position = view.positions[row]
    if window < 0:
        return position // -window * -window
    return max(0, position - window + 1) if window > 0 else 0


@njit(cache=True, nogil=True)
def _sees_node(view, s, row, node, window):  # type: ignore[no-untyped-def]
    """Whether a row of sequence s sees a draft node."""
    is_ancestor = (view.ancestors[row, node // 64] >> (node % 64)) & 1 == 1
    return is_ancestor and view.node_positions[s, node] >= _first_visible(view, row, window)


@njit(cache=True, nogil=True)
def _num_visible(view, s, row, window):  # type: ignore[no-untyped-def]
    count = max(0, view.visible_ends[row] - _first_visible(view, row, window))
    for node in range(view.contexts[s] - view.tree_starts[s]):
        count += _sees_node(view, s, row, node, window)
    return count


@njit(cache=True, nogil=True)
def _sees_all(view, sequences, num_slots, window):  # type: ignore[no-untyped-def]
    """Whether the only row of each sequence sees all of num_slots slots."""
    for s in sequences:  # noqa: SIM110 (numba compiles no generator expressions)
        if _num_visible(view, s, view.first_rows[s], window) < num_slots:
            return False
    return True


@njit(cache=True, nogil=True)
def _hidden_slots(view, sequences, num_rows, num_slots, window):  # type: ignore[no-untyped-def]
    """The result of `hidden_slots`."""
    hidden = np.ones((len(sequences), num_rows, num_slots), np.bool_)
    for index, s in enumerate(sequences):
        own_rows = view.first_rows[s + 1] - view.first_rows[s]
        hidden[index, own_rows:, 0] = False  # without a slot the softmax of a padding row is undefined
        for own in range(own_rows):
            row = view.first_rows[s] + own
            begin, end = _first_visible(view, row, window), view.visible_ends[row]
            if begin < end:
                hidden[index, own, begin:end] = False
            start = view.tree_starts[s]
            for node in range(view.contexts[s] - start):
                if _sees_node(view, s, row, node, window):
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
def _visible_bits(view, starts, window):  # type: ignore[no-untyped-def]
    """The bits of `visible_bits`. starts: int64 [S + 1], offsets of the sequences' bytes."""
    bits = np.zeros(starts[-1], np.uint8)
    for s in range(len(view.contexts)):
        for row in range(view.first_rows[s], view.first_rows[s + 1]):
            place = 8 * starts[s] + (row - view.first_rows[s]) * np.int64(view.contexts[s])
            _set_bits(bits, place + _first_visible(view, row, window), place + view.visible_ends[row])
            start = view.tree_starts[s]
            for node in range(view.contexts[s] - start):
                if _sees_node(view, s, row, node, window):
                    _set_bits(bits, place + start + node, place + start + node + 1)
    return bits


@njit(cache=True, nogil=True)
def _physical(view, s, slot, block_size):  # type: ignore[no-untyped-def]
    return np.int64(view.block_tables[s, slot // block_size]) * block_size + slot % block_size


@njit(cache=True, nogil=True)
def _visible_slots(view, block_size, first, last, window):  # type: ignore[no-untyped-def]
    """The result of `visible_slots`."""
    sequence_of = np.searchsorted(view.first_rows, np.arange(first, last), side="right") - 1
    starts = np.zeros(last - first + 1, np.int64)
    for index, s in enumerate(sequence_of):
        starts[index + 1] = starts[index] + _num_visible(view, s, first + index, window)
    slots = np.empty(starts[-1], np.int64)
    for index, s in enumerate(sequence_of):
        row, count = first + index, starts[index]
        for slot in range(_first_visible(view, row, window), view.visible_ends[row]):
            slots[count] = _physical(view, s, slot, block_size)
            count += 1
        start = view.tree_starts[s]
        for node in range(view.contexts[s] - start):  # in order of depth: parents precede children
            if _sees_node(view, s, row, node, window):
                slots[count] = _physical(view, s, start + node, block_size)
                count += 1
    return slots, starts
