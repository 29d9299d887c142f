"""Recurrent states of prefixes: whatever was evicted, preempted or failed, answers from cached states are the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.engine.block_pool import BlockPool, block_hash, root_hash
from actors.engine.options import EngineOptions
from actors.engine.recurrent.mixer_runs import RunLimits
from actors.engine.recurrent.states import StatesAt
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from actors.models.random_model import random_model
from actors.models.tiny_config import VOCAB_SIZE, config_of_type, tiny_config
from paceline_testing.integrity import check_integrity

KINDS = ["lfm2", "qwen3_next", "nemotron_h", "jamba"]  # one of each way to compute several rows
BLOCK = 4
ANSWER = 9
GREEDY = SamplingParams(seed=1, temperature=0.0)


def engine_of(kind: str, **options) -> TargetEngine:
    return TargetEngine(random_model(tiny_config(config_of_type(kind))), EngineOptions(block_size=BLOCK, **options))


def prompts_of() -> list[list[int]]:
    """Two families that begin alike, inside a block and at its border; and some that end at one."""
    rng = np.random.default_rng(0)
    common, more = (rng.integers(0, VOCAB_SIZE, count).tolist() for count in (18, 16))
    rests = [rng.integers(0, VOCAB_SIZE, count).tolist() for count in (2, 5, 6, 11)]
    alike = [common + rests[0], common + rests[1], common[:12] + rests[2], common[:12] + rests[3]]
    return [*alike, more, more + rests[3], more[:9], [7]]


@dataclass
class Client:
    """A text whose answer is known, asked of an engine round by round."""

    seq_id: int
    truth: list[int]  # with the answer
    num_prompt: int
    length: int  # tokens that are known
    sent: int = 0
    cached: list[int] = field(default_factory=list)

    def item(self, rows: int, right: int, wrong: int) -> VerifyItem:
        chain = self.truth[self.length :][:right] + [(self.truth[-1] + 1 + n) % VOCAB_SIZE for n in range(wrong)]
        tokens = np.array(self.truth[self.sent : self.length], np.int32)
        begin = None if self.sent else SequenceStart(GREEDY, self.num_prompt)
        draft = DraftTree.chain(np.array(chain, np.int32), np.ones(len(chain), np.float32))
        return VerifyItem(SequenceDelta(self.seq_id, self.sent, tokens), rows, draft, begin)

    def take(self, item: VerifyItem, verdict) -> None:
        self.sent = self.length
        if item.delta.start == 0:
            self.cached.append(verdict.num_cached)
        if verdict.next_token >= 0:
            told = [*item.tree.token_ids[verdict.path].tolist(), verdict.next_token]
            assert told == self.truth[self.length :][: len(told)] or self.length + len(told) > len(self.truth)
            self.length = min(len(self.truth), self.length + len(told))

    @property
    def is_open(self) -> bool:
        return self.length < len(self.truth)


def answer(engine: TargetEngine, client: Client, rows: int = 5, right: int = 0, wrong: int = 0) -> Client:
    while client.is_open:
        item = client.item(rows, right, wrong)
        client.take(item, engine.verify(VerifyBatch(0, [item])).verdicts[0])
    engine.verify(VerifyBatch(0, [], [client.seq_id]))
    return client


@cache
def texts_of(kind: str) -> list[tuple[list[int], int]]:
    """Texts with answers and the lengths of their prompts: of all prompts, and of what is asked after two answers.
    Computed without cached prefixes."""
    engine, texts = engine_of(kind, num_blocks=64, prefix_cache=False), []
    prompts = prompts_of()
    for index, prompt in enumerate(prompts):
        text = list(prompt)
        for length in range(len(prompt), len(prompt) + ANSWER):
            tokens = np.array(text[0 if length == len(prompt) else -1 :], np.int32)
            begin = SequenceStart(GREEDY, len(prompt)) if length == len(prompt) else None
            item = VerifyItem(SequenceDelta(1, length - len(tokens), tokens), 99, None, begin)
            text.append(engine.verify(VerifyBatch(0, [item])).verdicts[0].next_token)
        engine.verify(VerifyBatch(0, [], [1]))
        texts.append((text, len(prompt)))
        if index in (0, 4):
            prompts.append([*text, 5, 6, 7])
    return texts


def client_of(kind: str, text: int, seq_id: int = 1) -> Client:
    truth, num_prompt = texts_of(kind)[text]
    return Client(seq_id, truth, num_prompt, num_prompt)


@cache
def state_after(kind: str, tokens: tuple[int, ...]) -> StatesAt:
    """Computed in one run."""
    engine = engine_of(kind, num_blocks=64, prefix_cache=False)
    engine._runner._limits = RunLimits(most_replayed=0)
    item = VerifyItem(
        SequenceDelta(1, 0, np.array([*tokens, 1], np.int32)), len(tokens), None, SequenceStart(GREEDY, 1)
    )
    engine.verify(VerifyBatch(0, [item]))
    return engine._table.get(1).states


def check_cached_states(kind: str, engine: TargetEngine) -> int:
    """Raises AssertionError if a cached state is not that of its block's text. Returns how many there are."""
    found = 0
    for text, _ in texts_of(kind):
        parent = root_hash("")
        for end in range(BLOCK, len(text) + 1, BLOCK):
            parent = block_hash(parent, np.array(text[end - BLOCK : end], np.int32))
            states = engine.pool._states.get(engine.pool._by_hash.get(parent, -1))
            if states is None:
                continue
            found += 1
            expected = state_after(kind, tuple(text[:end]))
            assert states.num_tokens == end
            assert states.mixers.keys() == expected.mixers.keys()
            for mixer, own in states.mixers.items():
                for tensor, right in zip(own, expected.mixers[mixer], strict=True):
                    if right is not None:
                        torch.testing.assert_close(tensor, right, rtol=1e-3, atol=1e-3)
    return found


# One step of a server: a text that begins, and for the running ones how many rows they may compute and the right and
# wrong draft tokens behind them; or a round that fails, and when; or a text that is preempted.
STEP = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 9)),
    st.tuples(st.just("round"), st.tuples(st.sampled_from([1, 3, 40]), st.integers(0, 3), st.integers(0, 2))),
    st.tuples(st.just("round"), st.tuples(st.just(40), st.integers(0, 9), st.integers(0, 9))),
    st.tuples(st.just("preempt"), st.integers(0, 2)),
    st.tuples(st.just("fail"), st.booleans()),
)


class Injected(Exception):
    pass


def fail(engine: TargetEngine, clients: list[Client], afterwards: bool) -> None:
    """A round that fails before or after its forward, and what a worker does then."""
    forward = engine._runner.forward

    def failing(*given):
        if afterwards:
            forward(*given)
        raise Injected

    engine._runner.forward = failing
    with pytest.raises(Injected):
        engine.verify(VerifyBatch(0, [client.item(40, 1, 1) for client in clients]))
    del engine._runner.forward
    engine.clear()


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_next",
        "nemotron_h",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lfm2", "jamba", "kimi_linear", "minimax")),
    ],
)
@settings(max_examples=6, deadline=None)
@given(st.lists(STEP, min_size=12, max_size=25), st.sampled_from([14, 40]), st.sampled_from([1, 3, 20]))
def test_answers_are_those_without_cached_states(kind, steps, num_blocks, max_states):
    engine = engine_of(kind, num_blocks=num_blocks, max_cached_states=max_states)
    running: list[Client] = []
    for seq_id, (what, how) in enumerate(steps):
        if what == "begin" and len(running) < 3:
            running.append(client_of(kind, how, seq_id))
        elif what == "preempt" and how < len(running):
            engine.verify(VerifyBatch(0, [], [running[how].seq_id]))
            running[how].sent = 0
        elif what == "fail" and running:
            fail(engine, running, how)
            for client in running:
                client.sent = 0
        elif what == "round" and running:
            items = [client.item(*how) for client in running]
            result = engine.verify(VerifyBatch(0, items))
            told = {verdict.seq_id: verdict for verdict in result.verdicts}
            for client, item in zip(running, items, strict=True):
                if client.seq_id in told:
                    client.take(item, told[client.seq_id])
                else:
                    assert client.seq_id in result.starved_seq_ids
            ended = [client.seq_id for client in running if not client.is_open]
            # Blocks are needed: whoever has found none gives up all.
            preempted = [client for client in running if client.seq_id in result.starved_seq_ids]
            for client in preempted:
                client.sent = 0
            engine.verify(VerifyBatch(0, [], ended + [client.seq_id for client in preempted]))
            running = [client for client in running if client.is_open]
        check_integrity(engine)
        assert len(engine.pool._states) <= max_states
    check_cached_states(kind, engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_conversation_goes_on_from_the_end_of_the_last_turn(kind, wrong):
    engine = engine_of(kind, num_blocks=64)
    first = answer(engine, client_of(kind, 0), right=2 * wrong, wrong=wrong)
    assert first.cached == [0]
    second = answer(engine, client_of(kind, 8), right=1)
    computed = len(first.truth) - 1
    # Rows that are not in a state at the end are computed again.
    kept = RunLimits().most_replayed + BLOCK if wrong or kind == "nemotron_h" else 0
    assert computed - kept <= second.cached[0] <= computed
    assert check_cached_states(kind, engine) >= 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nemotron_h"])  # which keeps rows out of states
def test_the_same_prompt_is_found_again_up_to_its_last_block(kind):
    engine = engine_of(kind, num_blocks=64)
    for text, (_, num_prompt) in enumerate(texts_of(kind)[:5]):
        answer(engine, client_of(kind, text), rows=99)
        again = answer(engine, client_of(kind, text), rows=99)
        assert again.cached == [(num_prompt - 1) // BLOCK * BLOCK]


def test_a_shared_beginning_is_found_from_the_third_prompt_on():
    kind = KINDS[0]
    engine = engine_of(kind, num_blocks=64)
    assert [answer(engine, client_of(kind, text)).cached[0] for text in (0, 2, 3)] == [0, 0, 12]


def test_a_prompt_is_found_while_its_answer_is_written():
    kind = KINDS[0]
    engine = engine_of(kind, num_blocks=64)
    first = client_of(kind, 0)
    item = first.item(99, 0, 0)
    first.take(item, engine.verify(VerifyBatch(0, [item])).verdicts[0])
    assert answer(engine, client_of(kind, 0, seq_id=2)).cached == [16]
    answer(engine, first)


def test_a_state_goes_with_its_block():
    pool = BlockPool(2, BLOCK, max_cached_states=2)
    blocks = pool.allocate(2)
    for number, content in zip(blocks, (b"a", b"b"), strict=True):
        pool.publish(number, content)
        pool.attach_states(content, content)
    pool.release(blocks)
    assert pool.deepest_states(blocks) == (2, b"b")
    pool.allocate(1)
    assert pool.deepest_states(blocks) == (1, b"a")
    pool.attach_states(b"b", b"b")
    assert len(pool._states) == 1
    pool.clear()
    assert not pool._states


def test_states_found_least_recently_are_dropped_first():
    pool = BlockPool(3, BLOCK, max_cached_states=2)
    blocks = pool.allocate(3)
    for number, content in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(number, content)
    pool.attach_states(b"a", b"a")
    pool.attach_states(b"b", b"b")
    assert pool.deepest_states(blocks[:1]) == (1, b"a")
    pool.attach_states(b"c", b"c")
    assert [pool.deepest_states([number])[1] for number in blocks] == [b"a", None, b"c"]


def test_without_room_for_states_no_prefix_is_shared():
    engine = engine_of(KINDS[0], num_blocks=64, max_cached_states=0)
    assert not engine.pool.prefix_cache
    assert [answer(engine, client_of(KINDS[0], 0)).cached for _ in range(2)] == [[0], [0]]
