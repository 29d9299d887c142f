"""The alarm on drafts that are suddenly accepted far more seldom."""

from __future__ import annotations

import numpy as np

from cluster.router.acceptance_watch import AcceptanceWatch


def observe(watch, rounds, verified, accepted):
    """Rounds with one sequence, the same numbers by source in each."""
    for _ in range(rounds):
        watch.observe(np.array([verified], np.int32), np.array([accepted], np.int32))


def test_a_source_whose_drafts_are_no_longer_accepted_is_told_and_no_other():
    watch = AcceptanceWatch(("cache", "suffix"))
    observe(watch, 5000, [8, 4], [4, 1])
    assert watch.collapsed == {"cache": False, "suffix": False}
    observe(watch, 600, [8, 4], [1, 1])
    assert watch.collapsed == {"cache": True, "suffix": False}
    observe(watch, 600, [8, 4], [4, 1])
    assert not watch.collapsed["cache"]


def test_what_lasts_becomes_usual():
    watch = AcceptanceWatch(("cache",))
    observe(watch, 5000, [8], [4])
    observe(watch, 20_000, [8], [1])
    assert not watch.collapsed["cache"]


def test_load_alone_is_no_collapse():
    watch = AcceptanceWatch(("cache",))
    observe(watch, 5000, [16], [3])
    observe(watch, 600, [1], [1])  # many sequences: few nodes, the likeliest
    assert not watch.collapsed["cache"]
    observe(watch, 5000, [1], [1])
    observe(watch, 600, [16], [3])  # and few sequences again
    assert not watch.collapsed["cache"]


def test_a_source_that_was_never_any_good_has_not_collapsed():
    watch = AcceptanceWatch(("cache",))
    observe(watch, 5000, [8], [0])
    assert watch.collapsed == {"cache": False}


def test_rounds_without_drafts_say_nothing():
    watch = AcceptanceWatch(("cache",))
    observe(watch, 5000, [8], [4])
    observe(watch, 5000, [0], [0])
    assert watch.collapsed == {"cache": False}
