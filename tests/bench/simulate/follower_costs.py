"""What it costs routers to follow the shared cache, and how long an entry takes from the server to its readers.

    python -m tests.bench.simulate.follower_costs [--polling] [--cluster] [reading | idle | node | killed]

A server of its own. reading: one log of entries of 64 answers of 16 tokens. idle: 64 namespaces without traffic, with
their indexes, soft counts, and the watch for purges. node: 1, 2 and 8 processes of a node that follow the same 8
namespaces, with an entry of 1,024 tokens every 0.1 s or every 2 s in each; the writer's own load is taken off the
server's figures. killed: the same 8 processes; the one that reads for the node is killed in the middle. --polling: as
where logs are not followed. --cluster: the server is a Redis Cluster of one.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from cache_service.counts.soft_exchange import SoftExchange
from cache_service.formats.documents import Piece
from cache_service.formats.entry_codec import encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.epoch_watch import EpochWatch
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.index.warm_index import WarmIndex
from cache_service.log.follower import Follower
from cache_service.log.log_feed import LogFeed
from cache_service.log.log_reader import LogReader
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.store import Store
from cluster.cli.table import plain_table

ENTRIES, PIECES, TOKENS = 500, 64, 16
IDLE_NAMESPACES, SETTLE_S, IDLE_S = 64, 100.0, 60.0
BUSY_NAMESPACES, BUSY_S = 8, 10.0
LATE_S = 20.0


class Nobody:
    """A listener that keeps nothing."""

    def begin(self, manifest: object, segments: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Arrivals(Nobody):
    """Notes which entries arrive and when. The first document id of an entry holds its number and time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.delays_s: list[float] = []
        self.resets = 0

    def entry(self, entry_id: str, pieces: list[Piece]) -> None:
        number, at_ns = np.frombuffer(pieces[0].document_id, np.int64)
        self.numbers.append(int(number))
        self.delays_s.append((time.monotonic_ns() - int(at_ns)) / 1e9)

    def reset(self) -> None:
        self.resets += 1


@dataclass(frozen=True)
class Server:
    """What the server has done so far, without questions about it."""

    calls: int
    sent_bytes: int
    cpu_s: float

    @classmethod
    def now(cls, connection: Connection) -> Server:
        info: dict[str, Any] = connection.client().info("all")
        asking = ("cmdstat_info", "cmdstat_ping")
        calls = sum(stat["calls"] for name, stat in info.items() if name.startswith("cmdstat_") and name not in asking)
        return cls(calls, info["total_net_output_bytes"], info["used_cpu_user"] + info["used_cpu_sys"])

    def since(self, before: Server) -> tuple[int, int, float]:
        return self.calls - before.calls, self.sent_bytes - before.sent_bytes, self.cpu_s - before.cpu_s


def names() -> list[str]:
    return [f"tenant{number}" for number in range(IDLE_NAMESPACES)]


def opener(settings: ConnectionSettings) -> Callable[[str], tuple[Store, FrameCodec]]:
    connection = Connection(settings)

    def open_namespace(name: str) -> tuple[Store, FrameCodec]:
        keys = StoreKeys("model", name)
        return Store(connection, keys), FrameCodec(keys, None)

    return open_namespace


def begin_epochs(settings: ConnectionSettings, count: int) -> None:
    for name in names()[:count]:
        opener(settings)(name)[0].begin_epoch()


def entry(codec: FrameCodec, number: int, num_pieces: int, num_tokens: int, rng: np.random.Generator) -> bytes:
    """An entry with its number and the time."""
    first = np.array([number, time.monotonic_ns()], np.int64).tobytes()
    pieces = [
        Piece(
            rng.bytes(16) if row else first, 0, rng.integers(0, 50_000, num_tokens).astype(np.int32), time_s=number + 1
        )
        for row in range(num_pieces)
    ]
    return encode_entry(codec, pieces)


def reading(settings: ConnectionSettings) -> None:
    rng = np.random.default_rng(0)
    connection, (store, codec), num_bytes = Connection(settings), opener(settings)("reading"), 0
    for number in range(ENTRIES):
        frame = entry(codec, number, PIECES, TOKENS, rng)
        num_bytes += len(frame)
        store.append([frame], 10 * ENTRIES)
    reader = LogReader(store, codec, Nobody())  # type: ignore[arg-type]
    before, began = Server.now(connection), time.process_time()
    while reader.step():
        pass
    read_s, (_, _, server_s) = time.process_time() - began, Server.now(connection).since(before)
    began, count = time.process_time(), 500
    for _ in range(count):
        reader.step()
    idle_s = (time.process_time() - began) / count
    tokens = ENTRIES * PIECES * TOKENS
    header = ("tokens", "bytes a token", "reading, us a token", "server, us a token", "poll, us")
    figures = (num_bytes / tokens, 1e6 * read_s / tokens, 1e6 * server_s / tokens, 1e6 * idle_s)
    print(plain_table("Following one namespace", header, [[f"{tokens:,}", *(f"{one:.3f}" for one in figures)]]))


def idle(settings: ConnectionSettings, feed: LogFeed | None) -> None:
    connection, open_namespace = Connection(settings), opener(settings)
    begin_epochs(settings, IDLE_NAMESPACES)
    index = WarmIndex(open_namespace, WarmIndexSettings(directory=None), feed)
    soft = SoftExchange(open_namespace, feed=feed)
    watch = EpochWatch(connection, lambda name: StoreKeys("model", name), feed=feed)
    for name in names():
        index.follow(name)
        soft.follow(name)
        watch.watch(name)
    time.sleep(SETTLE_S)  # until nothing of them has been used lately, and compactors rest
    before, began = Server.now(connection), time.process_time()
    time.sleep(IDLE_S)
    used_s, (calls, sent, server_s) = time.process_time() - began, Server.now(connection).since(before)
    header = ("namespaces", "process, % of a processor", "server, %", "commands/s", "bytes/s")
    figures = [f"{100 * used_s / IDLE_S:.2f}", f"{100 * server_s / IDLE_S:.2f}"]
    figures += [f"{calls / IDLE_S:.1f}", f"{sent / IDLE_S:,.0f}"]
    print(plain_table("Namespaces without traffic", header, [[f"{IDLE_NAMESPACES}", *figures]]))
    for each in (index, soft, watch):
        each.close()


def follow(pipe: Pipe, settings: ConnectionSettings, directory: Path, polling: bool) -> None:
    """A process that follows the busy namespaces until it has so many entries of each as it is told at the end."""
    feed = None if polling else LogFeed(settings, directory)
    follower = Follower(opener(settings), feed=feed)
    listeners = [Arrivals() for _ in range(BUSY_NAMESPACES)]
    for name, listener in zip(names(), listeners, strict=False):
        follower.follow(name, listener)  # type: ignore[arg-type]
    began = time.process_time()
    pipe.send(None)
    while (num_entries := pipe.recv()) is None:
        began = time.process_time()
        for listener in listeners:
            listener.delays_s.clear()
            listener.numbers.clear()
    deadline = time.monotonic() + LATE_S
    while any(len(each.numbers) < num_entries for each in listeners) and time.monotonic() < deadline:
        time.sleep(0.1)
    used_s = time.process_time() - began
    pipe.send((used_s, [(each.numbers, each.delays_s, each.resets) for each in listeners]))
    follower.close()
    if feed is not None:
        feed.close()


@contextmanager
def followers(
    count: int, settings: ConnectionSettings, directory: Path, polling: bool
) -> Iterator[list[tuple[BaseProcess, Pipe]]]:
    context, started = mp.get_context("forkserver"), []
    context.set_forkserver_preload([__name__])
    for _ in range(count):
        pipe, theirs = context.Pipe()
        process = context.Process(target=follow, args=(theirs, settings, directory, polling))
        process.start()
        started.append((process, pipe))
    for _, pipe in started:
        pipe.recv()
    time.sleep(3.0)
    yield started
    for process, _ in started:
        process.join()


def write(settings: ConnectionSettings, every_s: float, seconds: float) -> int:
    """Write to all busy namespaces in turn. Returns the number of entries in each."""
    open_namespace, rng = opener(settings), np.random.default_rng(0)
    count = int(seconds / every_s)
    opened = [open_namespace(name) for name in names()[:BUSY_NAMESPACES]]
    began = time.monotonic()
    for number in range(count):
        for row, (store, codec) in enumerate(opened):
            pause_s = began + (number + row / BUSY_NAMESPACES) * every_s - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            store.append([entry(codec, number, 1, 1024, rng)], 100_000)
    return count


def node(settings: ConnectionSettings, polling: bool) -> None:
    connection = Connection(settings)
    header = (
        "every s",
        "processes",
        "commands/s",
        "kB/s",
        "server %",
        "median process %",
        "largest %",
        "p50 ms",
        "p99",
    )
    print(f"Processes of a node that follow {BUSY_NAMESPACES} namespaces")
    print("  ".join(header))
    for every_s in (0.1, 2.0):
        alone = (0, 0, 0.0)
        for count in (0, 1, 2, 8):
            connection.client().flushall()
            begin_epochs(settings, BUSY_NAMESPACES)
            with (
                tempfile.TemporaryDirectory() as folder,
                followers(count, settings, Path(folder), polling) as processes,
            ):
                for _, pipe in processes:
                    pipe.send(None)
                before, began = Server.now(connection), time.monotonic()
                num_entries = write(settings, every_s, BUSY_S)
                for _, pipe in processes:
                    pipe.send(num_entries)
                answers = [pipe.recv() for _, pipe in processes]
                seconds, used = time.monotonic() - began, Server.now(connection).since(before)
            if not count:
                alone = used
                continue
            for _, listeners in answers:
                for numbers, _, _ in listeners:
                    assert numbers == list(range(num_entries)), "an entry was lost, or came twice"
            delays = np.array([delay for _, each in answers for _, found, _ in each for delay in found]) * 1e3
            shares = sorted(100 * used_s / seconds for used_s, _ in answers)
            row = [
                f"{every_s}",
                f"{count}",
                f"{(used[0] - alone[0]) / seconds:,.0f}",
                f"{(used[1] - alone[1]) / seconds / 1e3:,.0f}",
                f"{100 * (used[2] - alone[2]) / seconds:.1f}",
                f"{shares[len(shares) // 2]:.1f}",
                f"{shares[-1]:.1f}",
                f"{np.percentile(delays, 50):.0f}",
                f"{np.percentile(delays, 99):.0f}",
            ]
            print("  ".join(cell.rjust(len(name)) for cell, name in zip(row, header, strict=True)), flush=True)


def killed(settings: ConnectionSettings) -> None:
    """Kill the process that reads for the node, three times."""
    begin_epochs(settings, BUSY_NAMESPACES)
    with tempfile.TemporaryDirectory() as folder, followers(8, settings, Path(folder), False) as processes:
        for _, pipe in processes:
            pipe.send(None)
        writing = threading.Thread(target=write, args=(settings, 0.1, BUSY_S))
        writing.start()
        dead = []
        for _ in range(3):
            time.sleep(BUSY_S / 4)
            reader = holder(Path(folder))
            os.kill(reader, signal.SIGKILL)
            dead.append(reader)
        writing.join()
        living = [pipe for process, pipe in processes if process.pid not in dead]
        for pipe in living:
            pipe.send(int(BUSY_S / 0.1))
        answers = [pipe.recv() for pipe in living]
    found: Counter[str] = Counter()
    delays: list[float] = []
    for _, listeners in answers:
        for numbers, times, resets in listeners:
            found["entries"] += len(numbers)
            found["lost"] += int(BUSY_S / 0.1) - len(set(numbers))
            found["twice"] += len(numbers) - len(set(numbers))
            found["resets"] += resets
            delays += times
    p50, p99 = np.percentile(np.array(delays) * 1e3, [50, 99])
    row = [str(len(living)), *(str(found[name]) for name in ("entries", "lost", "twice", "resets"))]
    row += [f"{p50:.0f}", f"{p99:.0f}", f"{1e3 * max(delays):.0f}"]
    header = ("processes left", "entries read", "lost", "twice", "resets", "delay p50, ms", "p99", "longest")
    print(plain_table("The process that reads for the node is killed three times", header, [row]))


def holder(directory: Path) -> int:
    """The process that holds the lock."""
    (lock,) = directory.glob("*.lock")
    node_of = lock.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].endswith(f":{node_of}"):
            return int(words[4])
    raise LookupError("nobody holds the lock")


@contextmanager
def server_settings(is_cluster: bool) -> Iterator[ConnectionSettings]:
    extra = ("cluster-enabled yes",) if is_cluster else ()
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), extra=extra) as server:
        settings = server.settings
        if is_cluster:
            Connection(settings).client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            settings = replace(settings, url=settings.url.replace("redis://", "redis+cluster://"))
            time.sleep(2.0)  # until it is ready
        yield settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["reading", "idle", "node", "killed"])
    parser.add_argument("--polling", action="store_true")
    parser.add_argument("--cluster", action="store_true")
    options = parser.parse_args()
    for what in options.what:
        with server_settings(options.cluster) as settings:
            if what == "reading":
                reading(settings)
            elif what == "idle":
                feed = None if options.polling else LogFeed(settings)
                idle(settings, feed)
                if feed is not None:
                    feed.close()
            elif what == "node":
                node(settings, options.polling)
            else:
                killed(settings)


if __name__ == "__main__":
    main()
