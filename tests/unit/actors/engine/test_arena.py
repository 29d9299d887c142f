"""Arrays on their way to a device: the host's buffer is written only when the device has read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.engine import arena as arena_module
from actors.engine.arena import Arena, Part, Views, Written


def written(*numbers: int) -> Written:
    """These words, the first of which is seen on the device."""

    def write(words: np.ndarray) -> None:
        words[:] = numbers

    return Written(len(numbers), VIEWS, write)


VIEWS = Views([(0, np.int64, (1,))])


class Queue:
    """A device that reads the host's buffer as late as it may: when it is waited for."""

    def __init__(self) -> None:
        self.queued: list[np.ndarray] = []
        self.read: list[list[int]] = []

    def record(self) -> None:
        self.queued.append(self.arena._host.numpy().view(np.int64))

    def synchronize(self) -> None:
        self.read += [words[:3].tolist() for words in self.queued]
        self.queued.clear()


def test_what_is_queued_is_read_before_the_next_is_written():
    queue = Queue()
    arena = queue.arena = Arena(torch.device("cpu"), queue)
    for first in (1, 5, 7):
        arena.send(written(first, first + 1, first + 2), [], list)
    arena.send(written(*[0] * (1 << 15)), [], list)  # in a larger buffer
    assert queue.read == [[1, 2, 3], [5, 6, 7], [7, 8, 9]]


def test_a_layout_that_made_room_for_others_has_the_same_places_again(monkeypatch):
    monkeypatch.setattr(arena_module, "_MOST_LAYOUTS", 4)
    arena = Arena(torch.device("cpu"))

    def places(size: int) -> list[int]:
        return [tensor.data_ptr() for tensor in arena.send(written(5), [Part(np.arange(size), (size,))], list)]

    first = places(3)
    for size in range(4, 12):
        places(size)
    assert len(arena._layouts) == 4
    assert places(3) == first


def test_an_arena_that_cannot_grow_stays_as_it_was_and_grows_when_there_is_memory(monkeypatch):
    arena = Arena(torch.device("cpu"))
    large = np.arange(1 << 15)

    def sent(array: np.ndarray) -> list[int]:
        return arena.send(written(1), [Part(array, array.shape)], list)[1].tolist()

    before = arena.generation
    zeros = torch.zeros
    for failing in (0, 1):  # the host's buffer, then the device's
        allocations = iter([False] * failing + [True])

        def without_memory(*sizes, allocations=allocations, **kwargs):
            if next(allocations):
                raise torch.OutOfMemoryError("injected")
            return zeros(*sizes, **kwargs)

        monkeypatch.setattr(arena_module.torch, "zeros", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            sent(large)
        monkeypatch.undo()
        assert arena.generation == before
        assert sent(np.arange(5)) == [0, 1, 2, 3, 4]
    assert sent(large) == large.tolist()
    assert arena.generation == before + 1
