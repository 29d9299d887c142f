"""Rounds of a sequence table against lists of tokens: what is known, computed and accepted, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.block_pool import BlockPool
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.round_items import READY, STALE, STARVED, record_forward
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import SequenceTable
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyItem
from paceline_testing.integrity import check_integrity

BLOCK_SIZE = 4


def tree_of(draws: list[tuple[int, int]]) -> tuple[list[int], tuple[int, ...]]:
    """Tokens and parents, where siblings have different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for token, draw in draws:
        parent = draw % (len(tokens) + 1) - 1
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, tuple(parents)


TREES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 19)), max_size=20).map(tree_of)


@dataclass
class Known:
    """What a worker must have of a sequence."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    tree: list[tuple[int, ...]] = field(default_factory=list)  # the path to each draft node, if all tokens are computed

    def take_in(self, told: list[int]) -> None:
        accepted = 0
        while accepted < len(told) - 1 and tuple(told[: accepted + 1]) in self.tree:
            accepted += 1
        self.tokens, self.computed, self.tree = self.tokens + told, self.computed + accepted, []


def paths_of(tokens: list[int], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class Rounds:
    """A table whose forwards fill slots with what the text up to there is."""

    def __init__(self, num_blocks: int) -> None:
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.kv = KvCache(num_blocks * BLOCK_SIZE, torch.device("cpu"), [LayerShape(1, 1, 1, torch.float64)])
        self.slots = self.kv.layer(0)[0][:, 0, 0]
        self.table = SequenceTable(pool, self.kv)
        self.known: dict[int, Known] = {}

    def run(self, items: list[VerifyItem], trees: list[tuple[list[int], tuple[int, ...]]]) -> None:
        taken = self.table.take_in(items, [len(tokens) for tokens, _ in trees])
        sequences, rows = taken.sequences, taken.items
        self.kv.settle()
        nodes: list[tuple[int, int]] = []
        for index, (item, sequence) in enumerate(zip(items, sequences, strict=True)):
            row, delta = rows[index], item.delta
            known = Known() if delta.start == 0 else self.known.get(delta.seq_id)
            is_stale = known is None or len(known.tokens) != delta.start
            is_stale = is_stale or (not len(delta.token_ids) and known.computed == len(known.tokens))
            assert (row["status"] == STALE) == is_stale
            if is_stale or (row["status"] == STARVED and delta.start == 0):
                self.known.pop(delta.seq_id, None)
            if row["status"] != READY:
                continue
            known.take_in(delta.token_ids.tolist())
            self.known[delta.seq_id] = known
            if delta.start == 0:
                known.computed = sequence.num_cached
            self.check(sequence, known)
            pending = len(known.tokens) - known.computed
            assert row["count"] == min(pending, item.max_rows)
            assert row["is_last"] == (row["count"] == pending)
            paths = paths_of(*trees[index])[: row["num_nodes"]]
            # Blocks of a sequence that is stale are free only after those before it were cut.
            had_none_left = not self.table._pool.num_free or (rows["status"] == STALE).any()
            assert len(paths) == (len(trees[index][0]) if row["is_last"] else 0) or had_none_left
            known.computed += int(row["count"])
            known.tree = paths
            nodes += list(zip(*trees[index], strict=True))[: row["num_nodes"]]
            texts = [known.tokens[: end + 1] for end in range(known.computed)]
            texts += [[*known.tokens, *path] for path in paths]
            first = known.computed - int(row["count"])
            for slot, text in zip(sequence.slots(first, len(texts)).tolist(), texts[first:], strict=True):
                self.slots[slot] = value_of(text)
        ready = rows[rows["status"] == READY]
        assert (taken.num_ready, taken.num_nodes) == (len(ready), ready["num_nodes"].sum())
        tokens, parents = np.array(nodes, np.int32).reshape(-1, 2).T.copy()
        record_forward(ready, tokens, parents)
        self.table.publish([one for one, row in zip(sequences, rows, strict=True) if row["status"] == READY], ready)
        assert {key: one.num_computed for key, one in self.table._sequences.items()} == {
            key: one.computed for key, one in self.known.items()
        }
        check_integrity(self.table)

    def check(self, sequence: Sequence, known: Known) -> None:
        assert sequence.tokens.tolist() == known.tokens
        assert sequence.num_computed == known.computed
        slots = sequence.slots(0, known.computed)
        assert self.slots[slots].tolist() == [value_of(known.tokens[: end + 1]) for end in range(known.computed)]
        expected: dict[int, int] = {}
        for token in known.tokens[sequence.begin.num_prompt_tokens :]:
            expected[token] = expected.get(token, 0) + 1
        sampling, used = sequence.sampling, sequence.sampling._record["num_distinct"].item()
        told = zip(sampling._adjustments["token"][:used].tolist(), sampling._counts[:used].tolist(), strict=True)
        assert {token: count for token, count in told if count} == expected


def value_of(text: list[int]) -> float:
    return float(hash(tuple(text)) % (1 << 50))


@given(st.integers(3, 40), st.data())
def test_rounds_keep_what_lists_keep(num_blocks, data):
    rounds = Rounds(num_blocks)
    for _ in range(data.draw(st.integers(1, 12))):
        items, trees = [], []
        for seq_id in data.draw(st.lists(st.integers(1, 4), max_size=4, unique=True)):
            known = rounds.known.get(seq_id, Known())
            told = list(data.draw(st.sampled_from([(), *known.tree])))
            told += data.draw(st.lists(st.integers(0, 3), min_size=0 if known.tokens else 1, max_size=9))
            start = data.draw(st.sampled_from([len(known.tokens)] * 9 + [0, len(known.tokens) + 1]))
            if start == 0 and not told:
                told = [1]
            begin = SequenceStart(SamplingParams(seed=seq_id, presence_penalty=0.5), 3) if start == 0 else None
            delta = SequenceDelta(seq_id, start, np.array(told, np.int32))
            items.append(VerifyItem(delta, data.draw(st.integers(1, 9)), None, begin))
            trees.append(data.draw(TREES))
        if items:
            rounds.run(items, trees)
        if data.draw(st.integers(0, 5)) == 0 and rounds.known:
            seq_id = data.draw(st.sampled_from(sorted(rounds.known)))
            rounds.table.forget(seq_id)
            del rounds.known[seq_id]


def test_clearing_does_without_the_blocks_counts_which_an_interruption_may_have_left_wrong():
    pool = BlockPool(8, BLOCK_SIZE)
    kv = KvCache(8 * BLOCK_SIZE, torch.device("cpu"), [LayerShape(1, 1, 1, torch.float64)])
    table = SequenceTable(pool, kv)
    delta = SequenceDelta(1, 0, np.arange(10, dtype=np.int32))
    sequence = table.find(delta, SequenceStart(SamplingParams(1), 5))
    assert sequence is not None
    assert table.bring_up_to_date(sequence, delta, 100)
    pool.release(sequence.blocks.tolist())  # an interrupted `free` got so far
    table.clear()
    assert len(table) == 0
    assert pool.num_free == pool.num_blocks
    assert sequence.num_blocks == 0
