"""A round that fails costs no token, wherever it fails: sequences that are sent again, with the prefix cache on, go on
with the tokens of an engine that has never failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from actors.draft_tree import DraftTree
from actors.engine.arena import Arena
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.links.server import Peer
from actors.messages import (
    AheadItem,
    Message,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
)
from actors.options import AttentionBackend
from actors.round_ahead import emitted_tokens, pick
from actors.workers.inbox import Inbox
from actors.workers.overlapped_rounds import OverlappedRounds
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 7
BLOCK_SIZE = 2  # accepted tokens fill blocks in every round
PEER = Peer(b"router")
SAMPLINGS = {
    1: SamplingParams(1, temperature=0.0),
    2: SamplingParams(3, temperature=0.7, repetition_penalty=1.4, presence_penalty=0.5),
}
PROMPTS = {1: [1, 2, 3], 2: [4, 5, 6, 1, 0]}
LENGTH = 90  # of the texts that are known


class Injected(Exception):
    pass


class SlowDevice(TargetEngine):
    """Says that it computes until it is asked for the outcome, as a device does."""

    overlaps = True

    def is_computing(self, begun: Any) -> bool:
        return True


class LateReader:
    """A device that may read the host's buffer until it is waited for: the buffer must not change before."""

    def __init__(self) -> None:
        self.copied: tuple[torch.Tensor, torch.Tensor] | None = None

    def record(self) -> None:
        self.copied = self.arena._host, self.arena._host.clone()

    def synchronize(self) -> None:
        if self.copied is not None:
            assert torch.equal(*self.copied)


def tiny_model() -> PreTrainedModel:
    """Of each engine its own, which it fits to its device."""
    return make_tiny_model("llama", layers=1, vocab_size=VOCAB, hidden_size=16, heads=2, kv_heads=1)


def slow_engine(attention: AttentionBackend, device: torch.device) -> SlowDevice:
    # A round that was recorded on a GPU calls nothing that could be made to fail.
    options = EngineOptions(256, BLOCK_SIZE, attention=attention, is_eager=device.type == "cuda")
    engine = SlowDevice(tiny_model().to(device), options)
    if engine._runner.has_device_inputs and engine._runner.device.type == "cpu":
        reader = LateReader()
        engine._runner._arena = reader.arena = Arena(engine._runner.device, reader)
    return engine


@pytest.fixture(scope="module")
def unfailing() -> tuple[TargetEngine, dict[int, list[int]]]:
    """An engine that has computed a token a round, and its texts."""
    engine = TargetEngine(tiny_model(), EngineOptions(256, BLOCK_SIZE, attention="padded"))
    texts = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    sent = dict.fromkeys(texts, 0)
    for round_id in range(LENGTH):
        items = [item_of(seq_id, text, sent[seq_id], None) for seq_id, text in texts.items()]
        sent = {seq_id: len(text) for seq_id, text in texts.items()}
        for verdict in engine.verify(VerifyBatch(round_id, items)).verdicts:
            texts[verdict.seq_id].append(verdict.next_token)
    return engine, texts


def item_of(seq_id: int, text: list[int], sent: int, draft: DraftTree | None) -> VerifyItem:
    begin = None if sent else SequenceStart(SAMPLINGS[seq_id], len(PROMPTS[seq_id]))
    return VerifyItem(SequenceDelta(seq_id, sent, np.array(text[sent:], np.int32)), len(text), draft, begin)


def guess(text: list[int]) -> DraftTree:
    """The text, with a wrong token before each right one, so that accepted nodes have to be moved."""
    tokens = [token for right in text for token in ((right + 1) % VOCAB, right)]
    parents = [2 * depth - 1 for depth in range(len(text)) for _ in range(2)]
    confidence = [0.9**depth for depth in range(len(text)) for _ in range(2)]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))


class Router:
    """Has each round and, while it is computed, the next one carried out, until `most` rounds are told. Knows the texts
    and checks every token."""

    def __init__(self, engine: TargetEngine, texts: dict[int, list[int]]) -> None:
        self.engine, self.texts = engine, texts
        self.inbox = Inbox(self.receive)
        self.rounds = OverlappedRounds(engine, self.inbox, self.answer, self.fail, lambda: False)
        self.lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()}  # tokens told so far
        self.sent = dict.fromkeys(texts, 0)
        self.asked: dict[int, VerifyBatch | VerifyAhead] = {}
        self.last: tuple[VerifyBatch, VerifyResult] | None = None  # what a round sent ahead may follow
        self.round_id = 0
        self.num_told = self.num_declined = self.num_cached = 0
        self.failed: list[str] = []

    def run(self, num_rounds: int) -> None:
        self.most = self.num_told + num_rounds
        while self.num_told < self.most:
            self.rounds.run(PEER, self.batch() if self.last is None else self.ahead(), lambda begun: None)
            self.inbox.waiting.clear()

    def batch(self) -> VerifyBatch:
        items = [
            item_of(seq_id, text[: self.lengths[seq_id]], self.sent[seq_id], guess(self._next(seq_id, 2)))
            for seq_id, text in self.texts.items()
        ]
        return self._ask(VerifyBatch(self.round_id + 1, items))

    def ahead(self) -> VerifyAhead:
        """The texts go on for longer than a round emits."""
        items = [AheadItem(seq_id, guess(self._next(seq_id, 6)), 4) for seq_id in self.texts]
        return self._ask(VerifyAhead(self.round_id + 1, self.round_id, items))

    def _next(self, seq_id: int, count: int) -> list[int]:
        return self.texts[seq_id][self.lengths[seq_id] :][:count]

    def _ask(self, message: Any) -> Any:
        self.round_id = message.round_id
        self.asked = {message.round_id - 1: self.asked.get(message.round_id - 1), message.round_id: message}
        return message

    def receive(self, timeout_s: float) -> tuple[Peer, Message]:
        return PEER, self.ahead() if self.num_told + 1 < self.most else VerifyBatch(0, [])

    def answer(self, peer: Peer, result: Message) -> None:
        assert isinstance(result, VerifyResult)
        batch = self.asked[result.round_id]
        if result.is_declined:
            self.num_declined += 1
            self.last = None
            return
        if isinstance(batch, VerifyAhead):
            batch = pick(batch, *self.last).batch
        assert isinstance(batch, VerifyBatch)
        items = {item.delta.seq_id: item for item in batch.items}
        assert items.keys() == {verdict.seq_id for verdict in result.verdicts}
        for verdict in result.verdicts:
            item, length = items[verdict.seq_id], self.lengths[verdict.seq_id]
            told = emitted_tokens(item.tree, verdict).tolist()
            assert told == self.texts[verdict.seq_id][length : length + len(told)], f"after {self.failed}"
            self.lengths[verdict.seq_id], self.sent[verdict.seq_id] = length + len(told), length
            self.num_cached += verdict.num_cached if item.delta.start == 0 else 0
        self.last = batch, result
        self.num_told += 1

    def fail(self, peer: Peer, round_id: int, error: Exception) -> None:
        """As `WorkerLoop._fail`; the sequences will be sent again."""
        if not isinstance(error, Injected):
            raise error
        self.failed.append(str(error))
        self.engine.clear()
        self.rounds.clear()
        self.sent, self.last = dict.fromkeys(self.texts, 0), None

    def start_again(self) -> None:
        """Finish all sequences and begin them anew from their prompts, with what is cached."""
        self.engine.verify(VerifyBatch(0, [], [*self.texts]))
        self.rounds.clear()
        self.lengths = {seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()}
        self.sent, self.last = dict.fromkeys(self.texts, 0), None


@contextmanager
def failing(place: object, name: str, *, afterwards: bool = False, skipped: int = 0) -> Iterator[list[str]]:
    """The next call of a method fails, maybe after all its work. skipped: calls before it."""
    method, calls = getattr(place, name), []

    def fail_once(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) != 1 + skipped or afterwards:
            result = method(*given, **named)
        if len(calls) == 1 + skipped:
            raise Injected(name)
        return result

    setattr(place, name, fail_once)
    yield calls
    delattr(place, name)


def check_cached_blocks(engine: TargetEngine, unfailing: TargetEngine) -> None:
    """Blocks of the same tokens hold the same keys and values."""
    shared = engine.pool._by_hash.keys() & unfailing.pool._by_hash.keys()
    assert shared
    found = []
    for one in (engine, unfailing):
        blocks = np.array([one.pool._by_hash[content] for content in shared])
        slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        found.append([tensor.cpu()[slots] for tensor in one._runner.kv.layer(0)])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["padded", "triton_tree"])
def test_sequences_that_are_sent_again_after_a_failure_have_their_tokens(unfailing, attention, request):
    device = torch.device("cpu") if attention == "padded" else request.getfixturevalue("triton_device")
    reference, texts = unfailing
    engine = slow_engine(attention, device)
    router = Router(engine, texts)
    runner = engine._runner
    router.run(3)
    places = [
        (engine._rounds, "begin", False),
        (engine._rounds, "begin", True),
        (runner, "_run", True),
        (engine, "prepare", False),
        (engine._rounds, "read", False),
        (runner.kv, "copy_slots", False),
        (engine, "result", False),
    ]
    ahead = [(engine._rounds, "begin"), (engine._rounds, "read"), (engine, "result")]
    if attention == "triton_tree":  # what the host alone does has been seen with padded attention
        places = [
            (runner, "_run", True),
            (engine, "prepare", False),
            (runner._arena, "send", False),
            (runner._arena, "send", True),
        ]
        ahead = ahead[1:2]
    for place, name, afterwards in places:
        with failing(place, name, afterwards=afterwards) as calls:
            router.run(2)
        assert calls
        check_cached_blocks(engine, reference)
        check_integrity(engine)
    for place, name in ahead:
        with failing(place, name, skipped=1) as calls:  # of the round that was sent ahead and followed at once
            router.run(3)
        assert len(calls) > 1
        check_cached_blocks(engine, reference)
        check_integrity(engine)
        places.append((place, name, False))
    router.start_again()
    router.run(1)
    # A round sent ahead that cannot be prepared is declined, and costs the round before it nothing.
    assert router.failed == [name for _, name, _ in places if name != "prepare"]
    assert router.num_declined >= 1
    assert router.num_cached > 0
