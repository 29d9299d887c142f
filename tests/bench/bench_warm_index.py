"""What the local index of the shared cache costs: warm start, size, drafting; and how soon it drafts what is published.

    taskset -c 0 python tests/bench/bench_warm_index.py [--documents DIR] [--tokens 1000000] [--seconds 10]

Documents: the .py files below a directory, by default Python's own library, as SmolLM2 tokens. Server, publisher,
follower, builder and drafter share the cores the process may use. Compiled kernels are loaded before the clock starts.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_static_index import documents_below
from cache_index import IndexBench, drafting_seconds, load_kernels, wait_until

from actors.drafters.registry import create_drafter
from cache_service.index.warm_index import WarmIndex
from cache_service.store.embedded_server import EmbeddedServer

VOCAB_SIZE = 49_152
SEQUENCES = 8


def report_warm_start(bench: IndexBench, namespace: str, num_tokens: int) -> WarmIndex:
    """Two processes' worth of it: one that builds and one that maps. Returns the second."""
    for name in ("builds", "maps"):
        start, index = bench.start_warm(namespace, num_tokens)
        stats = start.stats
        size = stats.mapped_bytes / max(1, stats.tokens)
        print(
            f"warm start of {num_tokens:,} tokens, {name} ({stats.builds} built, {stats.maps} mapped):"
            f" {start.seconds:.3f} s, {start.cpu_seconds:.3f} s of CPU, {start.wire_bytes / 1e6:.3f} MB on the wire,"
            f" {size:.1f} B/token mapped"
        )
        if name == "builds":
            index.close()
    return index


def report_drafting(bench: IndexBench, index: WarmIndex, held_out: list[np.ndarray], tail: list[np.ndarray]) -> None:
    bench.append("mine", tail, fold=False)
    bench.append("public", tail, fold=False)
    index.follow("public")
    wait_until(lambda: index.stats().lag_s < 1 and index.stats().tokens > 0)
    tail_tokens = sum(map(len, tail))
    wait_until(lambda: all(len(index.automata(name).tail) >= tail_tokens for name in ("mine", "public")))  # type: ignore[union-attr]
    automata = index.automata("mine")
    assert automata is not None
    base, newest = automata.base, automata.tail
    assert base is not None
    print(
        f"index: base {base.memory_bytes / len(base):.1f} B/token, tail {newest.memory_bytes / len(newest):.1f},"
        f" together {(base.memory_bytes + newest.memory_bytes) / (len(base) + len(newest)):.1f} with a tail of"
        f" {len(newest) / len(base):.0%}"
    )
    texts = [text[:1200] for text in held_out if len(text) >= 1200][:SEQUENCES]
    drafter = create_drafter("cache", index=index)
    for max_nodes in (8, 16, 32):
        for name, fields in (
            ("base and tail", {"namespace": "mine"}),
            ("and a public tail", {"namespace": "mine", "readable": ("public",)}),
        ):
            drafting_seconds(drafter, texts, max_nodes, **fields)
            seconds = drafting_seconds(drafter, texts, max_nodes, **fields)
            print(
                f"drafting for {len(texts)} sequences, {max_nodes:2} nodes, {name}: median"
                f" {np.median(seconds) * 1e3:.3f} ms, p99 {np.quantile(seconds, 0.99) * 1e3:.3f} ms a round"
            )


def report_freshness(bench: IndexBench, text: np.ndarray, tokens_per_s: int, seconds: float) -> None:
    fresh = bench.freshness(text, tokens_per_s, seconds, VOCAB_SIZE)
    delays, stats = fresh.delays, fresh.stats
    print(
        f"published to draftable at {fresh.tokens_per_second:,.0f} tokens/s for {fresh.seconds:.0f} s: median"
        f" {np.median(delays):.3f} s, p99 {np.quantile(delays, 0.99):.3f} s, most {max(delays):.3f} s of {len(delays)};"
        f" {fresh.cpu_share:.0%} of a core for publishing, following and looking,"
        f" {fresh.dropped_tokens} tokens dropped, {stats.builds} bases built on the way, {stats.resets} resets"
    )


def report_stalls(bench: IndexBench, index: WarmIndex, held_out: list[np.ndarray], documents: list[np.ndarray]) -> None:
    """Rounds of drafting while another base is built beside them."""
    texts = [text[:1200] for text in held_out if len(text) >= 1200][:SEQUENCES]
    drafter = create_drafter("cache", index=index)
    before = drafting_seconds(drafter, texts, 16, namespace="mine")
    bench.append("other", documents, fold=True)
    builds = index.stats().builds
    index.follow("other")
    wait_until(lambda: index.stats().namespaces == 3)
    during = []
    while index.stats().builds == builds:
        during.append(drafting_seconds(drafter, texts, 16, namespace="mine"))
    seconds = np.concatenate(during)
    print(
        f"drafting while a base of {sum(map(len, documents)):,} tokens is built: median"
        f" {np.median(seconds) * 1e3:.3f} ms, p99 {np.quantile(seconds, 0.99) * 1e3:.3f} ms, most"
        f" {seconds.max() * 1e3:.1f} ms a round; without {np.median(before) * 1e3:.3f}, "
        f"{np.quantile(before, 0.99) * 1e3:.3f}, {before.max() * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--tokens-per-s", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    begin = time.perf_counter()
    load_kernels()
    print(f"kernels loaded or compiled in {time.perf_counter() - begin:.2f} s")
    documents = documents_below(options.documents, int(1.5 * options.tokens))
    held_out = documents[::12]
    known = [document for row, document in enumerate(documents) if row % 12]
    ends = np.cumsum([len(document) for document in known])
    cut = int(np.searchsorted(ends, options.tokens)) + 1
    base, tail = known[:cut], known[cut : cut + int(np.searchsorted(ends[cut:] - ends[cut - 1], 200_000)) + 1]
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder) / "server") as server:
        directory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(folder)
        with tempfile.TemporaryDirectory(dir=directory) as shared:
            bench = IndexBench(server, Path(shared), VOCAB_SIZE)
            bench.append("mine", base, fold=True)
            index = report_warm_start(bench, "mine", int(ends[cut - 1]))
            report_drafting(bench, index, held_out, tail)
            report_stalls(bench, index, held_out, base)
            index.close()
            report_freshness(bench, np.concatenate(known), options.tokens_per_s, options.seconds)


if __name__ == "__main__":
    main()
