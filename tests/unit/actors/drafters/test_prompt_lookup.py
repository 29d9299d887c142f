"""Prompt lookup against a scan of the whole sequence."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.drafters.contract import DraftContext
from actors.drafters.prompt_lookup import PromptLookupDrafter
from actors.messages import SamplingParams


def scan(tokens: list[int], max_ngram: int, count: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest n-gram, as a period if the text ends first."""
    for ngram in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, ngram - 1, -1):
            if tokens[end - ngram : end] == tokens[-ngram:]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 3) | st.sampled_from([2**31 - 1, 65_536]), min_size=1, max_size=150),
    st.integers(1, 12),
)
@settings(max_examples=200)
def test_the_draft_is_what_a_scan_finds(max_ngram: int, tokens: list[int], step: int) -> None:
    drafter = PromptLookupDrafter(max_ngram=max_ngram, floor=0.0)
    known = 0
    while known < len(tokens):
        upto = min(known + step, len(tokens))
        context = DraftContext(1, np.array(tokens[:upto], np.int32), known, 1, 7, SamplingParams(seed=1))
        (tree,) = drafter.propose([context])
        assert tree.token_ids.tolist() == scan(tokens[:upto], max_ngram, 7)
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
        known = upto


def test_a_higher_floor_makes_shorter_drafts() -> None:
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], np.int32)
    lengths = []
    for floor in (0.0, 0.2, 0.5):
        (tree,) = PromptLookupDrafter(floor=floor).propose([DraftContext(1, tokens, 0, 10, 30, SamplingParams(seed=1))])
        assert (tree.confidence >= floor).all()
        lengths.append(len(tree))
    assert lengths[0] == 30
    assert lengths == sorted(set(lengths), reverse=True)
