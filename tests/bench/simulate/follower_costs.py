"""What it costs a router to follow a namespace of the shared cache: what one follower a node would save the others.

    python -m tests.bench.simulate.follower_costs

A server of its own, entries of 64 answers of 16 tokens. reading: Redis, frames and codec, which followers of one node
could share. An idle namespace is polled once or twice a second.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from cache_service.formats.documents import Piece
from cache_service.formats.entry_codec import encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.log_reader import LogReader
from cache_service.store.connection import Connection
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.store import Store
from cluster.cli.table import plain_table

ENTRIES, PIECES, TOKENS = 500, 64, 16


class Nobody:
    """A listener that keeps nothing."""

    def begin(self, manifest: object, segments: object) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def main() -> None:
    keys, rng = StoreKeys("model", "open"), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        connection, codec = Connection(server.settings), FrameCodec(keys, None)
        store, num_bytes = Store(connection, keys), 0
        for entry in range(ENTRIES):
            pieces = [
                Piece(rng.bytes(16), 0, rng.integers(0, 50_000, TOKENS).astype(np.int32), time_s=entry)
                for _ in range(PIECES)
            ]
            frame = encode_entry(codec, pieces)
            num_bytes += len(frame)
            store.append([frame], 10 * ENTRIES)
        reader = LogReader(store, codec, Nobody())  # type: ignore[arg-type]
        before, began = connection.client().info("cpu"), time.process_time()
        while reader.step():
            pass
        read_s, after = time.process_time() - began, connection.client().info("cpu")
        began, count = time.process_time(), 500
        for _ in range(count):
            reader.step()
        idle_s = (time.process_time() - began) / count
        server_s = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
    tokens = ENTRIES * PIECES * TOKENS
    header = ("tokens", "bytes a token", "reading, us a token", "server, us a token", "idle poll, us")
    figures = (num_bytes / tokens, 1e6 * read_s / tokens, 1e6 * server_s / tokens, 1e6 * idle_s)
    print(plain_table("Following one namespace", header, [[f"{tokens:,}", *(f"{one:.3f}" for one in figures)]]))


if __name__ == "__main__":
    main()
