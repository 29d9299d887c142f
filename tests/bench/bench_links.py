"""Round trip of a message between a router and a worker process, through CURVE on loopback.

    python tests/bench/bench_links.py [--calls 5000] [--tree-nodes 16] [--sequences 8]

Prints p50 and p99 in microseconds for a Hello and for a verify round, the processor time that a call takes from the
router's event loop, and rounds a second with several calls in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from actors.draft_tree import DraftTree
from actors.links.client import AsyncLink, Request
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import LinkServer
from actors.messages import Hello, SequenceDelta, Verdict, VerifyBatch, VerifyItem, VerifyResult, WorkerInfo


def work(pipe: Connection, client_public_key: bytes) -> None:
    with LinkServer(LinkKeys.generate(), [client_public_key]) as server:
        pipe.send(server.address)
        while not pipe.poll():
            read = server.recv(0.2)
            if read is None:
                continue
            peer, message = read
            if isinstance(message, Hello):
                server.send(peer, WorkerInfo("target", 1, 49152, 2048, 16, 1024))
            elif isinstance(message, VerifyBatch):
                path = np.arange(3, dtype=np.int32)
                verdicts = [Verdict(item.delta.seq_id, 100, 17, 5, path) for item in message.items]
                server.send(peer, VerifyResult(message.round_id, verdicts))


def verify_batch(round_id: int, sequences: int, nodes: int) -> VerifyBatch:
    tokens = np.arange(nodes, dtype=np.int32)
    delta = np.arange(4, dtype=np.int32)
    tree = DraftTree.chain(tokens, np.ones(nodes))
    items = [VerifyItem(SequenceDelta(index, 96, delta), 64, tree) for index in range(sequences)]
    return VerifyBatch(round_id, items)


async def time_calls(link: AsyncLink, requests: list[Request], name: str) -> None:
    seconds = []
    busy_before = time.thread_time()
    for request in requests:
        started = time.perf_counter()
        await link.call(request, 5.0)
        seconds.append(time.perf_counter() - started)
    busy = (time.thread_time() - busy_before) / len(requests)
    p50, p99 = np.percentile(seconds, [50, 99])
    print(f"{name:32s} p50 {p50 * 1e6:6.0f} us   p99 {p99 * 1e6:6.0f} us   event loop {busy * 1e6:4.0f} us a call")


async def measure(address: LinkAddress, keys: LinkKeys, calls: int, sequences: int, nodes: int) -> None:
    link = AsyncLink(address, keys)
    await time_calls(link, [Hello()] * 200, "Hello, warming up")
    await time_calls(link, [Hello()] * calls, "Hello")
    rounds: list[Request] = [verify_batch(index, sequences, nodes) for index in range(calls)]
    await time_calls(link, rounds, f"verify, {sequences} sequences of {nodes} nodes")
    started = time.perf_counter()
    for first in range(0, calls, 32):
        await asyncio.gather(*(link.call(request, 5.0) for request in rounds[first : first + 32]))
    print(f"{'32 verify rounds in flight':32s} {calls / (time.perf_counter() - started):,.0f} a second")
    link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tree-nodes", type=int, default=16)
    args = parser.parse_args()
    keys = LinkKeys.generate()
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(there, keys.public))
    worker.start()
    asyncio.run(measure(here.recv(), keys, args.calls, args.sequences, args.tree_nodes))
    here.send("stop")
    worker.join()


if __name__ == "__main__":
    main()
