"""Draws tokens from a vocabulary in shards, which exchange a few words a row instead of its logits.

Without truncation each shard gives away its best order key, one int64 a row. With it there are two exchanges:

1. `leaders_of_shard`: the largest scores of each shard. The best of them all is what masses and min-p refer to.
2. `fill_tally`: the mass of each shard and the best of it with noise, two int64 a row.

`tokens_of_shards` then draws the token that `device_sampling` draws from whole rows. Where the leaders end before the
cut of top-k or top-p, and the best of all columns with noise is not among them, it gives -1: such a row is to be drawn
from whole. Runs on a CPU under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.sampling import device_sampling
from actors.sampling.device_sampling import dense, launch_kernel, num_tiles, power_of_two, register_operator
from actors.sampling.rows import RowSampling

NUM_LEADERS = 64  # of a shard and row with top-k or top-p; a power of two
_MOST_PAIRS = 8192  # of leaders that are compared at once


def num_leaders(rows: RowSampling) -> int:
    """Leaders of each shard that the rows need: 0 without truncation, 1 for min-p alone."""
    if not rows.truncates.any():
        return 0
    has_cut = (rows.records["top_k"] > 0) | (rows.records["top_p"] < 1.0)
    return NUM_LEADERS if bool(np.any(rows.truncates & has_cut)) else 1


class Shard(NamedTuple):
    """Successive columns of the vocabulary. Parameters are those of whole rows: adjustments have ids, not columns."""

    logits: Tensor  # [R, columns], of any floating dtype
    packed: Tensor  # as for `draw_packed`
    first_id: int  # of column 0
    num_slots: int  # as for `draw_packed`
    table: Tensor | None = None  # as for `draw_packed`
    allowed: Tensor | None = None  # as for `draw_packed`


def draw_from_shards(shard: Shard, num_leaders: int, vocab_size: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Tokens, int64 [R]; -1 where whole rows are needed, which is never so for fewer than NUM_LEADERS. gather: gives
    what all ranks pass, stacked in the order of their shards. All ranks get the same."""
    scored = score_shard(shard)
    if not num_leaders:
        return best_of_shards(gather(scored.bests.amax(dim=1)))
    own, tally = leaders_of_shard(shard, scored, num_leaders)
    leaders = gather(own)
    fill_tally(shard, scored, leaders, tally)
    return tokens_of_shards(leaders, gather(tally), shard.packed, vocab_size)


class Scored(NamedTuple):
    bests: Tensor  # int64 [R, tiles]: best order keys, without noise for rows that truncate
    adjusted: Tensor  # float32 [slots, columns]: of rows with penalties or bias


def score_shard(shard: Shard) -> Scored:
    logits, packed, first_id, num_slots, table, allowed = shard
    scored = torch.ops.paceline.sample_score(
        dense(logits), packed, table, allowed, None, num_slots, False, False, first_id
    )
    return Scored(*scored[:2])


def best_of_shards(bests: Tensor) -> Tensor:
    """Tokens, int64 [R], of the best order keys of all shards, int64 [shards, R]; no row truncates."""
    tokens: Tensor = torch.ops.paceline.sample_reduce(bests.t(), bests, None, None)[0]
    return tokens


def leaders_of_shard(shard: Shard, scored: Scored, count: int) -> tuple[Tensor, Tensor]:
    """The largest order keys of the rows that truncate, int64 [R, count], largest first and filled up with the least
    int64; and a tally of nothing, int64 [R, 2]. count: a power of two."""
    ops = torch.ops.paceline
    of_tiles = scored.bests.unsqueeze(-1)
    if count > 1:
        of_tiles = ops.shard_leaders(
            dense(shard.logits), shard.packed, shard.allowed, scored.adjusted, shard.first_id, count
        )
    leaders, tally = ops.merge_leaders(of_tiles, shard.packed)
    return leaders, tally


def fill_tally(shard: Shard, scored: Scored, leaders: Tensor, tally: Tensor) -> None:
    """Add up, by row, the mass of the columns, if there is top-p, and the best order key, with noise and within min-p.

    leaders: int64 [shards, R, count], of all shards.
    """
    torch.ops.paceline.shard_tally(
        dense(shard.logits), shard.packed, shard.allowed, scored.adjusted, scored.bests, leaders, tally, shard.first_id
    )


def tokens_of_shards(leaders: Tensor, tallies: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
    """Tokens, int64 [R]; -1 where the leaders do not tell. leaders: int64 [shards, R, count]; tallies: int64 [shards,
    R, 2]."""
    tokens: Tensor = torch.ops.paceline.join_shards(leaders, tallies, packed, vocab_size)
    return tokens


def _leaders(
    logits: Tensor, packed: Tensor, allowed: Tensor | None, adjusted: Tensor, first_id: int, count: int
) -> Tensor:
    width = logits.shape[1]
    leaders = _fake_leaders(logits, packed, allowed, adjusted, first_id, count)
    launch_kernel(
        "leaders_kernel",
        (leaders.shape[1], len(logits)),
        logits, logits.stride(0), packed, allowed, adjusted, leaders, width, first_id,
        HAS_MASK=allowed is not None, K=count, BLOCK=max(count, min(device_sampling.TILE, power_of_two(width))),
    )  # fmt: skip
    return leaders


def _fake_leaders(
    logits: Tensor, packed: Tensor, allowed: Tensor | None, adjusted: Tensor, first_id: int, count: int
) -> Tensor:
    return logits.new_empty(len(logits), num_tiles(logits.shape[1]), count, dtype=torch.int64)


def _merge_leaders(of_tiles: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, tiles, count = of_tiles.shape
    leaders, tally = _fake_merge_leaders(of_tiles, packed)
    launch_kernel(
        "merge_leaders_kernel",
        (num_rows,),
        of_tiles, packed, leaders, tally, tiles, K=count, PARTS=power_of_two(tiles),
    )  # fmt: skip
    return leaders, tally


def _fake_merge_leaders(of_tiles: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, _, count = of_tiles.shape
    return of_tiles.new_empty(num_rows, count), of_tiles.new_empty(num_rows, 2)


def _tally(
    logits: Tensor,
    packed: Tensor,
    allowed: Tensor | None,
    adjusted: Tensor,
    bests: Tensor,
    leaders: Tensor,
    tally: Tensor,
    first_id: int,
) -> None:
    num_rows, width = logits.shape
    shards, _, count = leaders.shape
    launch_kernel(
        "tally_kernel",
        (num_tiles(width), num_rows),
        logits, logits.stride(0), packed, allowed, adjusted, bests, leaders, tally, num_rows, width, first_id,
        HAS_MASK=allowed is not None, SHARDS=shards, POWER=power_of_two(shards), K=count, BLOCK=device_sampling.TILE,
    )  # fmt: skip


def _join(leaders: Tensor, tallies: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
    shards, num_rows, count = leaders.shape
    tokens, power = _fake_join(leaders, tallies, packed, vocab_size), power_of_two(shards)
    launch_kernel(
        "join_kernel",
        (num_rows,),
        leaders, tallies, packed, tokens, num_rows, vocab_size,
        SHARDS=shards, POWER=power, K=count, CHUNK=max(1, min(count, _MOST_PAIRS // (power * count))),
    )  # fmt: skip
    return tokens


def _fake_join(leaders: Tensor, tallies: Tensor, packed: Tensor, vocab_size: int) -> Tensor:
    return leaders.new_empty(leaders.shape[1])


register_operator("shard_leaders", _leaders, _fake_leaders)
register_operator("merge_leaders", _merge_leaders, _fake_merge_leaders)
register_operator("shard_tally", _tally, lambda *_: None, ("tally",))
register_operator("join_shards", _join, _fake_join)
