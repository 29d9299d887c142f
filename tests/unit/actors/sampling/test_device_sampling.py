"""The kernels draw the same tokens as the tensor operations on a CPU, bit for bit.

They run under Triton's interpreter, and with TRITON_INTERPRET=0 on the GPU.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.messages import SamplingParams
from actors.sampling import device_sampling, noise, sampler
from actors.sampling.device_sampling import (
    NO_TREE,
    draw,
    draw_packed,
    likeliest_packed,
    walk_trees,
)
from actors.sampling.packed_rows import pack_sampling
from actors.sampling.processors import process_logits
from actors.sampling.rows import IS_HOT, ROW, RowSampling
from actors.sampling.sequence_sampling import ADJUSTMENT
from actors.sampling.verification import walk_tree
from paceline_testing.sampled_rows import TRUNCATING, by_tensors, dtypes, logits_of, params, rows_with, shapes
from tests.gpu.launches import Counting

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from actors.sampling.triton_kernels import gumbel  # noqa: E402  # needs triton

# The interpreter is slow; shrinking a failure would take minutes.
few = settings(max_examples=20, derandomize=True, phases=[Phase.explicit, Phase.generate])
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
NARROW = 256  # columns of a program in most tests, for rows of several tiles


@pytest.fixture(autouse=True, scope="module")
def narrow_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "TILE", NARROW)
        yield


def put(values: np.ndarray | Tensor) -> Tensor:
    return torch.as_tensor(values).to(DEVICE)


def pack_rows(rows: RowSampling) -> np.ndarray:
    return pack_sampling(rows, 0).words


@few
@given(
    st.lists(params, min_size=1, max_size=4), shapes, dtypes, st.sampled_from([5, 256, 700]),
    st.sampled_from([1, 3, 1000]), st.booleans(),
)  # fmt: skip
def test_kernels_find_the_likeliest_tokens_that_tensor_operations_find(
    options: list[SamplingParams], shape: str, dtype: torch.dtype, width: int, k: int, has_ids: bool
) -> None:
    rows = rows_with(options)
    logits = logits_of(shape, len(options), width, dtype)
    ids = torch.arange(width) * 3 + 2 if has_ids else None
    wanted_tokens, wanted_probs = sampler.likeliest_tokens(logits, rows, k, ids)
    packed = pack_sampling(rows, width, len(rows), None if ids is None else ids.numpy())
    tokens, probs = likeliest_packed(
        put(logits),
        put(packed.words),
        k,
        num_slots=packed.num_slots,
        truncates=packed.truncates,
        token_ids=None if ids is None else put(ids),
    )
    torch.testing.assert_close(probs.cpu(), wanted_probs, atol=1e-5, rtol=1e-4, equal_nan=True)
    sums = process_logits(logits, rows, ids)
    if sampler._add_noise(sums, rows, ids):
        sums.mul_(torch.from_numpy(rows.temperature).unsqueeze(-1))
    columns = [tokens.cpu() if ids is None else (tokens.cpu() - 2) // 3 for tokens in (tokens, wanted_tokens)]
    found, wanted = (sums.gather(-1, one) for one in columns)  # equal sums are in any order
    torch.testing.assert_close(found, wanted, atol=0.0, rtol=0.0, equal_nan=True)
    assert all(len(row.unique()) == len(row) for row in columns[0])


@few
@given(st.lists(params, min_size=1, max_size=4), shapes, dtypes, st.sampled_from([1, 5, 256, 1000]))
def test_kernels_draw_what_tensor_operations_draw(
    options: list[SamplingParams], shape: str, dtype: torch.dtype, width: int
) -> None:
    rows = rows_with(options)
    logits = logits_of(shape, len(options), width, dtype)
    there = put(logits.clone())
    assert draw(there, rows).tokens.tolist() == by_tensors(logits, rows).tolist()
    assert torch.equal(there.cpu(), logits)


@settings(few, max_examples=8)
@given(st.lists(params, min_size=1, max_size=3), st.sampled_from([60, 400]))
def test_a_reduced_vocabulary_draws_the_ids_that_tensor_operations_draw(
    options: list[SamplingParams], width: int
) -> None:
    token_ids = torch.randperm(3 * width, generator=torch.Generator().manual_seed(7))[:width].sort().values
    token_ids[:2] = torch.tensor([3, 5])
    logits, rows = logits_of("tied", len(options), width), rows_with(options)
    assert draw(put(logits), rows, put(token_ids)).tokens.tolist() == by_tensors(logits, rows, token_ids).tolist()


def test_every_tile_of_a_whole_vocabulary_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampling, "TILE", 8192)
    options = [SamplingParams(3), SamplingParams(4, top_p=0.97), SamplingParams(5, temperature=1.5, top_k=3000)]
    logits, rows = logits_of("usual", 3, 49_152, torch.bfloat16), rows_with(options)
    assert draw(put(logits), rows).tokens.tolist() == by_tensors(logits, rows).tolist()


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    wide = put(logits_of("usual", 2, 900))
    rows = rows_with([SamplingParams(1), SamplingParams(2, top_p=0.8)])
    for logits in (wide[:, :700], wide.repeat_interleave(2, dim=1)[:, ::2]):
        assert draw(logits, rows).tokens.tolist() == by_tensors(logits.cpu().contiguous(), rows).tolist()


def kept_by_kernels(logits: Tensor, rows: RowSampling) -> Tensor:
    """bool [R, V]: the columns above the cut of top-k and top-p, and within min-p of the best."""
    ops, packed, there = torch.ops.paceline, put(pack_rows(rows)), put(logits)
    bests, adjusted, counts, masses, _ = ops.sample_score(there, packed, None, None, None, len(rows), True, False, 0)
    peaks = ops.sample_histogram(there, packed, None, adjusted, bests, counts, masses)
    cuts = ops.sample_cut(there, packed, None, adjusted, counts, masses, peaks).cpu()
    plain = rows.records.copy()
    plain["flags"] &= IS_HOT
    scores = process_logits(logits, replace(rows, records=plain))
    image = (scores + 0.0).view(torch.int32)
    image = torch.where(image < 0, image ^ 0x7FFFFFFF, image).to(torch.int64)
    keys = (image << 32) + (0xFFFFFFFF - torch.arange(scores.shape[-1]))
    best = scores.max(dim=-1, keepdim=True).values
    return (keys >= cuts.unsqueeze(-1)) & (
        scores - best >= torch.from_numpy(rows.records["min_log_ratio"]).unsqueeze(-1)
    )


@pytest.mark.parametrize("shape", ["usual", "tied", "zeros", "flat", "large"])
def test_truncation_keeps_exactly_the_columns_that_sorting_keeps(shape: str) -> None:
    rows = rows_with([SamplingParams(1, **options) for options in TRUNCATING])
    logits = logits_of(shape, len(rows), 700)
    expected = process_logits(logits, rows) > -math.inf
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(kept_by_kernels(logits, rows), expected)


def test_truncation_cuts_right_where_too_many_columns_are_equally_near_to_be_kept_aside() -> None:
    rows = rows_with([SamplingParams(1, **options) for options in ({"top_k": 4500}, {"top_p": 0.7})])
    logits = logits_of("flat", len(rows), 6000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "TILE", 2048)
        assert torch.equal(kept_by_kernels(logits, rows), process_logits(logits, rows) > -math.inf)


@triton.jit
def noise_kernel(words, token_ids, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    values = gumbel(words, row, tl.load(token_ids + index, mask=index < count, other=0))
    tl.store(result + row * count + index, values, mask=index < count)


def test_noise_has_the_same_bits_as_the_tensor_operations_noise() -> None:
    generator = np.random.default_rng(5)
    seeds = [0, 1, 2**63, 2**64 - 1, *generator.integers(0, 2**64, 60, np.uint64).tolist()]
    rows = rows_with([SamplingParams(seed) for seed in seeds])
    rows.positions[:] = [0, 2**31, 2**40, 1, *generator.integers(0, 200_000, 60)]
    token_ids = torch.from_numpy(np.append([0, 1, 2**31, 2**40], generator.integers(0, 300_000, 3_996)))
    drawn = put(torch.empty(len(rows), len(token_ids)))
    noise_kernel[(len(rows),)](put(pack_rows(rows)), put(token_ids), drawn, len(token_ids), BLOCK=4096)
    assert torch.equal(
        drawn.cpu(), noise.gumbel(torch.from_numpy(rows.seeds), torch.from_numpy(rows.positions), token_ids)
    )


@pytest.mark.parametrize("width", [70, 600])
def test_tokens_that_a_grammar_forbids_are_as_if_their_logits_were_masked(width: int) -> None:
    rows = rows_with([SamplingParams(1), SamplingParams(2, temperature=0.0), SamplingParams(3, top_p=0.9),
                      SamplingParams(4, top_k=5, logit_bias=((3, 8.0), (4, 8.0)))])  # fmt: skip
    logits = logits_of("usual", len(rows), width)
    allowed = np.random.default_rng(1).random((len(rows), width)) < 0.3
    allowed[:, 3] = False
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -width % 32))), axis=1, bitorder="little").view(np.int32)
    expected = by_tensors(logits.masked_fill(~torch.from_numpy(allowed), -math.inf), rows)
    assert draw(put(logits), rows, allowed=put(bits)).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    rows = rows_with([SamplingParams(1), SamplingParams(2, temperature=0.0, logit_bias=((3, 30.0),)),
                      SamplingParams(3, top_p=0.9, temperature=0.5)])  # fmt: skip
    logits = logits_of("masked", len(rows), 1000, dtype)
    drawn = draw(put(logits), rows, with_logprobs=True)
    assert drawn.logprobs is not None
    expected = logits.double().log_softmax(dim=-1).gather(-1, drawn.tokens.cpu().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(drawn.logprobs.cpu(), expected.float(), atol=2e-6, rtol=1e-6)
    assert draw(put(logits), rows).logprobs is None


@given(st.lists(params, max_size=5))
def test_packed_parameters_can_be_read_back(options: list[SamplingParams]) -> None:
    rows = rows_with(options)
    packed = pack_rows(rows).view(np.uint8)
    size = len(rows) * ROW.itemsize
    records = packed[:size].view(ROW)
    for name in set(ROW.names or ()) - {"slot"}:
        assert records[name].tolist() == rows.records[name].tolist(), name
    adjustments = packed[size : size + rows.adjustments.nbytes].view(ADJUSTMENT)
    assert adjustments.tolist() == rows.adjustments.tolist()
    adjusting = np.flatnonzero(records["slot"] >= 0)
    assert adjusting.tolist() == np.flatnonzero(rows.adjusts).tolist()
    assert records["slot"][adjusting].tolist() == list(range(len(adjusting)))


def test_rows_packed_into_a_larger_batch_draw_the_same_and_the_rest_are_argmax() -> None:
    rows = rows_with([SamplingParams(1, top_p=0.9), SamplingParams(2, repetition_penalty=1.5)])
    logits = logits_of("tied", 4, 300)
    packed = put(pack_sampling(rows, 300, num_rows=4).words)
    tokens = draw_packed(put(logits), packed, num_slots=4, truncates=True).tokens
    assert tokens[:2].tolist() == by_tensors(logits[:2], rows).tolist()
    assert tokens[2:].tolist() == logits[2:].argmax(dim=-1).tolist()
    with pytest.raises(ValueError, match="do not fit 1"):
        pack_sampling(rows, 300, num_rows=1)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(0, 12))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))  # siblings may be equal
    return tokens, [draw(st.integers(-1, index - 1)) for index in range(size)]


@settings(few, max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_trees_are_walked_as_on_the_cpu(forest: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    sizes = [len(tokens) for tokens, _ in forest]
    num_rows = sum(sizes) + len(forest)
    drawn = np.array(data.draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)), np.int64)
    tokens, parents = (np.array([x for tree in forest for x in tree[part]], np.int32) for part in (0, 1))
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    padding = data.draw(st.integers(0, 4))  # trees, of which no rows are drawn
    padded = np.append(offsets, np.full(padding, NO_TREE, np.int32))
    result = put(np.full((len(forest) + padding, 2 + max(*sizes, 1)), 77))
    walk_trees(*map(put, (drawn, tokens, parents, padded)), result)
    walked = result.cpu().numpy()
    assert (walked[len(forest) :, 2:] == -1).all()
    for index, (begin, end) in enumerate(pairwise(offsets.tolist())):
        path, following = walk_tree(drawn[begin + index :][: end - begin + 1], tokens[begin:end], parents[begin:end])
        assert walked[index, :2].tolist() == [len(path), following]
        assert walked[index, 2:].tolist() == path.tolist() + [-1] * (walked.shape[1] - 2 - len(path))


def test_launches_and_copies_do_not_grow_with_the_rows() -> None:
    plain = {"temperature": 0.7}
    for options, kernels in (([plain, {"temperature": 0.0}], 2), ([plain, {"logit_bias": ((3, 1.0),)}], 2),
                             ([plain, *TRUNCATING], 5)):  # fmt: skip
        for repeats in (1, 20):
            rows = rows_with([SamplingParams(1, **one) for one in options * repeats])
            logits = torch.empty(len(rows), 128_256, dtype=torch.bfloat16, device="meta")
            with Counting() as mode:
                tokens = sampler.sample_tokens(logits, rows)
            assert tokens.shape == (len(rows),)
            assert mode.counts == {"kernels": kernels, "copies up": 1}, mode.kernels


def test_the_sampler_draws_by_kernels_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_with([SamplingParams(1, top_p=0.9), SamplingParams(2)])
    logits = logits_of("usual", 2, 300)
    expected = sampler.sample_tokens(logits, rows)
    calls = []
    monkeypatch.setattr(sampler, "_has_kernels", lambda device: calls.append(device) or True)
    assert torch.equal(sampler.sample_tokens(put(logits), rows).cpu(), expected)
    assert calls == [put(logits).device]


def test_operators_do_what_their_schemas_and_shapes_say() -> None:
    rows = rows_with([SamplingParams(1, top_p=0.9), SamplingParams(2, top_k=3, logit_bias=((3, 1.0),))])
    logits, packed, ids = put(logits_of("usual", 2, 300)), put(pack_rows(rows)), put(torch.arange(300))
    ops = torch.ops.paceline

    def checked(operator: Any, *arguments: Any) -> Any:
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))
        return operator(*arguments)

    bests, adjusted, counts, masses, sums = checked(ops.sample_score, logits, packed, None, None, ids, 1, True, True, 0)
    peaks = checked(ops.sample_histogram, logits, packed, None, adjusted, bests, counts, masses)
    cuts = checked(ops.sample_cut, logits, packed, None, adjusted, counts, masses, peaks)
    bests = checked(ops.sample_draw, logits, packed, None, ids, adjusted, bests, peaks, cuts)
    tokens, _ = checked(ops.sample_reduce, bests, logits, ids, sums)
    tree = [put(np.array(values, np.int32)) for values in ([4], [-1], [0, 1])]
    checked(ops.walk_trees, tokens, *tree, put(np.zeros((1, 3), np.int64)))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from actors.sampling import shard_kernels, successor_kernels, triton_kernels

ROWS = dict(logits="*bf16", stride="i32", words="*i64", table="*i64", allowed="*i32", adjusted="*fp32", counts="*i32",
            masses="*i64", token_ids="*i64", bests="*i64", sums="*fp32", peaks="*fp32", cuts="*i64", kept_aside="*i64",
            drawn="*i64", row_stride="i32", part_stride="i32", results="*i64", logprobs="*fp32", num_rows="i32",
            num_parts="i32", width="i32", first_id="i32")
TREES = dict(drawn="*i64", tokens="*i32", parents="*i32", offsets="*i32", walked="*i64", width="i32")
PARTS = dict(logits="*bf16", stride="i32", summaries="*i64", merged="*i64", width="i32", first_id="i32",
             row_stride="i32", part_stride="i32", num_parts="i32")
SHARDS = dict(ROWS, leaders="*i64", parts="*i64", tallies="*i64", tokens="*i64")
CONSTANTS = dict(HAS_TABLE=True, HAS_IDS=True, HAS_MASK=True, HAS_BINS=True, HAS_SUMS=True, BLOCK=2048, TILES=64,
                 PARTS=64, NODES=64, KEYS=8, IS_LAST=True, SHARDS=6, POWER=8, CHUNK=16)
WARPS = {
    triton_kernels: (ROWS | TREES, 8, dict(score=8, histogram=8, cut=16, draw=8, reduce=1, walk=1)),
    successor_kernels: (PARTS, 8, dict(summary=8, merge=4)),
    shard_kernels: (SHARDS, 64, dict(leaders=8, merge_leaders=8, tally=8, join=8)),
}
for home, name in [(home, name) for home, (_, _, names) in WARPS.items() for name in names]:
    types, k, warps = WARPS[home]
    kernel = vars(home)[name + "_kernel"]
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    given = CONSTANTS | dict(K=k)
    constants = {(kernel.arg_names.index(key),): value for key, value in given.items() if key in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = dict(num_warps=warps[name], enable_fp_fusion=False)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]
    assert "div.full" not in built.asm["ptx"], name  # not correctly rounded
print("compiled")
"""


@pytest.mark.whole
def test_kernels_compile_for_hopper() -> None:
    """Triton finds in its cache what has not changed since another run."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "compiled\n", done.stderr
