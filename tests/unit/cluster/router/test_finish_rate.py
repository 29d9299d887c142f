"""When refused clients are told to come back: the rate at which requests end while others wait."""

import pytest

from cluster.router.finish_rate import FinishRate


def test_nothing_is_known_at_first():
    rate = FinishRate()
    assert rate.per_second(4) is None
    rate.observe(False, 0.0)
    assert rate.per_second(4) is None


def test_without_a_queue_places_take_as_long_as_the_last_requests():
    rate = FinishRate()
    for now in (10.0, 500.0):
        rate.observe(False, now)
        rate.ended(2.0)
    assert rate.per_second(4) == 2.0


def test_time_without_a_queue_does_not_count():
    rate = FinishRate()
    for start in (0.0, 1000.0):
        for step in range(6):
            rate.observe(True, start + step)
            rate.ended(9.0)
        rate.observe(False, start + 6.0)
        rate.ended(9.0)
    # Seven seconds with a queue, of which the first end of each stretch is no interval.
    assert rate.per_second(4) == pytest.approx(1.0, rel=0.2)
