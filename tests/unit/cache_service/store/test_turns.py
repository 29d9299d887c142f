"""The background thread of the shared cache: every task has its turns, and the end comes at once."""

import sys
import threading

import pytest

from cache_service.store.turns import Turns
from paceline_testing.cache_stores import until


@pytest.fixture
def eager_switching():
    """Threads take turns so often that what can fall between two lines does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_thread_that_has_nothing_to_do_ends_at_once(eager_switching):
    for _ in range(3000):
        assert Turns("idle").close(20)


def test_a_turn_may_end_its_own_thread():
    turns, closed = Turns("closing"), []
    turns.add("closing", lambda: closed.append(turns.close(20)) or 3600.0)
    assert until(lambda: not turns._thread.is_alive())
    assert (closed, turns.num_faults) == ([False], 0)
    assert turns.close(20)


def test_tasks_take_turns_until_they_are_removed_and_a_fault_ends_none():
    turns, counts = Turns("counting"), {"often": 0, "seldom": 0}
    failed = threading.Event()

    def task(name, pause_s):
        def turn():
            counts[name] += 1
            return pause_s

        return turn

    def fail():
        failed.set()
        raise RuntimeError

    turns.add("failing", fail)
    turns.add("often", task("often", 0.0))
    turns.add("seldom", task("seldom", 3600.0))
    assert until(lambda: counts["often"] > 10 and counts["seldom"] == 1 and failed.is_set())
    turns.remove("often")
    turns.add("seldom", task("seldom", 3600.0))
    assert until(lambda: counts["seldom"] == 2)
    after = counts["often"]
    turns.add("seldom", task("seldom", 3600.0))
    assert until(lambda: counts["seldom"] == 3)
    assert counts["often"] == after
    assert turns.num_faults >= 1
    assert turns.close(20)
