"""Announcers and listeners over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from actors.links.keys import LinkAddress, LinkKeys
from cluster.routing.announcer import Announcer
from cluster.routing.prefix_blocks import BLOCK_TOKENS, namespace_block, prefix_blocks
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS, WHOLE, RouterNews, decode_news
from cluster.routing.router_status import RouterStatus
from cluster.routing.subscriber import Subscriber
from paceline_testing.router_loads import IDLE

PROMPT = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
BLOCKS = prefix_blocks(PROMPT, "shared")
ROOM = 100 * BLOCK_TOKENS  # tokens


class Heard:
    """A gateway, which keeps all the news."""

    def __init__(self, keys: LinkKeys) -> None:
        self.news: list[RouterNews] = []
        topics = NEWS, WHOLE + secrets.token_hex(4).encode()
        self.listener = Subscriber(keys, *topics, hear=lambda data: self.news.append(decode_news(data)))

    async def wait(self, condition: Callable[[RouterNews], bool], announce: Callable[[], None]) -> RouterNews:
        """The first news for which the condition is true."""
        async with asyncio.timeout(20):
            while not (found := [news for news in self.news if condition(news)]):
                announce()
                await asyncio.sleep(0.02)
        return found[0]


@pytest.fixture
def keys() -> LinkKeys:
    return LinkKeys.generate()


@pytest.fixture
async def routers(keys: LinkKeys) -> AsyncIterator[dict[str, Announcer]]:
    made = {name: Publisher([keys.public], "127.0.0.1") for name in ("a", "b")}
    yield {name: Announcer(name, publisher) for name, publisher in made.items()}
    for publisher in made.values():
        publisher.close()


@pytest.fixture
async def gateway(keys: LinkKeys) -> AsyncIterator[Heard]:
    one = Heard(keys)
    yield one
    one.listener.close()


async def test_a_gateway_hears_what_is_there_and_then_what_is_new(routers, gateway):
    announcer = routers["a"]
    announcer.announce(None, ROOM)
    announcer.use(prefix_blocks(PROMPT[: 2 * BLOCK_TOKENS], "shared"), "own")
    gateway.listener.follow(one._publisher.address for one in routers.values())

    def announce() -> None:
        for one in routers.values():
            one.announce(IDLE, ROOM)

    whole = await gateway.wait(lambda news: news.router_id == "a" and news.is_whole, announce)
    assert whole.block_hashes() == [*reversed(BLOCKS[:2]), namespace_block("own")]
    assert (whole.load, whole.num_gateways, whole.num_blocks) == (IDLE, 1, 100)
    await gateway.wait(lambda news: news.router_id == "b", announce)
    announcer.use(prefix_blocks(PROMPT, "shared"), "own")
    more = await gateway.wait(lambda news: news.router_id == "a" and not news.is_whole and bool(news.blocks), announce)
    assert more.block_hashes() == [*reversed(BLOCKS), namespace_block("own")]


async def test_a_gateway_that_comes_later_hears_all_and_one_that_goes_is_not_counted(routers, gateway, keys):
    announcer = routers["a"]
    announcer.announce(IDLE, ROOM)
    announcer.use(prefix_blocks(PROMPT, "shared"), "own")
    addresses = {"a": announcer._publisher.address}
    gateway.listener.follow(addresses.values())
    await gateway.wait(lambda news: True, lambda: announcer.announce(IDLE, ROOM))
    second = Heard(keys)
    await gateway.wait(lambda news: news.is_whole, lambda: None)
    gateway.news.clear()
    second.listener.follow(addresses.values())
    whole = await second.wait(lambda news: news.is_whole, lambda: announcer.announce(IDLE, ROOM))
    assert (whole.num_gateways, len(whole.block_hashes())) == (2, 4)
    second.listener.close()
    await gateway.wait(lambda news: news.num_gateways == 2, lambda: announcer.announce(IDLE, ROOM))
    assert not any(news.is_whole or news.blocks for news in gateway.news)  # they know it
    gateway.news.clear()
    await gateway.wait(lambda news: news.num_gateways == 1, lambda: announcer.announce(IDLE, ROOM))


async def test_a_status_is_told_to_whoever_comes_at_each_change_and_once_in_a_while(routers, gateway, keys):
    announcer, statuses = routers["a"], [RouterStatus(ready=ready, live=True) for ready in (False, True)]
    gateway.listener.follow([announcer._publisher.address])
    await gateway.wait(lambda news: news.status == statuses[0], lambda: announcer.announce(None, ROOM, statuses[0]))
    second = Heard(keys)
    second.listener.follow([announcer._publisher.address])
    whole = await second.wait(lambda news: news.is_whole, lambda: announcer.announce(None, ROOM, statuses[0]))
    assert whole.status == statuses[0]
    second.listener.close()
    gateway.news.clear()
    for number in range(12):
        announcer.announce(IDLE, ROOM, statuses[number >= 6])
    await gateway.wait(lambda news: len(gateway.news) == 12, lambda: None)
    told = [number for number, news in enumerate(gateway.news) if news.status is not None]
    assert 6 in told
    assert gateway.news[6].status == statuses[1]
    assert [after - before for before, after in itertools.pairwise(told) if after > 6 and before >= 6] == [4]
    assert len(told) <= 4


async def test_a_router_that_is_not_followed_any_more_is_not_heard(routers, gateway):
    addresses = {name: one._publisher.address for name, one in routers.items()}
    gateway.listener.follow(addresses.values())

    def announce() -> None:
        for one in routers.values():
            one.announce(IDLE, ROOM)

    await gateway.wait(lambda news: news.router_id == "b", announce)
    gateway.listener.follow([addresses["a"]])
    await asyncio.sleep(0.1)
    gateway.news.clear()
    for _ in range(10):
        announce()
        await asyncio.sleep(0.02)
    assert {news.router_id for news in gateway.news} == {"a"}


async def test_a_stranger_hears_nothing(routers, gateway):
    announcer = routers["a"]
    stranger = Heard(LinkKeys.generate())
    for one in (gateway, stranger):
        one.listener.follow([announcer._publisher.address])
    await gateway.wait(lambda news: True, lambda: announcer.announce(IDLE, ROOM))
    for _ in range(10):
        announcer.announce(IDLE, ROOM)
        await asyncio.sleep(0.02)
    assert stranger.news == []
    stranger.listener.close()


async def test_a_target_that_lost_its_memory_has_nothing_warm(routers, gateway):
    announcer = routers["a"]
    gateway.listener.follow([announcer._publisher.address])
    announcer.announce(IDLE, ROOM)
    announcer.use(prefix_blocks(PROMPT, "shared"), "own")
    await gateway.wait(lambda news: len(news.block_hashes()) == 4, lambda: announcer.announce(IDLE, ROOM))
    announcer.forget()
    gateway.news.clear()
    emptied = await gateway.wait(lambda news: news.is_whole, lambda: announcer.announce(IDLE, ROOM))
    assert emptied.block_hashes() == []


async def test_a_router_at_the_port_of_one_that_has_gone_is_heard_on(routers, gateway, keys):
    """The gateway hears of the new router before it forgets the old one."""
    there, gone = routers["a"]._publisher.address, LinkKeys.generate().public
    old = LinkAddress(there.endpoint, gone)
    gateway.listener.follow([old])
    gateway.listener.follow([old, there])
    gateway.listener.follow([there])
    await gateway.wait(lambda news: True, lambda: routers["a"].announce(IDLE, ROOM))


async def test_a_gateway_that_was_busy_catches_up_and_others_have_their_turn(routers, keys):
    """What a router has said meanwhile lies in the socket, and one message in the middle cannot be read."""
    publisher = routers["a"]._publisher
    heard: list[bytes] = []
    turns: list[int] = []

    def hear(data: bytes) -> None:
        heard.append(data)
        if data == b"7":
            raise TypeError("what is this?")

    listener = Subscriber(keys, NEWS, hear=hear)
    listener.follow([publisher.address])
    async with asyncio.timeout(20):
        while not publisher.subscribers:
            publisher.meet()
            await asyncio.sleep(0.01)
        for number in range(1000):
            publisher.send(NEWS, b"%d" % number)
        time.sleep(0.3)  # noqa: ASYNC251  # the gateway is busy
        while len(heard) < 1000:
            turns.append(len(heard))
            await asyncio.sleep(0)
    assert heard == [b"%d" % number for number in range(1000)]
    assert len(turns) >= 20
    listener.close()


async def test_long_messages_leave_others_their_turn(routers, keys):
    publisher = routers["a"]._publisher
    heard: list[bytes] = []
    turns = set[int]()
    listener = Subscriber(keys, NEWS, hear=heard.append)
    listener.follow([publisher.address])
    async with asyncio.timeout(20):
        while not publisher.subscribers:
            publisher.meet()
            await asyncio.sleep(0.01)
        for _ in range(20):
            publisher.send(NEWS, bytes(200_000))
        time.sleep(0.3)  # noqa: ASYNC251  # the gateway is busy
        while len(heard) < 20:
            turns.add(len(heard))
            await asyncio.sleep(0)
    assert len(turns) == 20  # after each message
    listener.close()


async def test_a_router_that_does_not_come_to_announce_keeps_no_more_than_it_has(routers, gateway):
    announcer = routers["a"]
    gateway.listener.follow([announcer._publisher.address])
    small = 5 * BLOCK_TOKENS
    await gateway.wait(lambda news: True, lambda: announcer.announce(IDLE, small))
    for number in range(50):
        announcer.use(prefix_blocks(PROMPT + number, "shared"), "own")
    assert len(announcer._used) <= 10
    gateway.news.clear()
    whole = await gateway.wait(lambda news: bool(news.blocks), lambda: announcer.announce(IDLE, small))
    assert whole.is_whole
    assert whole.block_hashes()[1:] == [*reversed(prefix_blocks(PROMPT + 49, "shared")), namespace_block("own")]
