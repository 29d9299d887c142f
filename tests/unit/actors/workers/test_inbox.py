"""Masks are taken out of turn, whatever arrives before and after them; all other messages keep their order."""

from __future__ import annotations

import time
from collections import deque

import pytest

from actors.errors import LinkError
from actors.links.server import Peer
from actors.messages import Hello, Message, RoundMasks, VerifyAhead, VerifyBatch
from actors.workers import inbox as inbox_module
from actors.workers.inbox import Inbox

OURS, THEIRS = Peer(b"ours"), Peer(b"theirs")
BATCH = VerifyBatch(7, [], masks_follow=True)
MASKS = RoundMasks(7, [])
OTHERS = [
    (THEIRS, VerifyBatch(7, [], masks_follow=True)),
    (THEIRS, RoundMasks(7, [None])),
    (OURS, Hello()),
    (THEIRS, VerifyAhead(8, 7, [])),
]


def inbox_of(*messages: tuple[Peer, Message], timeout_s: float = 0.2) -> Inbox:
    """Nothing arrives after these messages."""
    link = deque(messages)

    def receive(seconds: float) -> tuple[Peer, Message] | None:
        if not link:
            time.sleep(seconds)
        return link.popleft() if link else None

    return Inbox(receive, timeout_s=timeout_s)


def rest_of(inbox: Inbox) -> list[tuple[Peer, Message]]:
    found = []
    while (received := inbox.next(0.0)) is not None:
        found.append(received)
    return found


def test_a_batch_without_masks_waits_for_none() -> None:
    assert inbox_of().masks_of(OURS, VerifyBatch(7, [])) is None


@pytest.mark.parametrize("place", range(len(OTHERS) + 1))
def test_other_messages_wait_in_their_order(place: int) -> None:
    inbox = inbox_of(*OTHERS[:place], (OURS, MASKS), *OTHERS[place:])
    wait = inbox.masks_of(OURS, BATCH)
    assert wait is not None
    assert wait() is MASKS
    assert rest_of(inbox) == OTHERS


def test_two_routers_get_their_own_masks_in_either_order() -> None:
    theirs = RoundMasks(7, [None])
    for masks in ([(OURS, MASKS), (THEIRS, theirs)], [(THEIRS, theirs), (OURS, MASKS)]):
        inbox = inbox_of((THEIRS, BATCH), *masks)
        assert inbox.masks_of(OURS, BATCH)() is MASKS  # type: ignore[misc]
        assert inbox.next(0.0) == (THEIRS, BATCH)
        assert inbox.masks_of(THEIRS, BATCH)() is theirs  # type: ignore[misc]
        assert rest_of(inbox) == []


def test_masks_of_an_ended_round_are_dropped_and_those_that_came_twice_are_left_to_the_loop() -> None:
    inbox = inbox_of((OURS, RoundMasks(6, [])), (OURS, MASKS), (OURS, MASKS))
    assert inbox.masks_of(OURS, BATCH)() is MASKS  # type: ignore[misc]
    assert rest_of(inbox) == [(OURS, MASKS)]


@pytest.mark.parametrize("messages", [[], [(THEIRS, MASKS)], [(OURS, RoundMasks(6, []))]])
def test_masks_that_do_not_come_end_the_wait_in_time(messages: list[tuple[Peer, Message]]) -> None:
    began = time.monotonic()
    with pytest.raises(LinkError, match=r"masks of round 7 did not come within 0\.2 s"):
        inbox_of(*messages).masks_of(OURS, BATCH)()  # type: ignore[misc]
    assert 0.2 <= time.monotonic() - began < 5.0


def test_a_loop_that_stops_waits_no_longer() -> None:
    inbox = Inbox(lambda seconds: None, has_stopped=lambda: True, timeout_s=1e9)
    with pytest.raises(LinkError, match="masks of round 7"):
        inbox.masks_of(OURS, BATCH)()  # type: ignore[misc]


def test_more_messages_than_the_limit_end_the_wait(monkeypatch) -> None:
    monkeypatch.setattr(inbox_module, "_MOST_WAITING", 3)
    inbox = inbox_of(*OTHERS, (OURS, MASKS), timeout_s=1e9)
    with pytest.raises(LinkError, match="3 messages wait for the masks of round 7; that is the limit"):
        inbox.masks_of(OURS, BATCH)()  # type: ignore[misc]
