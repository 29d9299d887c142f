"""Processor time of a gateway for the news of many routers, over real sockets.

    python -m tests.bench.bench_router_news [--rates 400 4000] [--seconds 4]

Routers' publishers are in a process of their own. rates: messages a second, all routers together; a router sends four.
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
from cluster.routing.known_routers import KnownRouters
from cluster.routing.policy import NEWS_PAUSE_S
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS, RouterNews, decode_news, packed
from cluster.routing.subscriber import Subscriber
from paceline_testing.router_loads import IDLE

PUBLISHERS = 40  # sockets; more routers would send less each
BLOCKS = 10  # of prompts, in each message


def publish(keys: LinkKeys, pipe: Connection, rate: float, seconds: float) -> None:
    publishers = [Publisher([keys.public], "127.0.0.1") for _ in range(PUBLISHERS)]
    pipe.send([publisher.address for publisher in publishers])
    random = np.random.default_rng(0)
    messages = [
        msgspec.msgpack.encode(
            RouterNews(
                router_id=f"router-{number}",
                load=IDLE,
                num_gateways=1,
                num_blocks=8192,
                blocks=packed(random.integers(0, 2**63, BLOCKS).tolist()),
                is_whole=False,
            )
        )
        for number in range(PUBLISHERS)
    ]
    while not all(publisher.subscribers for publisher in publishers):
        for publisher in publishers:
            publisher.meet()
        time.sleep(0.02)
    pipe.send(None)
    began, sent = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        while sent < elapsed * rate:
            publishers[sent % PUBLISHERS].send(NEWS, messages[sent % PUBLISHERS])
            sent += 1
        time.sleep(0.002)
    pipe.send(sent)
    pipe.recv()
    for publisher in publishers:
        publisher.close()


async def hear(rate: float, seconds: float) -> tuple[str, ...]:
    keys = LinkKeys.generate()
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=publish, args=(keys, theirs, rate, seconds))
    process.start()
    known, num_heard = KnownRouters(), 0

    def take(data: bytes) -> None:
        nonlocal num_heard
        num_heard += 1
        known.hear(decode_news(data), time.monotonic())

    subscriber = Subscriber(keys, NEWS, take, pause_s=NEWS_PAUSE_S)
    subscriber.follow(await asyncio.to_thread(pipe.recv))
    await asyncio.to_thread(pipe.recv)
    process_s, thread_s = time.process_time(), time.thread_time()
    sent = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(0.3)
    process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    pipe.send(None)
    process.join()
    subscriber.close()
    each = (f"{spent / num_heard * 1e6:.0f}" for spent in (thread_s, process_s))
    return (f"{rate:,.0f}", f"{sent:,}", f"{num_heard:,}", *each, f"{process_s / seconds:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[400.0, 4000.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    rows = [asyncio.run(hear(rate, given.seconds)) for rate in given.rates]
    columns = ("messages/s", "sent", "heard", "us, event loop", "us, process", "processors")
    print(plain_table("News of routers", columns, rows))


if __name__ == "__main__":
    main()
