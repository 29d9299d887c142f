"""What a router tells gateways of its target."""

from types import SimpleNamespace

import pytest

from paceline_testing.rounds import toy_core, toy_info


@pytest.mark.parametrize(("has_prefix_cache", "tokens"), [(True, 40), (False, 0)])
def test_the_size_of_the_prefix_cache_if_there_is_one(has_prefix_cache, tokens):
    core = toy_core(toy_info(16, has_prefix_cache=has_prefix_cache))
    assert core.prefix_cache_tokens == 0
    core.blocks.observe(SimpleNamespace(free_blocks=3, total_blocks=10))
    assert core.prefix_cache_tokens == tokens
