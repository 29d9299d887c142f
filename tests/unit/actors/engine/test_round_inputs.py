"""What is written for the device is what `pack` and `rows_for` lay out, with padding around it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.block_pool import BlockPool
from actors.engine.device_inputs import SAMPLING_PLACE, Shape, _layout_of, arrays_in, ints_in
from actors.engine.draft_trees import joined
from actors.engine.kv_cache import KvCache, LayerShape
from actors.engine.planned_round import PlannedRound, planned, wanted_rows
from actors.engine.round_inputs import sampling_addresses, sizes_of, write_round
from actors.engine.row_tiers import context_tier, power_tier, row_tier
from actors.engine.sequence_table import SequenceTable
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyItem
from actors.sampling.adjustment_table import AdjustmentTable
from actors.sampling.device_sampling import NO_TREE
from actors.sampling.packed_rows import sampling_in, words_of
from actors.sampling.sequence_sampling import ADJUSTMENT

SAMPLINGS = [
    SamplingParams(1, temperature=0.0),
    SamplingParams(2, temperature=0.9, top_p=0.8),
    SamplingParams(3, temperature=0.7, repetition_penalty=1.4),
    SamplingParams(4, temperature=0.7, logit_bias=((3, 1.0), (9, -2.0))),
]
BLOCK, PADDING_SLOT = 4, 999


def round_of(rng: np.random.Generator, count: int) -> PlannedRound:
    pool = BlockPool(200, BLOCK)
    table = SequenceTable(pool, KvCache(200 * BLOCK, torch.device("cpu"), [LayerShape(1, 1, 1, torch.float32)]))
    items, tokens, parents = [], [], []
    for seq_id in range(1, count + 1):
        prompt = rng.integers(0, 20, int(rng.integers(1, 12))).astype(np.int32)
        begin = SequenceStart(SAMPLINGS[int(rng.integers(0, 4))], len(prompt) // 2)
        items.append(VerifyItem(SequenceDelta(seq_id, 0, prompt), int(rng.integers(1, 12)), None, begin))
        nodes = int(rng.choice([0, 1, 5, 70]))
        is_chain = rng.random() < 0.3
        own = [node - 1 if is_chain else int(rng.integers(-1, node)) for node in range(nodes)]
        tokens.append(rng.integers(0, 20, nodes).astype(np.int32))
        parents.append(np.array(own, np.int32))
    taken = table.take_in(items, [len(one) for one in tokens])
    return planned(taken, joined(tokens, parents))


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 6))
def test_arrays_of_the_device_are_those_that_are_laid_out_apart(seed, count):
    round = round_of(np.random.default_rng(seed), count)
    batch, emitting, trees = round.pack(), round.emitting, round.emitting_trees
    sizes = sizes_of(round.items, round.trees)
    assert (sizes.rows, sizes.words, sizes.max_context) == (batch.num_rows, batch.ancestors.shape[1], batch.max_context)
    assert sizes.most_rows == np.diff(batch.first_rows).max()
    assert (sizes.trees, sizes.logits) == (len(emitting), len(emitting) + len(trees.tokens))
    assert sizes.trees == round.num_emitting
    logits = row_tier(sizes.logits)
    shape = Shape(
        row_tier(sizes.rows), power_tier(count), sizes.words, context_tier(sizes.max_context), BLOCK, logits,
        power_tier(sizes.trees), words_of(logits, sizes.own_adjustments) if sizes.trees else 0,
    )  # fmt: skip
    table = AdjustmentTable(torch.device("cpu"))
    table.assign(sampling_addresses(round.items))
    places, _, num_words = _layout_of(shape)
    words = np.full(num_words, -5, np.int64)  # of an earlier round
    write_round(round.items, round.trees, PADDING_SLOT, words, places, shape)
    found = arrays_in(words, places, *shape[:6])
    rows, sequences = sizes.rows, count
    wanted = wanted_rows(round.items, batch.first_rows)
    for own, array in zip(
        found[:2] + found[3:10],
        (batch.token_ids, batch.positions, batch.slots, batch.first_rows, batch.begins, batch.tree_starts,
         batch.block_tables, batch.visible_ends, batch.ancestors),
        strict=True,
    ):  # fmt: skip
        corner = own[tuple([slice(size) for size in array.shape])]
        assert corner.tolist() == array[tuple([slice(size) for size in corner.shape])].tolist()
    assert found[2][: len(wanted)].tolist() == wanted.tolist()
    assert not found[2][len(wanted) :].any()
    assert (found[3][rows:] == PADDING_SLOT).all()
    assert (found[4][sequences:] == rows).all()
    assert found[10][:rows].tolist() == batch.positions.tolist()
    assert found[11][:sequences].tolist() == batch.node_positions.tolist()
    if not sizes.trees:
        return
    nodes = len(trees.tokens)
    assert ints_in(words, places[SAMPLING_PLACE + 1], logits)[:nodes].tolist() == trees.tokens.tolist()
    assert ints_in(words, places[SAMPLING_PLACE + 2], logits)[:nodes].tolist() == trees.parents.tolist()
    offsets = ints_in(words, places[SAMPLING_PLACE + 3], shape.trees + 1)
    assert offsets.tolist() == trees.offsets.tolist() + [NO_TREE] * (shape.trees - sizes.trees)
    check_sampling(round, table, words[places[SAMPLING_PLACE] :], logits)


def check_sampling(round: PlannedRound, table: AdjustmentTable, words: np.ndarray, logits: int) -> None:
    sizes, whole = sizes_of(round.items, round.trees), round.sampling()
    own = sampling_in(words, sizes.logits, logits, sizes.own_adjustments)
    table.write(*map(torch.from_numpy, table.updates))
    shared = table.tensor.numpy().view(ADJUSTMENT)[:, 0]
    for name in ("seed", "position", "top_k", "top_p", "temperature", "min_log_ratio", "flags"):
        assert own.records[name].tolist() == whole.records[name].tolist()
    assert own.adjusts.tolist() == whole.adjusts.tolist()
    assert (own.adjusts.sum(), bool(own.truncates.any())) == (sizes.adjusted, sizes.truncates)
    for found, wanted in zip(own.records, whole.records, strict=True):
        assert (
            shared[found["begin"] : found["end"]].tolist()
            == whole.adjustments[wanted["begin"] : wanted["end"]].tolist()
        )
        mine = own.adjustments[found["own_begin"] : found["own_end"]]
        assert mine.tolist() == whole.adjustments[wanted["own_begin"] : wanted["own_end"]].tolist()
