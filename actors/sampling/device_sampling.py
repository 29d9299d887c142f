"""Draws tokens on a device: two kernels for argmax and plain temperature, five with top-k, top-p or min-p.

The token is the one that `sampler.sample_tokens` draws on a CPU: same noise, same order of operations, lowest column of
equals. One thing may differ in its last bit: the exponentials that top-p adds up, which torch takes in float32, each
machine in its own way. The kernels take them in float64 and round, so all devices agree.

The number of launches does not depend on the number of rows, no launch depends on data, and nothing waits for the
device. Parameters of all rows go up as one tensor (`packed_rows`).

`device_shards` draws from a vocabulary in shards.

Each launch is one operator of torch (`paceline::sample_...`), so that tracing and counting see what runs. Runs on a CPU
under Triton's interpreter (TRITON_INTERPRET=1 before the first import of triton).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.sampling.packed_rows import MAX_CANDIDATES, NUM_BINS, pack_sampling
from actors.sampling.rows import RowSampling

TILE = 2048  # columns of a program
NO_TREE = -1  # offset of trees of padding


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # int64 [R]
    logprobs: Tensor | None  # float32 [R]: of the tokens, by the raw logits


def draw(
    logits: Tensor,
    rows: RowSampling,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
    allowed: Tensor | None = None,
    with_logprobs: bool = False,
) -> Drawn:
    """Draw a token per row; one copy to the device. Arguments as for `sampler.sample_tokens` and `draw_packed`; no
    reduced vocabulary has a table.

    A reduced vocabulary whose rows have penalties or bias copies `token_ids` back.
    """
    ids = None if token_ids is None or not len(rows.adjustments) else token_ids.cpu().numpy()
    packed = pack_sampling(rows, logits.shape[-1], len(rows), ids)
    return draw_packed(
        logits,
        torch.from_numpy(packed.words).to(logits.device),
        num_slots=packed.num_slots,
        truncates=packed.truncates,
        table=table,
        token_ids=token_ids,
        allowed=allowed,
        with_logprobs=with_logprobs,
    )


def draw_packed(
    logits: Tensor,
    packed: Tensor,
    *,
    num_slots: int,
    truncates: bool,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    allowed: Tensor | None = None,
    with_logprobs: bool = False,
) -> Drawn:
    """Draw a token per row of logits [R, V], of any floating dtype, by parameters that are on the device.

    packed: int64, of `PackedSampling` for R rows. num_slots: at least the number of rows with adjustments. truncates:
    whether any row has top-k, top-p or min-p. table: of an `AdjustmentTable`, if the rows are from it. token_ids:
    int64 [V], the id of each column. allowed: int32 [R, ceil(V / 32)], bit c % 32 of word c // 32 is set where column
    c may be drawn; None: all may.
    """
    ops = torch.ops.paceline
    logits = dense(logits)
    bests, adjusted, counts, masses, sums = ops.sample_score(
        logits, packed, table, allowed, token_ids, num_slots, truncates, with_logprobs, 0
    )
    if truncates:
        peaks = ops.sample_histogram(logits, packed, allowed, adjusted, bests, counts, masses)
        cuts = ops.sample_cut(logits, packed, allowed, adjusted, counts, masses, peaks)
        bests = ops.sample_draw(logits, packed, allowed, token_ids, adjusted, bests, peaks, cuts)
    tokens, logprobs = ops.sample_reduce(bests, logits, token_ids, sums)
    return Drawn(tokens, logprobs if with_logprobs else None)


def likeliest_packed(
    logits: Tensor,
    packed: Tensor,
    k: int,
    *,
    num_slots: int,
    truncates: bool,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sampler.likeliest_tokens` by parameters that are on the device; arguments as for `draw_packed`."""
    ops = torch.ops.paceline
    logits = dense(logits)
    adjusted, peaks, cuts = logits.new_empty(0, dtype=torch.float32), None, None
    if num_slots or truncates:
        bests, adjusted, counts, masses, _ = ops.sample_score(
            logits, packed, None, None, token_ids, num_slots, truncates, False, 0
        )
        if truncates:
            peaks = ops.sample_histogram(logits, packed, None, adjusted, bests, counts, masses)
            cuts = ops.sample_cut(logits, packed, None, adjusted, counts, masses, peaks)
    sums = ops.sample_sums(logits, packed, token_ids, adjusted, peaks, cuts)
    best, columns = sums.topk(min(k, sums.shape[-1]), dim=-1)
    probs = (best - sums.logsumexp(dim=-1, keepdim=True)).exp_()
    return columns if token_ids is None else token_ids[columns], probs


def dense(logits: Tensor) -> Tensor:
    logits = logits.detach()
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def walk_trees(drawn: Tensor, tokens: Tensor, parents: Tensor, offsets: Tensor, walked: Tensor) -> None:
    """`verification.walk_tree` of T trees in one launch.

    drawn: int64 [N + T], the tokens at the root and the nodes of each tree, trees one after the other. tokens, parents:
    int32 [N]. offsets: int32 [T + 1], where the nodes of each tree begin, then NO_TREE for trees of padding, which have
    no row of `drawn`. walked: int64 [T, 2 + nodes], filled with the number of accepted nodes, the next token, the
    nodes, and -1 up to the end. No tree may have more nodes.
    """
    torch.ops.paceline.walk_trees(drawn, tokens, parents, offsets, walked)


def num_tiles(width: int) -> int:
    """At least 1: a shard of the vocabulary may have no columns."""
    return max(1, -(-width // TILE))


def power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def launch_kernel(kernel: str, grid: tuple[int, ...], *arguments: Any, num_warps: int = 8, **constants: Any) -> None:
    # Imported late: machines without a GPU may have no triton.
    from actors.sampling import shard_kernels, successor_kernels, triton_kernels

    home = next(home for home in (triton_kernels, successor_kernels, shard_kernels) if hasattr(home, kernel))
    getattr(home, kernel)[grid](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


def _score_outputs(
    logits: Tensor, num_slots: int, truncates: bool, with_logprobs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, width = logits.shape
    tiles, num_bins = num_tiles(width), NUM_BINS if truncates else 0
    return (
        logits.new_empty(num_rows, tiles, dtype=torch.int64),
        logits.new_empty(num_slots, width, dtype=torch.float32),
        logits.new_empty(num_rows, num_bins, dtype=torch.int32),
        logits.new_empty(num_rows, num_bins, dtype=torch.int64),
        logits.new_empty(num_rows if with_logprobs else 0, tiles, 2, dtype=torch.float32),
    )


def _score(
    logits: Tensor,
    packed: Tensor,
    table: Tensor | None,
    allowed: Tensor | None,
    token_ids: Tensor | None,
    num_slots: int,
    truncates: bool,
    with_logprobs: bool,
    first_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bests, adjusted, counts, masses, sums = outputs = _score_outputs(logits, num_slots, truncates, with_logprobs)
    num_rows, width = logits.shape
    launch_kernel(
        "score_kernel",
        (num_tiles(width), num_rows),
        logits, logits.stride(0), packed, table, allowed, token_ids, adjusted, counts, masses, bests, sums,
        num_rows, width, first_id,
        HAS_TABLE=table is not None,
        HAS_IDS=token_ids is not None, HAS_MASK=allowed is not None, HAS_BINS=truncates, HAS_SUMS=with_logprobs,
        BLOCK=TILE,
    )  # fmt: skip
    return outputs


def _fake_score(logits, packed, table, allowed, token_ids, num_slots, truncates, with_logprobs, first_id):  # type: ignore[no-untyped-def]
    return _score_outputs(logits, num_slots, truncates, with_logprobs)


def _histogram(
    logits: Tensor,
    packed: Tensor,
    allowed: Tensor | None,
    adjusted: Tensor,
    bests: Tensor,
    counts: Tensor,
    masses: Tensor,
) -> Tensor:
    num_rows, width = logits.shape
    peaks = logits.new_empty(num_rows, dtype=torch.float32)
    launch_kernel(
        "histogram_kernel",
        (num_tiles(width), num_rows),
        logits, logits.stride(0), packed, allowed, adjusted, bests, counts, masses, peaks, width,
        HAS_MASK=allowed is not None, TILES=power_of_two(num_tiles(width)), BLOCK=TILE,
    )  # fmt: skip
    return peaks


def _fake_histogram(logits, *rest):  # type: ignore[no-untyped-def]
    return logits.new_empty(len(logits), dtype=torch.float32)


def _cut(
    logits: Tensor,
    packed: Tensor,
    allowed: Tensor | None,
    adjusted: Tensor,
    counts: Tensor,
    masses: Tensor,
    peaks: Tensor,
) -> Tensor:
    num_rows, width = logits.shape
    cuts = logits.new_empty(num_rows, dtype=torch.int64)
    kept_aside = logits.new_empty(num_rows, MAX_CANDIDATES, dtype=torch.int64)
    launch_kernel(
        "cut_kernel",
        (num_rows,),
        logits, logits.stride(0), packed, allowed, adjusted, counts, masses, peaks, kept_aside, cuts, width,
        HAS_MASK=allowed is not None, BLOCK=TILE, num_warps=16,
    )  # fmt: skip
    return cuts


def _fake_cut(logits, *rest):  # type: ignore[no-untyped-def]
    return logits.new_empty(len(logits), dtype=torch.int64)


def _draw(
    logits: Tensor,
    packed: Tensor,
    allowed: Tensor | None,
    token_ids: Tensor | None,
    adjusted: Tensor,
    bests: Tensor,
    peaks: Tensor,
    cuts: Tensor,
) -> Tensor:
    num_rows, width = logits.shape
    drawn = torch.empty_like(bests)
    launch_kernel(
        "draw_kernel",
        (num_tiles(width), num_rows),
        logits, logits.stride(0), packed, allowed, token_ids, adjusted, bests, peaks, cuts, drawn, width,
        HAS_IDS=token_ids is not None, HAS_MASK=allowed is not None, BLOCK=TILE,
    )  # fmt: skip
    return drawn


def _fake_draw(logits, packed, allowed, token_ids, adjusted, bests, peaks, cuts):  # type: ignore[no-untyped-def]
    return torch.empty_like(bests)


def _sums(
    logits: Tensor,
    packed: Tensor,
    token_ids: Tensor | None,
    adjusted: Tensor,
    peaks: Tensor | None,
    cuts: Tensor | None,
) -> Tensor:
    num_rows, width = logits.shape
    sums = logits.new_empty(num_rows, width, dtype=torch.float32)
    launch_kernel(
        "sums_kernel",
        (num_tiles(width), num_rows),
        logits, logits.stride(0), packed, None, token_ids, adjusted, peaks, cuts, sums, width,
        HAS_IDS=token_ids is not None, HAS_MASK=False, HAS_CUTS=cuts is not None, BLOCK=TILE,
    )  # fmt: skip
    return sums


def _fake_sums(logits, *rest):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _reduce(bests: Tensor, logits: Tensor, token_ids: Tensor | None, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, num_parts = bests.shape
    has_sums = sums is not None and len(sums) > 0
    tokens = bests.new_empty(num_rows)
    logprobs = bests.new_empty(num_rows if has_sums else 0, dtype=torch.float32)
    launch_kernel(
        "reduce_kernel",
        (num_rows,),
        bests, bests.stride(0), bests.stride(1), logits, logits.stride(0), token_ids, sums, tokens, logprobs,
        num_parts,
        HAS_IDS=token_ids is not None, HAS_SUMS=has_sums, PARTS=power_of_two(num_parts), num_warps=1,
    )  # fmt: skip
    return tokens, logprobs


def _fake_reduce(bests, logits, token_ids, sums):  # type: ignore[no-untyped-def]
    num_logprobs = 0 if sums is None else len(sums)
    return bests.new_empty(len(bests)), bests.new_empty(num_logprobs, dtype=torch.float32)


def _walk(drawn: Tensor, tokens: Tensor, parents: Tensor, offsets: Tensor, walked: Tensor) -> None:
    max_nodes = walked.shape[1] - 2
    launch_kernel(
        "walk_kernel",
        (len(offsets) - 1,),
        drawn, tokens, parents, offsets, walked, max_nodes, NODES=power_of_two(max_nodes), num_warps=1,
    )  # fmt: skip


_library = torch.library.Library("paceline", "FRAGMENT")


def register_operator(name: str, function: Callable, fake: Callable, mutated: tuple[str, ...] = ()) -> None:
    """By hand, because `torch.library.custom_op` costs some more microseconds a call."""
    _library.define(name + torch.library.infer_schema(function, mutates_args=mutated))
    _library.impl(name, function, "CUDA")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"paceline::{name}", fake, lib=_library)


register_operator("sample_score", _score, _fake_score)
register_operator("sample_histogram", _histogram, _fake_histogram, ("counts", "masses"))
register_operator("sample_cut", _cut, _fake_cut)
register_operator("sample_draw", _draw, _fake_draw)
register_operator("sample_sums", _sums, _fake_sums)
register_operator("sample_reduce", _reduce, _fake_reduce)
register_operator("walk_trees", _walk, lambda *_: None, ("walked",))
