"""What the local index of the shared cache costs: warm start, size, drafting, and how soon it drafts what is published.

Server, publisher, follower, builder and drafter share the cores that the process may use.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.drafters.contract import CpuDrafter, DraftContext
from actors.messages import SamplingParams
from cache_service.automata import joined_text, static_automaton, suffix_automaton
from cache_service.automata.suffix_automaton import Cursor
from cache_service.formats.documents import Int32Array, Piece, document_id_of
from cache_service.formats.entry_codec import encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.warm_index import WarmIndex, WarmIndexSettings, WarmIndexStats
from cache_service.log.compactor import Compactor
from cache_service.log.publisher import Publisher
from cache_service.store.connection import Connection
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.store import Store

PIECE_TOKENS = 5  # of a sequence and round

_SAMPLING = SamplingParams(seed=0)
_FINGERPRINT = "bench"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """From nothing to an index that drafts from all tokens."""

    tokens: int
    seconds: float
    cpu_seconds: float
    wire_bytes: int  # that the server sent
    stats: WarmIndexStats


@dataclass(frozen=True, slots=True)
class Freshness:
    """From `publish` to the first moment at which the tokens can be drafted."""

    tokens_per_second: float  # published meanwhile
    seconds: float  # that it was measured for
    delays: tuple[float, ...]  # seconds, of each marker
    cpu_share: float  # of a core: publishing, following and looking
    dropped_tokens: int
    stats: WarmIndexStats


class IndexBench:
    """A server with documents in it, and indexes of it."""

    def __init__(self, server: EmbeddedServer, directory: Path, vocab_size: int) -> None:
        """directory: for the indexes' files. vocab_size: tokens below it are indexed."""
        self.connection = Connection(server.settings)
        self._settings = WarmIndexSettings(directory=directory, vocab_size=vocab_size)

    def close(self) -> None:
        self.connection.close()

    def open(self, namespace: str) -> tuple[Store, FrameCodec]:
        keys = StoreKeys(_FINGERPRINT, namespace)
        return Store(self.connection, keys), FrameCodec(keys)

    def index(self) -> WarmIndex:
        return WarmIndex(self.open, self._settings)

    def append(self, namespace: str, documents: Sequence[Int32Array], fold: bool) -> None:
        """fold: into segments, from which a base is built."""
        store, codec = self.open(namespace)
        for row, document in enumerate(documents):
            name = document_id_of(f"{namespace} {row} {len(documents)}")
            for begin in range(0, len(document), 1024):
                store.append([encode_entry(codec, [Piece(name, begin, document[begin : begin + 1024])])], 1_000_000)
        if fold:
            compactor = Compactor(store, codec)
            while compactor.fold():
                pass

    def start_warm(self, namespace: str, num_tokens: int) -> tuple[WarmStart, WarmIndex]:
        """A new index, once it knows `num_tokens` of the namespace. The caller closes it. Raises TimeoutError."""
        sent, cpu, begin = self._bytes_sent(), time.process_time(), time.perf_counter()
        index = self.index()
        index.follow(namespace)
        wait_until(lambda: index.stats().tokens >= num_tokens)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return WarmStart(num_tokens, seconds, cpu, self._bytes_sent() - sent, index.stats()), index

    def freshness(self, text: Int32Array, tokens_per_s: int, seconds: float, vocab_size: int) -> Freshness:
        """Answers are published as routers do it, and now and then a document of tokens that were never seen before."""
        index, publisher, stop = self.index(), Publisher(self.open), threading.Event()
        index.follow("fresh")
        wait_until(lambda: index.stats().warm_ratio == 1.0)
        published = 0

        def publish() -> None:
            nonlocal published
            begin = time.perf_counter()
            for row in itertools.count():
                if stop.is_set():
                    return
                document, round = row % 64, row // 64
                at = (document * 7919 + round * PIECE_TOKENS) % (len(text) - PIECE_TOKENS)
                name = document_id_of(f"{document} {round // 100}")
                tokens = tuple(text[at : at + PIECE_TOKENS].tolist())
                publisher.publish("fresh", name, round % 100 * PIECE_TOKENS, tokens)
                published += PIECE_TOKENS
                if document == 63:
                    ahead = published / tokens_per_s - (time.perf_counter() - begin)
                    if ahead > 0:
                        time.sleep(ahead)

        thread = threading.Thread(target=publish, name="bench-publisher", daemon=True)
        delays = []
        cpu, begin = time.process_time(), time.perf_counter()
        thread.start()
        try:
            for marker in itertools.count():
                if time.perf_counter() - begin > seconds:
                    break
                # Its spelling in the highest tokens, which are the rarest of a vocabulary: no other text is like it.
                digits = np.array([int(digit) for digit in f"{marker:06}"], np.int32)
                marked = (vocab_size - 1 - digits).astype(np.int32)
                then = time.perf_counter()
                publisher.publish("fresh", document_id_of(f"marker {marker}"), 0, marked)
                wait_until(lambda marked=marked: is_known(index, "fresh", marked))  # type: ignore[misc]
                delays.append(time.perf_counter() - then)
                time.sleep(0.02)
        finally:
            stop.set()
            thread.join()
            elapsed = time.perf_counter() - begin
            cpu = time.process_time() - cpu
            counters, stats = publisher.counters, index.stats()
            publisher.close()
            index.close()
        return Freshness(published / elapsed, elapsed, tuple(delays), cpu / elapsed, counters.overflow_tokens, stats)

    def _bytes_sent(self) -> int:
        facts: Any = self.connection.client().info("stats")
        return int(facts["total_net_output_bytes"])


def load_kernels() -> None:
    """Compile, or load from the disk, what would otherwise be compiled while the clock runs."""
    for warm_up in (static_automaton.warm_up, suffix_automaton.warm_up_documents, joined_text.warm_up):
        warm_up()


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cache was not ready after {seconds:g} s")
        time.sleep(0.0005)


def drafting_seconds(
    drafter: CpuDrafter, texts: Sequence[Int32Array], max_nodes: int, **fields: Any
) -> npt.NDArray[np.float64]:
    """Seconds of each round in which all sequences have grown by 3 tokens, from 200 tokens on. fields: more of
    `DraftContext`."""
    seconds = []
    known = 0
    for size in range(200, min(map(len, texts)), 3):
        contexts = [
            DraftContext(row, text[:size], known, 100, max_nodes, _SAMPLING, **fields) for row, text in enumerate(texts)
        ]
        begin = time.perf_counter()
        drafter.propose(contexts)
        seconds.append(time.perf_counter() - begin)
        known = size
    for row in range(len(texts)):
        drafter.forget(row)
    return np.array(seconds[1:])


def is_known(index: WarmIndex, namespace: str, token_ids: Sequence[int] | Int32Array) -> bool:
    """Whether what came since the index's base has these tokens in a row."""
    automata = index.automata(namespace)
    if automata is None:
        return False
    tokens = np.asarray(token_ids, np.int32)
    side = automata.tail.enter()
    try:
        return bool(side.automaton.advance(Cursor(), tokens).length == len(tokens))
    finally:
        automata.tail.leave(side)
