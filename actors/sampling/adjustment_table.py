"""Penalties and biases of sequences, kept on the device from round to round: a round sends only the changes."""

from __future__ import annotations

from itertools import count

import numpy as np
import torch
from numba import carray, njit

from actors.records import pointer
from actors.sampling.sequence_sampling import sampling_at

_FIRST_CAPACITY = 1 << 16  # adjustments, of 16 bytes
_WORDS = 2  # int64 words of an adjustment
_NO_UPDATES = np.empty(0, np.int64), np.empty((0, _WORDS), np.int64)
_numbers = count(1)


class AdjustmentTable:
    """Each sequence has a part of one tensor. When the tensor is full, all parts are released, and each sequence gets a
    new one in the next round that needs it.

    A round calls `assign`, sends `updates`, and calls `confirm` when the device has them. If it does not, all parts are
    released and sent again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.generation = -1  # of the tensor, which is replaced by larger ones; the first is generation 0
        self._allocate(_FIRST_CAPACITY)
        self._forget()

    def _allocate(self, capacity: int) -> None:
        """Replace the tensor; nothing changes if there is no memory for it."""
        # The last one takes the updates of padding.
        tensor = torch.zeros(capacity + 1, _WORDS, dtype=torch.int64, device=self._device)
        self.generation += 1
        self.capacity, self.tensor = capacity, tensor

    def _forget(self) -> None:
        self._number = next(_numbers)  # of the current parts; a sequence with another number has none
        self._used = 0
        # int64 [n] places in the tensor, and contents, [n, _WORDS]; those of padding go to the last place
        self.updates = _NO_UPDATES

    def assign(self, addresses: np.ndarray) -> None:
        """Give each sequence its part, and find the updates. addresses: int64 [S], of those with adjustments."""
        if len(self.updates[0]):
            self._forget()  # the round that should have sent them has failed
        if not len(addresses):
            return
        used, num_updates, needed = _assign_parts(addresses, self._number, self._used, self.capacity)
        if used < 0:
            self._forget()
            if needed > self.capacity:
                self._allocate(1 << int(2 * needed - 1).bit_length())
            used, num_updates, _ = _assign_parts(addresses, self._number, 0, self.capacity)
        self._used = used
        if not num_updates:
            return
        size = 1 << (num_updates - 1).bit_length()  # few different ones
        places, contents = np.empty(size, np.int64), np.zeros((size, _WORDS), np.int64)
        places[_collect(addresses, places, contents) :] = self.capacity
        self.updates = places, contents

    def write(self, places: torch.Tensor, contents: torch.Tensor) -> None:
        """Write updates that are on the device."""
        self.tensor.index_copy_(0, places, contents)

    def confirm(self) -> None:
        """The device has the updates."""
        self.updates = _NO_UPDATES


@njit(cache=True, nogil=True)
def _assign_parts(addresses, number, used, capacity):  # type: ignore[no-untyped-def]
    """Give a part to each sequence that has none or has outgrown its own. Returns the used size of the table, -1 if the
    parts do not fit; the number of updates; and the size that the sequences need in an empty table."""
    num_updates = needed = 0
    for address in addresses:
        record = sampling_at(address)[0][0]
        if record.num_distinct == 0:
            continue
        needed += record.room
        if record.table != number or record.table_room < record.num_distinct:
            record.table, record.table_begin, record.table_room = number, max(used, 0), record.room
            record.num_changed = record.room + 1
            if used >= 0:
                used = used + record.room if used + record.room <= capacity else -1
        num_updates += record.num_distinct if record.num_changed > record.room else record.num_changed
    return used, num_updates, needed


@njit(cache=True, nogil=True)
def _collect(addresses, places, contents):  # type: ignore[no-untyped-def]
    """Write the updates of all sequences and clear them in the sequences. Returns their number."""
    at = 0
    for address in addresses:
        record = sampling_at(address)[0][0]
        if record.num_distinct == 0:
            continue
        words = carray(pointer(record.adjustments), (record.room, _WORDS), np.int64)
        changed = carray(pointer(record.changed), record.room, np.int32)
        is_all = record.num_changed > record.room
        for index in range(record.num_distinct if is_all else record.num_changed):
            place = index if is_all else changed[index]
            places[at] = record.table_begin + place
            contents[at, 0], contents[at, 1] = words[place, 0], words[place, 1]
            at += 1
        record.num_changed = 0
    return at
