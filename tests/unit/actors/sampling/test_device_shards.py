"""Shards of a vocabulary draw the tokens of whole rows, bit for bit, or say that their leaders do not tell.

The kernels run as those of `test_device_sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.messages import SamplingParams
from actors.records import addresses_of
from actors.sampling import device_sampling
from actors.sampling.adjustment_table import AdjustmentTable
from actors.sampling.device_sampling import draw
from actors.sampling.device_shards import (
    NUM_LEADERS,
    Shard,
    best_of_shards,
    draw_from_shards,
    fill_tally,
    leaders_of_shard,
    num_leaders,
    score_shard,
    tokens_of_shards,
)
from actors.sampling.packed_rows import pack_sampling
from actors.sampling.processors import process_logits
from actors.sampling.rows import Paths, RowSampling, rows_for
from actors.sampling.sequence_sampling import SequenceSampling
from paceline_testing.sampled_rows import (
    TRUNCATING,
    by_tensors,
    dtypes,
    logits_of,
    params,
    rows_of_table,
    rows_with,
    shapes,
)
from tests.gpu.launches import Counting

pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")

# The interpreter is slow; shrinking a failure would take minutes.
few = settings(max_examples=8, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
WIDTH = 200
seeds = st.integers(0, 2**32)
# Where one shard ends and the next begins; those of three may be empty.
splits = st.lists(st.integers(0, WIDTH), min_size=1, max_size=2).map(sorted)
WIDE = {"top_p": 0.95, "temperature": 40.0}  # of nearly all tokens


@pytest.fixture(autouse=True, scope="module")
def narrow_tiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "TILE", 128)
        yield


def shards_of(
    logits: Tensor,
    rows: RowSampling,
    cuts: Sequence[int],
    allowed: Tensor | None = None,
    table: Tensor | None = None,
) -> list[Shard]:
    """allowed: bool, of the shape of the logits."""
    shards = []
    for first, end in zip([0, *cuts], [*cuts, logits.shape[1]], strict=True):
        packed = pack_sampling(rows, logits.shape[1], len(rows))
        bits = None if allowed is None else bits_of(allowed[:, first:end]).to(logits.device)
        words = torch.from_numpy(packed.words).to(logits.device)
        shards.append(Shard(logits[:, first:end], words, first, packed.num_slots, table, bits))
    return shards


def bits_of(allowed: Tensor) -> Tensor:
    padded = np.pad(allowed.numpy(), ((0, 0), (0, -allowed.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def draw_in_steps(shards: Sequence[Shard], count: int, vocab_size: int) -> Tensor:
    """As `draw_from_shards` of all ranks. Asserts that all of them find the same."""
    scored = [score_shard(shard) for shard in shards]
    if not count:
        return best_of_shards(torch.stack([own.bests.amax(dim=1) for own in scored])).cpu()
    found = [leaders_of_shard(shard, own, count) for shard, own in zip(shards, scored, strict=True)]
    leaders, tallies = (torch.stack(parts) for parts in zip(*found, strict=True))
    for shard, own, tally in zip(shards, scored, tallies, strict=True):
        fill_tally(shard, own, leaders, tally)
    tokens = [tokens_of_shards(leaders, tallies, shard.packed, vocab_size).tolist() for shard in shards]
    assert all(said == tokens[0] for said in tokens)
    return torch.tensor(tokens[0])


@few
@given(
    st.lists(params, min_size=2, max_size=4), shapes, dtypes, splits, st.sampled_from([4, 16, 64]), seeds,
    st.booleans(), st.sampled_from([0.0, 3.0]),
)  # fmt: skip
def test_any_split_of_the_vocabulary_draws_the_tokens_of_whole_rows_or_says_that_it_cannot_tell(
    triton_device, options, shape, dtype, cuts, count, seed, has_grammar, lead
):
    """lead: of the last shard, which then holds back larger scores than others give."""
    rows = rows_with(options)
    logits = logits_of(shape, len(rows), WIDTH, torch.float32, seed)
    logits[:, cuts[-1] :] += lead
    logits = logits.to(dtype)
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.4 if has_grammar else None
    masked = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
    wanted = by_tensors(masked, rows).tolist()
    tokens = draw_in_steps(
        shards_of(logits.to(triton_device), rows, cuts, allowed), min(count, num_leaders(rows)), WIDTH
    ).tolist()
    kept = (process_logits(masked, rows) > -math.inf).sum(dim=1).tolist()
    for row, (token, expected) in enumerate(zip(tokens, wanted, strict=True)):
        assert token in (expected, -1), row
        top_k = rows.records["top_k"][row]
        has_all = kept[row] < count and not count < top_k < WIDTH  # top-p needs the mass of all that top-k keeps
        if not rows.truncates[row] or has_all or 0 < top_k <= count:
            assert token == expected, row


ADJUSTING = [
    {"temperature": 0.0, "logit_bias": ((0, 9.0), (63, 9.5), (64, 9.25), (199, 9.0), (700, 50.0))},
    {"repetition_penalty": 1.8, "frequency_penalty": 1.0},
    {"presence_penalty": 2.0, "logit_bias": ((127, 6.0), (128, 6.0), (5, -100.0)), "top_p": 0.9},
    {"frequency_penalty": -1.5, "top_k": 20, "min_p": 0.01},
]


@settings(few, max_examples=4)
@given(
    st.lists(st.sampled_from([*ADJUSTING, {}]), min_size=1, max_size=3), splits, seeds,
    st.lists(st.integers(0, WIDTH - 1), max_size=20),
)  # fmt: skip
@example(ADJUSTING, [64, 128], 1, [0, 63, 64, 64, 127, 128, 199])
@example(ADJUSTING[::-1], [127], 2, [126, 127, 128, 9, 9])
def test_shards_read_the_adjustments_of_sequences_from_a_table(triton_device, options, cuts, seed, tokens):
    """Rows of the root and of two nodes of each sequence, whose draft tokens are adjusted, too. What the leaders do not
    tell is drawn from whole rows with the same table."""
    samplings = [SequenceSampling(SamplingParams(seed + index, **one), 2) for index, one in enumerate(options)]
    for sampling in samplings:
        sampling.extend(np.array(tokens, np.int32))
    draft = np.array([tokens[-1] if tokens else 7, seed % WIDTH], np.int32)
    count = 3 * len(options)
    index = np.arange(count)
    sizes = np.append(0, np.cumsum(index % 3))
    paths = Paths(np.concatenate([draft[:depth] for depth in index % 3]), sizes)
    table = AdjustmentTable(triton_device)
    table.assign(addresses_of(samplings))
    rows = rows_of_table(samplings, index // 3, index, paths)
    table.write(*(torch.from_numpy(part).to(triton_device) for part in table.updates))

    logits = logits_of("usual", count, WIDTH, torch.bfloat16, seed)
    wanted = by_tensors(logits, rows_for(samplings, index // 3, index, paths))
    logits = logits.to(triton_device)
    found = draw_in_steps(shards_of(logits, rows, cuts, table=table.tensor), num_leaders(rows), WIDTH)
    assert torch.equal(found[~rows.truncates], wanted[~rows.truncates])
    is_missing = found < 0
    missing = np.flatnonzero(is_missing)
    if len(missing):
        found[is_missing] = draw(logits[missing], rows.take(missing), table=table.tensor).tokens.cpu()
    assert torch.equal(found, wanted)


@settings(few, max_examples=4)
@given(st.lists(st.sampled_from(TRUNCATING), min_size=1, max_size=3), splits, seeds)
def test_whole_rows_of_the_same_kernels_give_the_same(triton_device, options, cuts, seed):
    """These are what a process without shards runs on a device."""
    rows = rows_with([SamplingParams(seed + index, **one) for index, one in enumerate(options)])
    logits = logits_of("usual", len(rows), WIDTH, torch.bfloat16, seed).to(triton_device)
    wanted = draw(logits, rows).tokens.tolist()
    tokens = draw_in_steps(shards_of(logits, rows, cuts), num_leaders(rows), WIDTH).tolist()
    assert all(token in (expected, -1) for token, expected in zip(tokens, wanted, strict=True))
    top_ks = rows.records["top_k"]
    assert -1 not in [token for token, top_k in zip(tokens, top_ks, strict=True) if 0 < top_k <= NUM_LEADERS]


def test_where_the_leaders_end_before_the_cut_they_tell_the_token_if_it_is_one_of_them(triton_device):
    """The token is then the winner among all tokens, with or without a cut."""
    rows = rows_with([SamplingParams(seed, top_p=0.95, temperature=2.0) for seed in range(32)])
    logits = logits_of("usual", len(rows), WIDTH)
    half = WIDTH // 2
    tokens = draw_in_steps(shards_of(logits.to(triton_device), rows, [half]), 4, WIDTH)
    wanted = by_tensors(logits, rows)
    assert ((process_logits(logits, rows) > -math.inf).sum(dim=1) > 8).all()
    # Below the last leader of either shard, the other may have held back a larger score.
    bound = torch.maximum(logits[:, :half].topk(4).values[:, -1], logits[:, half:].topk(4).values[:, -1])
    is_certain = logits.gather(1, wanted[:, None])[:, 0] >= bound
    assert 4 < is_certain.sum() < 28
    assert torch.equal(tokens, torch.where(is_certain, wanted, -1))


def test_rows_that_are_nearly_flat_are_not_told(triton_device):
    rows = rows_with([SamplingParams(seed, **WIDE) for seed in range(12)])
    tokens = draw_in_steps(shards_of(logits_of("usual", 12, WIDTH).to(triton_device), rows, [150]), 4, WIDTH)
    assert (tokens == -1).sum() > 6


@settings(few, max_examples=2)
@given(st.lists(st.floats(-3, 3, width=16), min_size=2, max_size=12), st.integers(1, 12), st.integers(0, 12), seeds)
@example([1.0] * 8, 3, 5, 0)  # half of the mass is that of four tokens, exactly
def test_cuts_among_equal_scores_keep_the_lowest_ids(triton_device, values, top_k, cut, seed):
    options = [{"top_k": top_k, "temperature": 5.0}, {"top_p": 0.5, "temperature": 5.0}]
    rows = rows_with([SamplingParams(seed + index, **one) for index in range(6) for one in options])
    logits = torch.tensor([values] * len(rows))
    shards = shards_of(logits.to(triton_device), rows, [min(cut, len(values))])
    assert draw_in_steps(shards, 16, len(values)).tolist() == by_tensors(logits, rows).tolist()


def test_which_leaders_rows_need():
    for options, wanted in (
        ({"temperature": 0.0, "top_p": 0.5}, 0), ({}, 0), ({"min_p": 0.1}, 1), ({"top_p": 0.9}, NUM_LEADERS),
        ({"top_k": 2}, NUM_LEADERS),
    ):  # fmt: skip
        assert num_leaders(rows_with([SamplingParams(1), SamplingParams(1, **options)])) == wanted


@pytest.mark.parametrize(("options", "kernels", "words"), [
    ({}, 3, 1), ({"min_p": 0.1}, 4, 1 + 2), ({"top_p": 0.9, "top_k": 40}, 5, NUM_LEADERS + 2),
])  # fmt: skip
def test_launches_and_exchanged_words_do_not_grow_with_the_vocabulary(options, kernels, words):
    for columns in (2_000, 16_032):
        rows = rows_with([SamplingParams(1, **options)] * 9)
        (_, shard) = shards_of(torch.empty(9, 2 * columns, device="meta"), rows, [columns])
        sent: list[int] = []

        def gather(part: Tensor, sent: list[int] = sent) -> Tensor:
            sent.append(part.nbytes // len(part))
            return part.new_empty(8, *part.shape)

        with Counting() as mode:
            tokens = draw_from_shards(shard, num_leaders(rows), 8 * columns, gather)
        assert tokens.shape == (9,)
        assert sum(sent) == 8 * words
        assert mode.counts == {"kernels": kernels}, mode.kernels


def test_operators_do_what_their_schemas_and_shapes_say(triton_device):
    rows = rows_with([SamplingParams(1, top_p=0.9), SamplingParams(2, top_k=3, logit_bias=((3, 1.0),))])
    (shard,) = shards_of(logits_of("usual", 2, WIDTH).to(triton_device), rows, [])
    bests, adjusted = score_shard(shard)
    ops = torch.ops.paceline

    def checked(operator, *arguments):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    of_tiles = checked(ops.shard_leaders, shard.logits, shard.packed, None, adjusted, shard.first_id, 16)
    leaders, tally = checked(ops.merge_leaders, of_tiles, shard.packed)
    checked(ops.shard_tally, shard.logits, shard.packed, None, adjusted, bests, leaders[None], tally, shard.first_id)
    checked(ops.join_shards, leaders[None], tally[None], shard.packed, WIDTH)
