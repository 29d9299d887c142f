"""The target engine under sequences that come and go for long: every token and every block is checked in each round.

    python tests/soak/soak_engine.py [--rounds 3000] [--attention padded] [--kind llama] [--seed 0] [--device cpu]

Requests share beginnings of prompts, are computed in chunks, get draft trees of which some nodes are right, are
cancelled, skipped, sent again from their beginning, or named with a length that the engine does not have; the pool is
too small for all of them. Each emitted token is compared with plain decoding: `transformers`' own forward of the whole
text by another copy of the model. `check_integrity` compares sequences and block pool after each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from actors.draft_tree import DraftTree
from actors.engine.options import AttentionBackend, EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, Verdict, VerifyBatch, VerifyItem
from actors.sampling.sampler import SequenceSampling, rows_for, sample_tokens
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import TINY_KINDS, TinyKind, make_tiny_model

VOCAB, BLOCK, NUM_BLOCKS, MOST_RUNNING = 193, 4, 56, 8
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
)


@dataclass
class Figures:
    rounds: int = 0
    requests: int = 0
    finished: int = 0
    tokens: int = 0
    draft_nodes: int = 0
    accepted_nodes: int = 0
    most_in_a_round: int = 0
    cached_prompt_tokens: int = 0
    starved: int = 0
    preempted: int = 0
    stale: int = 0
    cancelled: int = 0
    sent_again: int = 0


@dataclass
class Request:
    seq_id: int
    prompt: list[int]
    output: list[int]  # what plain decoding says
    sampling: SamplingParams
    text: list[int] = field(default_factory=list)
    known: int = 0  # tokens that the engine has
    computed: int = 0

    @property
    def num_done(self) -> int:
        return len(self.text) - len(self.prompt)


class PlainDecoding:
    """One forward of the whole text for each token."""

    def __init__(self, kind: TinyKind) -> None:
        self._model = make_tiny_model(kind, vocab_size=VOCAB)

    @torch.inference_mode()
    def output(self, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
        text, sampling = list(prompt), SequenceSampling(params, len(prompt))
        sampling.extend(np.array(prompt, np.int32))
        for _ in range(count):
            logits = self._model(torch.tensor([text]), use_cache=False).logits[0, -1:]
            rows = rows_for([sampling], np.zeros(1, np.int64), np.array([len(text)]), [np.zeros(0, np.int32)])
            text.append(int(sample_tokens(logits, rows)[0]))
            sampling.extend(np.array(text[-1:], np.int32))
        return text[len(prompt) :]


class Soak:
    def __init__(
        self, attention: AttentionBackend, kind: TinyKind = "llama", seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        """device: the engine's. Plain decoding is the CPU's."""
        model = make_tiny_model(kind, vocab_size=VOCAB).to(device)
        self._engine = TargetEngine(model, EngineOptions(NUM_BLOCKS, BLOCK, attention=attention))
        self._plain = PlainDecoding(kind)
        self._rng = np.random.default_rng(seed)
        self._beginnings = [self._rng.integers(0, VOCAB, 24).tolist() for _ in range(4)]
        self._running: list[Request] = []
        self._to_free: list[int] = []
        self.figures = Figures()

    def run(self, rounds: int) -> Figures:
        """Raises AssertionError at the first wrong token or block."""
        for _ in range(rounds):
            if len(self._running) < MOST_RUNNING and self._chance(0.35):
                self._begin()
            if self._running and self._chance(0.02):
                self._end(self._any())
                self.figures.cancelled += 1
            self._round()
        for request in list(self._running):
            self._end(request)
        self._engine.verify(VerifyBatch(0, [], self._to_free))
        check_integrity(self._engine)
        assert self._engine.num_sequences == 0
        assert self._engine.pool.num_free == NUM_BLOCKS
        return self.figures

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def _any(self) -> Request:
        return self._running[int(self._rng.integers(len(self._running)))]

    def _begin(self) -> None:
        self.figures.requests += 1
        beginning = self._beginnings[int(self._rng.integers(len(self._beginnings)))]
        prompt = beginning[: int(self._rng.integers(0, 25))] + self._rng.integers(0, VOCAB, 5).tolist()
        chosen = SAMPLINGS[int(self._rng.integers(len(SAMPLINGS)))]
        params = SamplingParams(int(self._rng.integers(2**63)), **chosen)  # type: ignore[arg-type]
        output = self._plain.output(prompt, int(self._rng.integers(1, 40)), params)
        self._running.append(Request(self.figures.requests, prompt, output, params, list(prompt)))

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        self._to_free.append(request.seq_id)

    def _round(self) -> None:
        self.figures.rounds += 1
        for request in self._running:
            if request.known and self._chance(0.01):
                request.known = 0
                self.figures.sent_again += 1
        taking_part = [request for request in self._running if self._chance(0.95)]
        self._rng.shuffle(taking_part)  # type: ignore[arg-type]
        items = {request.seq_id: self._item(request) for request in taking_part}
        result = self._engine.verify(VerifyBatch(self.figures.rounds, list(items.values()), self._to_free, 2))
        self._to_free = []
        check_integrity(self._engine)
        by_id = {request.seq_id: request for request in taking_part}
        told = [verdict.seq_id for verdict in result.verdicts] + result.stale_seq_ids + result.starved_seq_ids
        assert sorted(told) == sorted(by_id), "each sequence gets one answer"
        for seq_id in result.stale_seq_ids:
            by_id[seq_id].known = 0
        for verdict in result.verdicts:
            self._take(by_id[verdict.seq_id], items[verdict.seq_id], verdict)
        self.figures.stale += len(result.stale_seq_ids)
        self.figures.starved += len(result.starved_seq_ids)
        if result.starved_seq_ids:
            # One gives up its blocks, and is sent again from its beginning.
            holding = [request for request in self._running if request.known]
            if holding:
                given_up = holding[int(self._rng.integers(len(holding)))]
                given_up.known = 0
                self._to_free.append(given_up.seq_id)
                self.figures.preempted += 1

    def _item(self, request: Request) -> VerifyItem:
        start = request.known
        if start and self._chance(0.01):
            start += 1  # a length that the engine does not have
            return VerifyItem(SequenceDelta(request.seq_id, start, np.array([0], np.int32)), 1)
        delta = SequenceDelta(request.seq_id, start, np.array(request.text[start:], np.int32))
        begin = None if start else SequenceStart(request.sampling, len(request.prompt))
        tree = self._tree(request) if self._chance(0.8) else None
        return VerifyItem(delta, int(self._rng.integers(1, 16)), tree, begin)

    def _tree(self, request: Request) -> DraftTree:
        """A random tree; one path of it says for some nodes what comes next."""
        count = int(self._rng.integers(1, 20))
        parents = np.array([int(self._rng.integers(-1, node)) for node in range(count)], np.int32)
        token_ids = self._rng.permutation(VOCAB)[:count].astype(np.int32)
        at, rest = -1, request.output[request.num_done :]
        for token in rest[: int(self._rng.integers(0, 8))]:
            children = np.flatnonzero(parents == at)
            if not len(children):
                break
            siblings = token_ids[children] == token
            at = int(children[siblings.argmax()] if siblings.any() else children[self._rng.integers(len(children))])
            token_ids[at] = token
        return DraftTree(token_ids, parents, np.full(count, 0.5, np.float32))

    def _take(self, request: Request, item: VerifyItem, verdict: Verdict) -> None:
        request.known = len(request.text)
        self.figures.draft_nodes += verdict.num_nodes
        if item.begin is not None:
            self.figures.cached_prompt_tokens += verdict.num_cached
        if verdict.next_token < 0:
            return
        emitted = [*item.tree.token_ids[verdict.path].tolist(), verdict.next_token]
        wanted = request.output[request.num_done : request.num_done + len(emitted)]
        assert emitted[: len(wanted)] == wanted, (
            f"round {self.figures.rounds}, sequence {request.seq_id} ({request.sampling}): {emitted} after "
            f"{request.num_done} tokens; plain decoding says {wanted}"
        )
        request.text += wanted
        self.figures.tokens += len(wanted)
        self.figures.accepted_nodes += len(verdict.path)
        self.figures.most_in_a_round = max(self.figures.most_in_a_round, len(emitted))
        if request.num_done == len(request.output):
            self.figures.finished += 1
            self._end(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--attention", choices=["padded", "triton_tree"], default="padded")
    parser.add_argument("--kind", choices=TINY_KINDS, default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    figures = Soak(given.attention, given.kind, given.seed, given.device).run(given.rounds)
    print("  ".join(f"{name} {value}" for name, value in dataclasses.asdict(figures).items()))
    print(f"no wrong token, no wrong block; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
