"""Connections that are cut for some time."""

import random

import pytest

from cluster.simulate.connection import NOTICED_S, Connection
from cluster.simulate.events import Events

HOP_S = 0.0015


@pytest.mark.parametrize("seed", range(100))
def test_messages_arrive_in_the_order_in_which_they_were_sent(seed):
    """Each once, or never within a cut that lasts."""
    events, rng = Events(), random.Random(seed)
    connection, sent, lost, arrived = Connection(events), [], [], []

    def send(number):
        sent.append(number)
        passes_at = connection.passes_at
        if passes_at is None:
            lost.append(number)
        else:
            events.at(passes_at + HOP_S, arrived.append, number)

    cuts = [(rng.uniform(0.0, 3.0), rng.uniform(0.0, 2.0)) for _ in range(rng.randint(0, 3))]
    for at, seconds in cuts:
        events.at(at, connection.cut, seconds)
    for number, at in enumerate(sorted(rng.uniform(0.0, 6.0) for _ in range(100))):
        events.at(at, send, number)
    events.run(60.0)
    assert arrived == sorted(arrived)
    assert sorted(arrived + lost) == sent
    assert not lost or sum(seconds for _, seconds in cuts) > NOTICED_S


def test_both_ends_notice_a_cut_that_lasts():
    events = Events()
    connection = Connection(events)
    connection.cut(NOTICED_S + 1.0)
    assert connection.is_cut
    assert not connection.is_broken
    assert connection.passes_at is None
    events.run(NOTICED_S)
    assert connection.is_broken
    assert connection.passes_at == NOTICED_S + 1.0
    events.run(NOTICED_S + 1.0)
    assert not connection.is_cut
    assert connection.passes_at == events.now
