"""Rounds are kept of the routers that were answered last."""

from actors.links.server import Peer
from actors.workers import last_rounds
from actors.workers.last_rounds import LastRounds


def test_the_router_that_was_answered_longest_ago_makes_room(monkeypatch):
    monkeypatch.setattr(last_rounds, "_MOST_PEERS", 2)
    rounds: LastRounds[int] = LastRounds()
    one, two, three = (Peer(name) for name in (b"one", b"two", b"three"))
    assert [rounds.note(*told) for told in ((one, 1), (two, 2), (one, 3))] == [None, None, None]
    assert rounds.note(three, 4) == two
    assert [rounds.get(peer) for peer in (one, two, three)] == [3, None, 4]
    rounds.clear()
    assert rounds.get(one) is None
