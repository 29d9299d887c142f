"""No request waits for a compiler: what the router runs is compiled before the first one, for every layout that comes.

Runs in a process of its own, since other tests compile other versions of the same kernels.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[4]
VOCAB_SIZE = 64


def test_no_kernel_of_the_router_is_compiled_after_it_was_built():
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "compiled while serving: []\n"), done.stderr


def serve_many_requests(corpus: Path) -> list[str]:
    """Every drafter, prompts of all lengths, arrays as they come from messages: the kernels that got a version more."""
    from actors.drafters.registry import CPU_DRAFTER_NAMES, create_drafters
    from actors.messages import SamplingParams, Successors, decode_message, encode_message
    from cache_service.automata.automata_index import Automata
    from cache_service.automata.corpus_index import CorpusHeader, open_index, write_index
    from cache_service.automata.live_tail import LiveTail
    from cache_service.automata.static_automaton import StaticAutomaton
    from cache_service.automata.suffix_automaton import SuffixAutomaton
    from cache_service.formats.documents import Piece
    from cluster.router.learning import successors_of
    from paceline_testing.rounds import toy_core, toy_info, toy_request
    from paceline_testing.toy_target import ToyTarget

    rng = np.random.default_rng(0)
    automaton = SuffixAutomaton()
    automaton.extend(np.array([*rng.integers(0, VOCAB_SIZE, 500), -1], np.int32))
    write_index(corpus, CorpusHeader("toy", "-", VOCAB_SIZE, 1, 500), StaticAutomaton.freeze(automaton))

    target = ToyTarget(VOCAB_SIZE, 8192, order=1)
    tail = LiveTail(VOCAB_SIZE)

    class Index:
        def follow(self, namespace: str) -> None:
            pass

        def automata(self, namespace: str) -> Automata:
            return Automata(open_index(corpus).automaton, 1, tail, 2)

    drafters = create_drafters(CPU_DRAFTER_NAMES, corpora=[corpus], index=Index())
    core = toy_core(toy_info(VOCAB_SIZE, 8192), drafters=drafters)
    core.set_draft_workers(["worker"])
    before = versions()

    def tokens(count: int) -> np.ndarray:
        ids = rng.integers(0, VOCAB_SIZE, count).astype(np.int32)
        ids.flags.writeable = False
        return ids

    for index, length in enumerate([1, 2, 3, 4, 5, 40, 3000]):
        for acceptance in ("coupled", "rejection"):
            sampling = SamplingParams(seed=0, temperature=0.0, acceptance=acceptance)
            fields = {"prompt_token_ids": tokens(length), "prediction_token_ids": tokens(length - 1)}
            request = toy_request(f"{acceptance} {index}", (), 24, sampling=sampling, namespace=str(index % 3))
            core.add(msgspec.structs.replace(request, **fields), 0.0)
    num_accepted = num_finished = 0
    for _ in range(500):
        if not core.has_work:
            break
        round, _ = core.plan_round(0.0)
        if round is None:
            break
        tail.add([Piece(b"d" * 16, 0, tokens(200)), Piece(bytes([len(tail) % 256]) * 16, 0, tokens(30))])
        core.draft_locally(round)
        drafts = {name: decode_message(encode_message(drafted(batch))) for name, batch in round.asked.batches.items()}
        batch = decode_message(encode_message(core.assemble(round, drafts)))
        result = target.verify(batch)
        rows = sum(1 + verdict.num_nodes for verdict in result.verdicts if verdict.next_token >= 0)
        num_accepted += sum(len(verdict.path) for verdict in result.verdicts)
        successors = Successors(
            tokens(rows * batch.num_successors),
            np.full(rows * batch.num_successors, 0.1, np.float32),
            batch.num_successors,
        )
        told = msgspec.structs.replace(result, successors=successors)
        assert not batch.num_successors or successors_of(told, VOCAB_SIZE) is not None
        events = core.commit(round, decode_message(encode_message(told)), 0.1)
        num_finished += sum(event.finish_reason is not None for event in events)
    assert num_finished == 14
    assert num_accepted > 0
    assert not core.counters.drafter_errors
    after = versions()
    return sorted(name for name in after if after[name] > before.get(name, 0))


def drafted(batch):
    """A chain with probabilities for everybody."""
    from actors.draft_tree import DraftTree, TopProbs
    from actors.messages import DraftResult

    ids, trees = [], []
    for item in batch.items:
        count = min(2, item.max_nodes)
        if count:
            tokens, sure = np.arange(5, 5 + count, dtype=np.int32), np.full(count, 0.5, np.float32)
            probs = TopProbs(tokens.copy(), np.ones(count, np.float32), 1)
            ids.append(item.delta.seq_id)
            trees.append(DraftTree(tokens, np.arange(-1, count - 1, dtype=np.int32), sure, probs))
    return DraftResult(batch.round_id, ids, trees, [])


def versions() -> dict[str, int]:
    """How many versions of each kernel there are."""
    from numba.core.registry import CPUDispatcher

    return {
        f"{name}.{kernel}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith(("actors.drafters", "cache_service", "cluster.router"))
        for kernel, value in vars(module).items()
        if isinstance(value, CPUDispatcher) and value.py_func.__module__ == name
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(f"compiled while serving: {serve_many_requests(Path(folder))}")
