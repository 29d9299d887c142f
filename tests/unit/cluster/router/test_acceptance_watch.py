"""The alarm on drafts that are suddenly accepted far more seldom."""

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "runs",
    [
        [(5000, 8, 4), (20_000, 8, 1)],
        [(5000, 16, 3), (600, 1, 1), (5000, 1, 1), (600, 16, 3)],
        [(5000, 8, 0)],
        [(5000, 8, 4), (5000, 0, 0)],
    ],
    ids=["what lasts becomes usual", "load alone", "never any good", "rounds without drafts"],
)
def test_what_is_no_collapse(runs):
    """runs: rounds, nodes that each verifies, and accepts. With many sequences each has few nodes, the likeliest."""
    watch = AcceptanceWatch(("cache",))
    for rounds, verified, accepted in runs:
        observe(watch, rounds, [verified], [accepted])
        assert not watch.collapsed["cache"]
