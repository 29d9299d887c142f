"""Cost of a corpus index, and what is drafted from it: size, build, opening, matching, drafting, and a replay.

    python tests/bench/bench_static_index.py [--documents DIR] [--limit 5000000] [--dir DIR]

Documents: the .py files below a directory, by default Python's own library, as SmolLM2 tokens. One of twelve is held
out and replayed as if a target wrote it. Times are CPU seconds of this thread; tokenising takes the longest.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measuring import accepted_path, best_seconds

from actors.drafters.contract import CpuDrafter, DraftContext
from actors.drafters.registry import create_drafter
from actors.drafters.retrieval import RetrievalDrafter
from actors.messages import SamplingParams
from actors.models.catalog import resolve_model
from actors.models.loader import load_tokenizer
from cache_service.automata.corpus_index import CorpusHeader, open_index, write_index
from cache_service.automata.static_automaton import StaticAutomaton, warm_up
from cache_service.automata.suffix_automaton import SEPARATOR, Cursor, SuffixAutomaton
from cluster.config import paceline_home
from cluster.text.documents import read_documents

SAMPLING = SamplingParams(seed=0)
HELD_OUT = 12  # one document of so many
PROMPT, ANSWER = 200, 400  # tokens of a held-out document that are given, and that are to be drafted


def documents_below(directory: Path, limit: int) -> list[np.ndarray]:
    files = [path for path in sorted(directory.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    files = [path for path in files if is_utf8(path)]
    documents: list[np.ndarray] = []
    pieces: list[np.ndarray] = []
    total = 0
    tokenizer = load_tokenizer(resolve_model("smollm2", paceline_home()))
    for token_ids, ends_document in read_documents(files, tokenizer, 2**22):
        pieces.append(token_ids)
        total += len(token_ids)
        if ends_document:
            documents.append(np.concatenate(pieces))
            pieces = []
            if total >= limit:
                break
    return documents


def is_utf8(path: Path) -> bool:
    try:
        return bool(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return False


def joined(documents: list[np.ndarray]) -> np.ndarray:
    separator = np.array([SEPARATOR], np.int32)
    return np.concatenate([part for document in documents for part in (document, separator)])


def built(tokens: np.ndarray) -> StaticAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return StaticAutomaton.freeze(automaton)


def report_index(name: str, tokens: np.ndarray, queries: np.ndarray, folder: Path) -> StaticAutomaton:
    build = best_seconds(lambda: built(tokens), 2)
    static = built(tokens)
    path = folder / name.replace(" ", "-")
    path.mkdir(parents=True)
    num_documents = int((tokens < 0).sum())
    write_index(path, CorpusHeader("smollm2", "-", 2**22, num_documents, len(tokens) - num_documents), static)
    mapped = open_index(path).automaton
    opening = [best_seconds(lambda verify=verify: open_index(path, verify=verify), 3) for verify in (False, True)]
    match = best_seconds(lambda: mapped.advance(Cursor(), queries), 3)
    count = len(tokens)
    print(
        f"{name:20} {count:10,} tokens: {static.memory_bytes / count:5.2f} B/token, build"
        f" {count / build / 1e6:4.2f} M tokens/s, open {opening[0] * 1e3:.1f} ms mapped and {opening[1] * 1e3:.0f} ms"
        f" verified, match {match / len(queries) * 1e6:.3f} us/token"
    )
    print("  bytes a token:", ", ".join(f"{key} {array.nbytes / count:.2f}" for key, array in static.arrays.items()))
    return mapped


def report_replay(name: str, drafter: CpuDrafter, documents: list[np.ndarray], max_nodes: int) -> None:
    """Tokens and nodes a round, microseconds a round, and predicted against found acceptance."""
    rounds = emitted = drafted = 0
    seconds = 0.0
    buckets = np.zeros((5, 2), np.int64)
    for seq_id, document in enumerate(documents):
        tokens = document[: PROMPT + ANSWER]
        known, size = 0, PROMPT
        while size < len(tokens):
            context = DraftContext(seq_id, tokens[:size], known, PROMPT, max_nodes, SAMPLING)
            begin = time.perf_counter()
            (tree,) = drafter.propose([context])
            seconds += time.perf_counter() - begin
            path = accepted_path(tree, tokens[size:])
            for node, confidence in enumerate(tree.confidence):
                bucket = buckets[min(int(confidence * 5), 4)]
                bucket += 1, node in path
            known = size
            size = min(size + len(path) + 1, len(tokens))
            rounds, emitted, drafted = rounds + 1, emitted + size - known, drafted + len(tree)
        drafter.forget(seq_id)
    print(
        f"{name:34} {max_nodes:2} nodes: {emitted / rounds:.3f} tokens, {drafted / rounds:5.2f} nodes and"
        f" {seconds / rounds * 1e6:5.1f} us a round; accepted by confidence:",
        ", ".join(f"{i / 5:.1f}-{(i + 1) / 5:.1f}: {k / max(n, 1):.2f}" for i, (n, k) in enumerate(buckets)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--limit", type=int, default=5_000_000, help="tokens at most")
    parser.add_argument("--dir", type=Path, help="where indexes are written; by default a temporary directory")
    options = parser.parse_args()
    warm_up()
    documents = documents_below(options.documents, options.limit)
    held_out = [document for i, document in enumerate(documents) if i % HELD_OUT == 0]
    corpus = joined([document for i, document in enumerate(documents) if i % HELD_OUT])
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        queries = joined(held_out)
        static = report_index("source text", corpus, queries, Path(folder))
        repeated = np.zeros(1_000_000, np.int32)
        report_index("one repeated token", repeated, repeated, Path(folder))
        random = np.random.default_rng(0).integers(0, 128_256, 1_000_000).astype(np.int32)
        report_index("uniform of 128,256", random, random[::-1].copy(), Path(folder))
        replayed = [document for document in held_out if len(document) >= PROMPT + ANSWER]
        drafters: dict[str, Callable[[], CpuDrafter]] = {
            "retrieval": lambda: RetrievalDrafter([static]),
            "retrieval, little fallback": lambda: RetrievalDrafter([static], min_continuation=8),
            "retrieval, no fallback": lambda: RetrievalDrafter([static], min_continuation=0),
            "retrieval, a chain": lambda: RetrievalDrafter([static], top_k=1),
            "suffix": lambda: create_drafter("suffix"),
            "suffix, by frequency": lambda: create_drafter("suffix", by_frequency=True),
            "suffix, top 6": lambda: create_drafter("suffix", top_k=6),
            "suffix, top 6 by frequency": lambda: create_drafter("suffix", top_k=6, by_frequency=True),
        }
        for max_nodes in (8, 16, 32):
            for name, create in drafters.items():
                report_replay(name, create(), replayed, max_nodes)


if __name__ == "__main__":
    main()
