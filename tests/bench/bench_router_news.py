"""Processor time of a gateway for the news of many routers, over real sockets.

    python -m tests.bench.bench_router_news [--rates 400 4000] [--seconds 4]

Routers' publishers are in a process of their own. rates: messages a second, all routers together; a router sends four,
of which one has its status.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from actors.links.keys import LinkKeys
from cluster.cli.table import plain_table
from cluster.routing.heard_statuses import HeardStatuses
from cluster.routing.known_routers import KnownRouters
from cluster.routing.policy import NEWS_PAUSE_S
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS, RouterNews, decode_news, packed
from cluster.routing.router_status import RouterStatus
from cluster.routing.subscriber import Subscriber
from paceline_testing.router_loads import IDLE

STATUS = RouterStatus(ready=True, live=True, detail="12 draft workers", max_model_len=131_072)
PUBLISHERS = 40  # sockets; more routers would send less each
BLOCKS = 10  # of prompts, in each message


def publish(keys: LinkKeys, pipe: Connection, rate: float, seconds: float, tells_status: bool) -> None:
    publishers = [Publisher([keys.public], "127.0.0.1") for _ in range(PUBLISHERS)]
    pipe.send([publisher.address for publisher in publishers])
    random = np.random.default_rng(0)
    bare = [
        RouterNews(
            router_id=f"router-{number}",
            load=IDLE,
            num_gateways=1,
            num_blocks=8192,
            blocks=packed(random.integers(0, 2**63, BLOCKS).tolist()),
            is_whole=False,
        )
        for number in range(PUBLISHERS)
    ]
    turns = [bare] * 4
    if tells_status:
        turns[0] = [msgspec.structs.replace(one, status=STATUS) for one in bare]
    messages = [msgspec.msgpack.encode(one) for turn in turns for one in turn]
    while not all(publisher.subscribers for publisher in publishers):
        for publisher in publishers:
            publisher.meet()
        time.sleep(0.02)
    pipe.send(None)
    began, sent = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        while sent < elapsed * rate:
            publishers[sent % PUBLISHERS].send(NEWS, messages[sent % len(messages)])
            sent += 1
        time.sleep(0.002)
    pipe.send(sent)
    pipe.recv()
    for publisher in publishers:
        publisher.close()


async def hear(rate: float, seconds: float, tells_status: bool) -> tuple[str, ...]:
    keys = LinkKeys.generate()
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=publish, args=(keys, theirs, rate, seconds, tells_status)
    )
    process.start()
    known, statuses, num_heard, num_bytes = KnownRouters(), HeardStatuses(), 0, 0

    def take(data: bytes) -> None:
        nonlocal num_heard, num_bytes
        num_heard, num_bytes = num_heard + 1, num_bytes + len(data)
        news, now = decode_news(data), time.monotonic()
        known.hear(news, now)
        if news.status is not None:
            statuses.hear(news.router_id, news.status, now)

    subscriber = Subscriber(keys, NEWS, hear=take, pause_s=NEWS_PAUSE_S)
    addresses = await asyncio.to_thread(pipe.recv)
    statuses.follow({f"router-{number}": address for number, address in enumerate(addresses)}, PUBLISHERS)
    subscriber.follow(addresses)
    await asyncio.to_thread(pipe.recv)
    process_s, thread_s = time.process_time(), time.thread_time()
    sent = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(0.3)
    process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    pipe.send(None)
    process.join()
    subscriber.close()
    each = (f"{spent / num_heard * 1e6:.0f}" for spent in (thread_s, process_s))
    assert (statuses.current(time.monotonic() - 0.3) is not None) == tells_status
    told = "yes" if tells_status else "no"
    counts = (f"{rate:,.0f}", told, f"{sent:,}", f"{num_heard:,}", f"{num_bytes / num_heard:.0f}")
    return (*counts, *each, f"{process_s / seconds:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[400.0, 4000.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    rows = [
        asyncio.run(hear(rate, given.seconds, tells_status)) for rate in given.rates for tells_status in (False, True)
    ]
    columns = ("messages/s", "statuses", "sent", "heard", "bytes each", "us, event loop", "us, process", "processors")
    print(plain_table("News of routers", columns, rows))


if __name__ == "__main__":
    main()
