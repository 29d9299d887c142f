"""Connections that are cut for some time."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulate.connection import NOTICED_S, Connection
from cluster.simulate.events import Events

SECONDS = st.floats(0.001, 5.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=4), st.lists(SECONDS, min_size=1, max_size=30))
def test_messages_arrive_in_the_order_in_which_they_were_sent(cuts, gaps):
    """Each once, or never within a cut that lasts."""
    events = Events()
    connection, sent, lost, arrived = Connection(events), [], [], []

    def send(number):
        sent.append(number)
        passes_at = connection.passes_at
        if passes_at is None:
            lost.append(number)
        else:
            events.at(passes_at + 0.0015, arrived.append, number)

    for at, seconds in cuts:
        events.at(at, connection.cut, seconds)
    at = 0.0
    for number, gap in enumerate(gaps):
        at += gap / 10
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
