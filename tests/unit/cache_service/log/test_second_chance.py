"""What outlives its generation, and what a namespace may keep by what it has earned."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.formats.documents import DOCUMENT_ID_BYTES, Piece, RecordKind
from cache_service.formats.earnings import Earnings
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.hit_rate_limits import MIN_HIT_RATE, MIN_REQUESTS, limits_by_hit_rate
from cache_service.log.second_chance import survivors


def piece(number, tokens, time_s=0, kind=RecordKind.OUTPUT):
    return Piece(number.to_bytes(DOCUMENT_ID_BYTES, "little"), 0, np.array(tokens, np.int32), kind, time_s)


def test_what_was_said_twice_stays_once_in_its_newest_copy():
    once, first, second = piece(1, [1, 2, 3], 5), piece(2, [4, 5], 1), piece(3, [4, 5], 9)
    assert survivors([once, second, first], 100) == [second]
    assert survivors(survivors([once, second, first], 100), 100) == [], "and goes where nobody says it again"
    assert survivors([piece(1, [1, 2]), piece(2, [1, 2], kind=RecordKind.PROMPT)], 100) == []


def test_the_most_frequent_come_in_first_then_the_newer():
    often = [piece(number, [7, 7, 7], number) for number in range(3)]
    old = [piece(10, [1, 1, 1], 20), piece(11, [1, 1, 1], 21)]
    new = [piece(20, [2, 2, 2], 30), piece(21, [2, 2, 2], 31)]
    every = [*new, *old, *often]
    assert (survivors(every, 9), survivors(every, 8)) == ([often[2], old[1], new[1]], [often[2], new[1]])
    assert (survivors(every, 3), survivors(every, 2)) == ([often[2]], [])


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 5))), st.integers(0, 20))
def test_survivors_are_distinct_repeated_and_fit(texts, room):
    pieces = [piece(number, tokens, time_s) for number, (tokens, time_s) in enumerate(texts)]
    found = [tuple(each.token_ids.tolist()) for each in survivors(pieces, room)]
    counts = Counter(tuple(tokens) for tokens, _ in texts)
    assert len(set(found)) == len(found)
    assert all(counts[text] > 1 for text in found)
    assert sum(map(len, found)) <= room
    left_out = [text for text, count in counts.items() if count > 1 and text not in found]
    assert all(len(text) > room - sum(map(len, found)) for text in left_out), "room is not left unused"


@pytest.mark.parametrize(
    ("earnings", "is_useless"),
    [
        (Earnings(), False),
        (Earnings(requests=MIN_REQUESTS - 1), False),
        (Earnings(requests=MIN_REQUESTS), True),
        (Earnings(requests=10_000, hits=99, accepted_tokens=10_000), True),
        (Earnings(requests=10_000, hits=int(10_000 * MIN_HIT_RATE)), False),
    ],
)
def test_a_namespace_that_nobody_drafts_from_keeps_an_eighth(earnings, is_useless):
    limits = FoldLimits()
    found = limits_by_hit_rate(limits, earnings)
    share = 8 if is_useless else 1
    assert (found.max_bytes, found.generation_tokens, found.generation_s) == (
        limits.max_bytes // share,
        limits.generation_tokens // share,
        limits.generation_s / share,
    )
    assert (found.max_generations, found.segment_tokens) == (limits.max_generations, limits.segment_tokens)


def test_the_least_budgets_stay_valid():
    least = FoldLimits(generation_tokens=1, generation_s=0.001, max_bytes=1)
    assert limits_by_hit_rate(least, Earnings(requests=MIN_REQUESTS)) == least
