"""The block pool against a naive account of who holds what, under any order of calls."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.engine.block_pool import BlockPool, block_hash, root_hash
from paceline_testing.integrity import check_blocks

NUM_BLOCKS = 12
SIZE = 4


def text(seed: int, blocks: int) -> np.ndarray:
    """Tokens of so many blocks; texts of one seed begin alike, and those of 0 and 1 share two blocks."""
    tokens = np.arange(blocks * SIZE, dtype=np.int32) + 1000 * seed
    if seed == 1:
        tokens[: 2 * SIZE] -= 1000
    return tokens


class PoolMachine(RuleBasedStateMachine):
    """Sequences that come, find their prefix, take the rest, publish it and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.held: list[list[int]] = []
        self.cached: set[bytes] = set()  # hashes that must be found

    @rule(seed=st.integers(0, 4), blocks=st.integers(1, 6), publishes=st.booleans())
    def comes(self, seed: int, blocks: int, publishes: bool) -> None:
        tokens = text(seed, blocks)
        table, hashes = self.pool.find_prefix("n", tokens)
        after = table[-1] if table else -1
        blanks = self._num_blanks()
        taken = self.pool.allocate(blocks - len(table), after)
        if taken is None:
            assert blocks - len(table) > self.pool.num_free
            self.pool.release(table)
            return
        # Only what the blank blocks had no room for is lost.
        lost = max(0, len(taken) - blanks)
        remaining = {content for content in self.cached if content in self.pool._by_hash}
        assert len(self.cached) - len(remaining) == lost
        self.cached = remaining
        table += taken
        if publishes:
            parent = root_hash("n")
            for index, number in enumerate(table):
                parent = block_hash(parent, tokens[index * SIZE : (index + 1) * SIZE])
                if index >= len(hashes):
                    self.pool.publish(number, parent)
                self.cached.add(parent)
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    def _num_blanks(self) -> int:
        return sum(self.pool._blocks[number].hash is None for number in self.pool._free)

    @invariant()
    def is_sound(self) -> None:
        check_blocks(self.pool, self.held)


TestPool = PoolMachine.TestCase


def test_neighbouring_blocks_are_taken_while_they_are_blank():
    pool = BlockPool(8, SIZE)
    assert (pool.allocate(3), pool.allocate(2, after=5)) == ([0, 1, 2], [6, 7])


def test_a_cached_neighbour_is_spared_while_there_are_blank_blocks():
    pool = BlockPool(8, SIZE)
    first, second = pool.allocate(2), pool.allocate(2)
    assert (first, second) == ([0, 1], [2, 3])
    pool.publish(2, b"kept")
    pool.release(second)
    assert pool.allocate(3, after=1) == [3, 4, 5]
    assert pool.allocate(3, after=1) is not None
    assert pool._by_hash == {}


def test_a_cleared_pool_has_blank_blocks_alone():
    pool = BlockPool(4, SIZE)
    taken = pool.allocate(2)
    pool.publish(0, b"wrong")
    pool.release(taken)
    pool.clear()
    check_blocks(pool, [])
    assert pool._by_hash == {}
    assert pool.allocate(4) == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 0), ("block_size", -1)])
def test_a_pool_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        BlockPool(**{"num_blocks": 4, "block_size": 4, name: value})
