"""What objectives ask of rounds and of admission: `cluster.router.objectives`, and prompt rows in a round's time."""

from math import inf
from types import SimpleNamespace

import pytest

from cluster.router.objectives import AIMED, first_token_s, most_sequences, round_limit_s
from cluster.router.prefill_budget import rows_within
from cluster.router.step_time import StepTimeCurve

STEEP = StepTimeCurve([(rows, 0.01 * rows) for rows in (1, 2, 4, 8, 16, 64, 256)])


def stream(first_at, emitted, rounds=None):
    stats = SimpleNamespace(rounds=emitted if rounds is None else rounds)
    progress = SimpleNamespace(first_at=first_at, stats=stats)
    return SimpleNamespace(progress=progress, num_prompt=10, num_tokens=10 + emitted)


@pytest.mark.parametrize(
    ("streams", "now", "limit_s"),
    [
        ([], 5.0, inf),
        ([stream(None, 0)], 5.0, inf),  # its first token is another objective's
        ([stream(1.0, 1)], 1.0, 0.1 * AIMED),
        ([stream(1.0, 11)], 1.2, 11 * 0.1 * AIMED - 0.2),  # it has been faster than it must
        ([stream(1.0, 11), stream(1.0, 6)], 1.2, 6 * 0.1 * AIMED - 0.2),
        ([stream(1.0, 2)], 9.0, 0.5 * 0.1 * AIMED),  # behind: rounds of half the time
        ([stream(1.0, 12, rounds=4)], 9.0, 3 * 0.5 * 0.1 * AIMED),  # three tokens a round
    ],
)
def test_a_round_may_take_what_the_tightest_stream_has_left(streams, now, limit_s):
    assert round_limit_s(streams, 0.1, now) == pytest.approx(limit_s)
    assert round_limit_s(streams, None, now) == inf


@pytest.mark.parametrize(("limit_s", "count"), [(0.001, 1), (0.0401, 4), (0.08, 8), (10.0, 12), (inf, 12)])
def test_as_many_sequences_decode_as_there_is_time_for(limit_s, count):
    assert most_sequences(STEEP, limit_s, 12) == pytest.approx(count, abs=1)


@pytest.mark.parametrize(("limit_s", "rows"), [(inf, 256), (1.001, 96), (0.501, 46), (0.01, 8), (-1.0, 8)])
def test_prompts_have_the_rows_that_streams_leave_time_for(limit_s, rows):
    assert rows_within(STEEP, 4, 256, limit_s) == rows
    assert rows_within(STEEP, 4, 4, limit_s) == 4


def test_prompts_before_it_are_computed_while_a_request_waits_for_a_place():
    assert first_token_s(0.0, 100, 50, 0.01, 0.1) == pytest.approx(1.6)
    assert first_token_s(3.0, 100, 50, 0.01, 0.1) == pytest.approx(3.6)
