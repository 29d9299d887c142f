from actors.workers.quiet_watch import LONGEST_LEAVE_S, QuietWatch


def over_after(observe, step=0.05):
    """Seconds until the watch is over; observe(seconds) says (num_batches, is_busy)."""
    now = 0.0
    watch = QuietWatch(clock=lambda: now)
    while not watch.is_over(*observe(now)):
        now += step
    return now


def test_a_worker_without_batches_may_stop_after_a_short_while():
    assert 0.7 < over_after(lambda now: (5, False)) < 0.9


def test_batches_and_work_under_way_prolong_the_wait():
    assert 1.6 < over_after(lambda now: (int(min(now, 1.0) * 10), False)) < 1.9
    assert 1.6 < over_after(lambda now: (0, now < 1.0)) < 1.9


def test_the_wait_is_bounded():
    assert LONGEST_LEAVE_S <= over_after(lambda now: (0, True)) < LONGEST_LEAVE_S + 0.2
