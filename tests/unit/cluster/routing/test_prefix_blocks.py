from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.prefix_blocks import BLOCK_TOKENS, first_blocks, namespace_block, prefix_blocks

TOKENS = st.lists(st.integers(0, 3), max_size=4 * BLOCK_TOKENS).map(lambda ids: np.array(ids, np.int32))


@given(TOKENS, TOKENS, TOKENS)
def test_two_prompts_share_the_blocks_before_the_first_token_that_differs(beginning, one, other):
    prompts = [np.concatenate([beginning, end]) for end in (one, other)]
    first, second = (prefix_blocks(prompt, "a") for prompt in prompts)
    assert [len(blocks) for blocks in (first, second)] == [len(prompt) // BLOCK_TOKENS for prompt in prompts]
    common = min(map(len, prompts))
    differ = np.flatnonzero(prompts[0][:common] != prompts[1][:common])
    num_equal = int(differ[0]) if len(differ) else common
    whole = num_equal // BLOCK_TOKENS
    assert first[:whole] == second[:whole]
    assert not set(first[whole:]) & set(second[whole:])


@given(TOKENS, st.integers(0, 4))
def test_blocks_go_on_where_the_first_ones_are_known(prompt, num_known):
    blocks = prefix_blocks(prompt, "a")
    assert prefix_blocks(prompt, "a", blocks[:num_known]) == blocks
    assert first_blocks(blocks) == blocks[:1]
    assert not first_blocks([namespace_block("a")])


def test_nothing_is_shared_between_namespaces():
    prompt = np.arange(5 * BLOCK_TOKENS, dtype=np.int32)
    assert not set(prefix_blocks(prompt, "a")) & set(prefix_blocks(prompt, "b"))
    assert namespace_block("a") != namespace_block("b")
    assert namespace_block("a") not in prefix_blocks(prompt, "a")


def test_blocks_are_those_of_any_other_process():
    assert prefix_blocks(np.zeros(BLOCK_TOKENS, np.int64), "a") == [17474655141740501821]
