from __future__ import annotations

import time
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.warm_blocks import WarmBlocks


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(["told", "assumed", "dropped"]), st.lists(st.integers(0, 9), max_size=5))),
)
def test_it_holds_the_blocks_that_were_used_last(capacity, events):
    warm, model, told = WarmBlocks(capacity), OrderedDict[int, None](), set[int]()
    for kind, blocks in events:
        if kind == "dropped":
            warm.drop_assumed(blocks)
            for block in {*blocks} - told:
                model.pop(block, None)
        else:
            warm.use(blocks, is_assumed=kind == "assumed")
            told.update(blocks if kind == "told" else ())
            for block in blocks:
                model[block] = None
                model.move_to_end(block)
        while len(model) > capacity:
            told.discard(model.popitem(last=False)[0])
        assert list(warm) == list(model)
        assert [block in warm for block in range(10)] == [block in model for block in range(10)]


def test_a_prompt_is_known_up_to_its_first_unknown_block():
    warm = WarmBlocks(9)
    warm.use([3, 2, 1, 5])
    assert [warm.num_leading(prompt) for prompt in ([], [1, 2, 3], [1, 2, 4, 5], [4, 1, 2])] == [0, 3, 2, 0]
    warm.capacity = 3
    warm.use([])
    assert warm.num_leading([1, 2, 3]) == 2  # the end of a prompt goes before its beginning
    warm.clear()
    assert len(warm) == 0


def test_many_blocks_are_dropped_at_once_in_linear_time():
    warm = WarmBlocks(100_000)
    warm.use(range(100_000))
    before = time.process_time()
    warm.use(range(100_000, 200_000))
    assert (
        time.process_time() - before < 0.5
    )  # it is some 20 ms; looking for the oldest block anew each time takes a second
