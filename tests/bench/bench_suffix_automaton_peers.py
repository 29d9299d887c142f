"""The suffix automaton beside the suffix tree of arctic-inference, on the same text on the same core.

    python tests/bench/bench_suffix_automaton_peers.py [--answers answers.npz]

arctic-inference, as it is on PyPI, is no dependency of Paceline; where it cannot be imported,
the automaton is measured alone and the output says so. It is compiled at installation, which takes a C++20 compiler and
CMake; its suffix tree alone needs neither vLLM nor a GPU. Beside an environment that has torch and grpcio-tools, as
`make setup` makes it, and without touching that:

    pip install --target peers-build nanobind==2.9.2
    PYTHONPATH=peers-build pip install --no-build-isolation --no-deps --target peers arctic-inference==0.3.0
    PYTHONPATH=peers:. python tests/bench/bench_suffix_automaton_peers.py

Text: as in bench_suffix_automaton.py. The tree knows matches up to its depth, 24 tokens as vLLM sets it or 64 as the
package does; the automaton knows all. Times are CPU seconds of this thread, the best of several runs, calls from Python
included; bytes are what each structure says of itself, and what the process grew by. answers: a file that
bench_soft_ngram.py --write has written. The drafters of both draft its answers in order, each from what came before; a
round's time is that of learning what the round before brought and of drafting.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
from bench_soft_ngram import TABLE, Answer, load_answers, teach_answer, teach_prompt
from bench_suffix_automaton import measured_texts
from measuring import accepted_path, best_seconds

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.drafters.registry import create_drafter
from actors.messages import SamplingParams
from cache_service.automata.suffix_automaton import MAX_BRANCHES, Cursor, SuffixAutomaton, warm_up

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
    from arctic_inference.suffix_decoding._C import SuffixTree
except ImportError:
    SuffixDecodingCache = SuffixTree = None

DEPTHS = (24, 64)
ROUND = 4  # tokens that a round adds
AHEAD = 16  # tokens that are asked for
SAMPLING = SamplingParams(seed=0)


class Index(Protocol):
    """What is measured of either structure. Tokens are int32 [n]."""

    def extend(self, tokens: np.ndarray) -> None: ...

    def reader(self) -> Callable[[np.ndarray, int], int]:
        """A function that reads a text forwards: given the text and how much of it has been read, ROUND tokens more
        than at the last call, it finds the longest match and returns how many tokens it drafts, AHEAD at most."""

    @property
    def told_bytes(self) -> int: ...


class Automaton:
    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self.extend = self._automaton.extend

    def reader(self) -> Callable[[np.ndarray, int], int]:
        cursor = Cursor()

        def read(text: np.ndarray, size: int) -> int:
            nonlocal cursor
            cursor = self._automaton.advance(cursor, text[size - ROUND : size])
            return len(self._automaton.continuation(cursor.state, AHEAD))

        return read

    @property
    def told_bytes(self) -> int:
        return self._automaton.memory_bytes


class ArcticTree:
    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tree = SuffixTree(depth)

    def extend(self, tokens: np.ndarray) -> None:
        self._tree.extend_ndarray(0, tokens)

    def reader(self) -> Callable[[np.ndarray, int], int]:
        def read(text: np.ndarray, size: int) -> int:
            # Its look-up begins anew every time, with the last tokens.
            context = text[max(0, size - self._depth) : size]
            return len(self._tree.speculate_ndarray(context, AHEAD, 1.0, float(AHEAD), 0.0, False).token_ids)

        return read

    @property
    def told_bytes(self) -> int:
        return self._tree.estimate_memory()


def structures() -> dict[str, Callable[[], Index]]:
    made: dict[str, Callable[[], Index]] = {"suffix automaton": Automaton}
    for depth in DEPTHS if SuffixTree is not None else ():
        made[f"arctic, depth {depth}"] = lambda depth=depth: ArcticTree(depth)
    return made


def grown_bytes(name: str, tokens: np.ndarray) -> int:
    """What a fresh process grows by while it builds the structure."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown_here, (name, tokens))


def _grown_here(name: str, tokens: np.ndarray) -> int:
    warm_up()
    process = psutil.Process()
    before = process.memory_info().rss
    index = structures()[name]()
    index.extend(tokens)
    return process.memory_info().rss - before


def report(title: str, tokens: np.ndarray) -> None:
    print(f"\n{title}, {len(tokens):,} tokens")
    print(
        f"  {'':20}{'M tokens/s':>12}{'B/token told':>14}{'B/token grown':>15}{f'insert {ROUND}':>12}{'look-up':>10}"
        f"{'drafted':>9}"
    )
    for name, create in structures().items():
        build = best_seconds(lambda create=create: create().extend(tokens), runs=3)
        index = create()
        index.extend(tokens)
        insert = insert_micros(create, tokens)
        look_up, drafted = look_up_micros(index, tokens)
        print(
            f"  {name:20}{len(tokens) / build / 1e6:12.2f}{index.told_bytes / len(tokens):14.1f}"
            f"{grown_bytes(name, tokens) / len(tokens):15.1f}{insert:9.2f} us{look_up:7.2f} us{drafted:9.1f}",
            flush=True,
        )


def insert_micros(create: Callable[[], Index], tokens: np.ndarray) -> float:
    """Of a call that adds ROUND tokens, all of the text in such calls."""
    parts = np.split(tokens, range(ROUND, len(tokens), ROUND))

    def insert() -> None:
        extend = create().extend
        for part in parts:
            extend(part)

    return best_seconds(insert, runs=3) / len(parts) * 1e6


def look_up_micros(index: Index, tokens: np.ndarray, num_tokens: int = 40_000) -> tuple[float, float]:
    """Of a look-up with draft after every ROUND tokens of text that the index holds, and what it drafts."""
    text = tokens[: min(num_tokens, len(tokens))]
    sizes = range(ROUND, len(text), ROUND)
    drafted = 0

    def read_all() -> None:
        nonlocal drafted
        read = index.reader()
        drafted = sum(read(text, size) for size in sizes)

    return best_seconds(read_all, runs=3) / len(sizes) * 1e6, drafted / len(sizes)


def report_linear() -> None:
    """Time a token must not grow with the text, however it repeats itself."""
    sizes = (62_500, 125_000, 250_000, 500_000)
    print("\nns a token to build from one repeated token, by number of tokens")
    print(f"  {'':20}", *(f"{size:>10,}" for size in sizes))
    for name, create in structures().items():
        times = []
        for size in sizes:
            tokens = np.zeros(size, np.int32)
            times.append(best_seconds(lambda create=create, tokens=tokens: create().extend(tokens), runs=3) / size)
        print(f"  {name:20}", *(f"{seconds * 1e9:10.1f}" for seconds in times), flush=True)


class OursDrafts:
    """A drafter of this project, told all that a server would tell it of the accepted path."""

    def __init__(self, drafter: CpuDrafter) -> None:
        self._drafter = drafter
        self._learners = [drafter] if drafter.num_successors else []

    def start(self, seq_id: int, answer: Answer) -> None:
        teach_prompt(self._learners, answer.prompt)

    def draft(self, seq_id: int, answer: Answer, known: int, size: int) -> DraftTree:
        prompt = len(answer.prompt)
        teach_answer(self._learners, answer, max(known - prompt, 0), size - prompt)
        context = DraftContext(seq_id, answer.tokens[:size], known, prompt, AHEAD, SAMPLING)
        return self._drafter.propose([context])[0]

    def stop(self, seq_id: int) -> None:
        self._drafter.forget(seq_id)


class ArcticDrafts:
    """Its cache as its documentation uses it: a tree of the request, and one of all answers unless `is_local`. A chain
    no longer than the match by its own defaults, or a tree as large as the room."""

    def __init__(self, is_local: bool, is_full: bool) -> None:
        self._cache = SuffixDecodingCache(DEPTHS[-1], 0 if is_local else -1)
        self._options = {"max_spec_offset": AHEAD, "min_token_prob": 0.0, "use_tree_spec": True} if is_full else {}

    def start(self, seq_id: int, answer: Answer) -> None:
        self._cache.start_request(seq_id, answer.prompt)

    def draft(self, seq_id: int, answer: Answer, known: int, size: int) -> DraftTree:
        text = answer.tokens
        self._cache.add_active_response(seq_id, text[max(known, len(answer.prompt)) : size])
        drafted = self._cache.speculate(seq_id, text[max(0, size - DEPTHS[-1]) : size], AHEAD, **self._options)
        return DraftTree(
            np.array(drafted.token_ids, np.int32),
            np.array(drafted.parents, np.int32),
            np.array(drafted.probs, np.float32),
        )

    def stop(self, seq_id: int) -> None:
        self._cache.stop_request(seq_id)


def report_replay(answers: Sequence[Answer]) -> None:
    drafters: dict[str, OursDrafts | ArcticDrafts] = {
        "suffix": OursDrafts(create_drafter("suffix")),
        "suffix, full tree": OursDrafts(create_drafter("suffix", top_k=MAX_BRANCHES, floor=0.0)),
        "soft_ngram, all texts": OursDrafts(create_drafter("soft_ngram", budget_bytes=TABLE)),
    }
    if SuffixDecodingCache is not None:
        for is_local, texts in ((True, "own text"), (False, "all texts")):
            drafters[f"arctic, {texts}"] = ArcticDrafts(is_local, is_full=False)
            drafters[f"arctic, {texts}, full tree"] = ArcticDrafts(is_local, is_full=True)
    half = len(answers) // 2
    print(f"\n{len(answers)} answers in order, every drafter from an empty start, {AHEAD} draft tokens at most")
    print(f"  {'':30}{'tokens/round':>14}{'first half':>12}{'second half':>13}{'drafted/round':>15}{'a round':>12}")
    for name, drafter in drafters.items():
        tokens, rounds, nodes, seconds = [0, 0], [0, 0], 0, 0.0
        for seq_id, answer in enumerate(answers):
            text = answer.tokens
            drafter.start(seq_id, answer)
            known, size = 0, len(answer.prompt) + 1
            while size < len(text):
                begin = time.thread_time()
                tree = drafter.draft(seq_id, answer, known, size)
                seconds += time.thread_time() - begin
                path = accepted_path(tree, text[size:])
                known, size = size, min(size + len(path) + 1, len(text))
                tokens[seq_id >= half] += size - known
                rounds[seq_id >= half] += 1
                nodes += len(tree)
            drafter.stop(seq_id)
        print(
            f"  {name:30}{sum(tokens) / sum(rounds):14.3f}{tokens[0] / rounds[0]:12.3f}{tokens[1] / rounds[1]:13.3f}"
            f"{nodes / sum(rounds):15.2f}{seconds / sum(rounds) * 1e6:9.1f} us",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="answers of bench_soft_ngram.py to draft")
    options = parser.parse_args()
    if SuffixTree is None:
        print("arctic-inference is not installed: the automaton is measured alone (--help says how to install it)")
    warm_up()
    for title, tokens in measured_texts().items():
        report(title, tokens)
    report_linear()
    if options.answers:
        report_replay(load_answers(options.answers))


if __name__ == "__main__":
    main()
