"""A short run of the engine's soak: sequences that come and go, and every token and block checked in each round."""

from __future__ import annotations

import pytest

from tests.soak.soak_engine import Soak


@pytest.mark.parametrize(
    ("attention", "kind", "rounds"),
    [("padded", "llama", 120), pytest.param("triton_tree", "gemma3", 3, marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_plain_decoding_and_blocks_add_up_in_every_round(attention, kind, rounds, request):
    device = "cpu" if attention == "padded" else request.getfixturevalue("triton_device")
    figures = Soak(attention, kind, seed=2, device=device).run(rounds)
    assert figures.rounds == rounds
    assert figures.tokens > rounds
    assert figures.accepted_nodes > 0
    if attention == "padded":
        assert min(figures.starved, figures.stale, figures.sent_again, figures.cancelled) > 0
        assert figures.cached_prompt_tokens > 0
