"""Attention by Triton kernels that know draft trees; at most two launches a layer, whatever the batch.

The launches are operators of torch (`paceline::tree_attend`, `paceline::tree_combine`), so that tracing and counting
see each as one opaque kernel. Runs on a CPU under Triton's interpreter (TRITON_INTERPRET=1 before the first import).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton

from actors.engine.attention.interface import Scoring
from actors.engine.attention.tree_kernels import attend_kernel, combine_kernel
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.kv_cache import KvCache

_LEAST_SPLIT, _MOST_SPLIT = 128, 2048  # keys of a program, where the sequence has few rows
_PROGRAMS_A_PROCESSOR = 4  # of a GPU, that splits are made for: fewer wait for memory one after the other
UNSPLIT_ROWS = 256  # sequences with more rows, such as prefill chunks, have programs enough without splits
_MAX_PART_BYTES = 256 << 20  # results of splits, float32
_SMALLEST_BLOCK = 16  # side of a matrix product on tensor cores
# Limits of a tile; above, many registers are spilled (compiled for Ampere and Hopper). Bytes by those of an element,
# because float32 is multiplied without tensor cores.
_MAX_LANES = 64
_QUERY_TILE_BYTES = {2: 16 << 10, 4: 8 << 10}
_SMALL_TILE = (32, 8 << 10)  # keys and their bytes
# The same of 16-bit keys, for programs of so many keys with fewer lanes.
_LARGER_TILES = ((2048, (128, 32 << 10)), (512, (64, 16 << 10)))
_LARGE_SHARED = 128 << 10  # bytes of shared memory that the largest tile needs
_WARPS, _STAGES = 4, 2
_SPLITS_AT_A_TIME, _COMBINE_WARPS = 16, 4  # of a row and head, whose results are put together


class TreePlan:
    """`AttentionPlan` of one forward. Everything that layers read is on the device before the first one."""

    def __init__(
        self,
        rows: TreeRows,
        kv: KvCache,
        block_size: int,
        max_context: int,
        split_size: int | None = None,
        unsplit_rows: int = UNSPLIT_ROWS,
    ) -> None:
        """max_context: slots that the longest sequence may have; launches depend on it. split_size: None: enough for
        all processors of a GPU to have work."""
        self.kv = kv
        self._rows = rows
        self._block_size = block_size
        self._max_context = max_context
        self._split_size = split_size
        self._unsplit_rows = unsplit_rows

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        pool_keys, pool_values = self.kv.layer(layer)
        rows = self._rows
        split_size = self._split_size_for(query.shape[1] * values.shape[2], keys.shape[1])
        num_splits = triton.cdiv(self._max_context, split_size)
        output, log_sums = torch.ops.paceline.tree_attend(
            query,
            keys,
            values,
            pool_keys,
            pool_values,
            *rows,
            scoring.sinks,
            self.kv.shares_values(layer),
            scoring.scale,
            scoring.softcap or 0.0,
            scoring.sliding_window or 0,
            self._block_size,
            split_size,
            num_splits,
            self._unsplit_rows,
        )
        if num_splits > 1:
            output = torch.ops.paceline.tree_combine(
                output,
                log_sums,
                rows.first_rows,
                rows.begins,
                scoring.sinks,
                query.dtype,
                split_size,
                self._unsplit_rows,
            )
        return output

    def _split_size_for(self, row_size: int, kv_heads: int) -> int:
        """Keys of a split, more where the splits' results would take too much memory. row_size: heads * value_dim."""
        split_size = self._split_size or split_size_for(
            self._max_context, len(self._rows.begins) * kv_heads, _num_processors(self.kv.device)
        )
        of_a_split = self._rows.num_rows * row_size * 4
        while (
            split_size < self._max_context and triton.cdiv(self._max_context, split_size) * of_a_split > _MAX_PART_BYTES
        ):
            split_size *= 2
        return split_size


def split_size_for(max_context: int, programs: int, processors: int) -> int:
    """Keys of a split, a power of two, so that all processors of a GPU have work. programs: without splits, at least.

    A program walks its keys one tile after the other, which takes 1.3 us a tile on an H200, as long as nothing else
    has the memory busy. With more programs than processors can hold, larger splits have larger tiles, and less to
    combine.
    """
    wanted = max_context * programs // (_PROGRAMS_A_PROCESSOR * processors)
    return min(max(triton.next_power_of_2(max(wanted, 1)), _LEAST_SPLIT), _MOST_SPLIT)


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def _has_large_shared(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _LARGE_SHARED
    )


def _power_of_two(size: int) -> int:
    return max(_SMALLEST_BLOCK, triton.next_power_of_2(size))


def heads_of_tile(row_size: int, itemsize: int, shared: int) -> int:
    """Query heads of a tile where values are parts of keys: as many of the `shared` ones of a key head as fit and
    divide them."""
    most = max(_SMALLEST_BLOCK, _QUERY_TILE_BYTES[itemsize] // (row_size * itemsize))
    return next(heads for heads in range(min(most, shared), 0, -1) if shared % heads == 0)


def tile_shape(
    row_size: int, itemsize: int, shared: int, rows_per_sequence: int, keys: int, has_large_shared: bool = False
) -> tuple[int, int]:
    """Lanes and keys of a tile. row_size: elements of a lane's query or output, a power of two. keys: of a program.

    Each of `rows_per_sequence` rows has `shared` lanes, which must fit into a tile. Programs with more keys have larger
    tiles, where registers and shared memory allow it.
    """
    row_bytes = row_size * itemsize
    lanes = min(_MAX_LANES, _QUERY_TILE_BYTES[itemsize] // row_bytes, _power_of_two(rows_per_sequence * shared))
    lanes = max(_power_of_two(shared), lanes)
    most, tile_bytes = _SMALL_TILE
    if itemsize == 2 and lanes < _MAX_LANES:
        tiles = _LARGER_TILES if has_large_shared else _LARGER_TILES[1:]
        most, tile_bytes = next((tile for least, tile in tiles if keys >= least), _SMALL_TILE)
    return lanes, max(_SMALLEST_BLOCK, min(most, tile_bytes // row_bytes))


def attend_constants(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    rows_per_sequence: int,
    block_size: int,
    window: int,
    has_softcap: bool,
    has_sinks: bool,
    is_split: bool,
    shares_values: bool = False,
    keys: int = _LEAST_SPLIT,
    has_large_shared: bool = False,
) -> dict[str, int | bool]:
    """What `attend_kernel` is compiled for. shares_values: values are the first columns of the keys. keys: of a
    program. has_large_shared: whether the GPU has `_LARGE_SHARED`."""
    shared = of_key_head = heads // kv_heads
    main_dim = value_dim if shares_values else head_dim
    key_block, value_block = _power_of_two(main_dim), _power_of_two(value_dim)
    row_size = max(key_block, value_block)
    if shares_values:
        shared = heads_of_tile(row_size, dtype.itemsize, of_key_head)
    block_m, block_n = tile_shape(row_size, dtype.itemsize, shared, rows_per_sequence, keys, has_large_shared)
    return {
        "HEADS": heads,
        "SHARED": shared,
        "GROUPS": of_key_head // shared,
        "HEAD_DIM": head_dim,
        "MAIN_DIM": main_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": key_block,
        "REST_BLOCK": _power_of_two(head_dim - main_dim) if shares_values else 0,
        "VALUE_BLOCK": value_block,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "TILE_ROWS": block_m // shared,
        "WRITE_ROWS": triton.next_power_of_2(block_m // shared),
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "IS_SPLIT": is_split,
        # The interpreter keeps bfloat16 as bits and multiplies those.
        "UPCAST": triton.knobs.runtime.interpret and dtype == torch.bfloat16,
    }


def combine_constants(*, heads: int, value_dim: int, num_splits: int, has_sinks: bool) -> dict[str, int | bool]:
    """What `combine_kernel` is compiled for."""
    splits = triton.next_power_of_2(num_splits)
    return {
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": _power_of_two(value_dim),
        "SPLITS_BLOCK": splits,
        "CHUNK": min(splits, _SPLITS_AT_A_TIME),
        "HAS_SINKS": has_sinks,
    }


def _tree_attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    slots: torch.Tensor,
    first_rows: torch.Tensor,
    begins: torch.Tensor,
    tree_starts: torch.Tensor,
    block_tables: torch.Tensor,
    visible_ends: torch.Tensor,
    ancestors: torch.Tensor,
    row_positions: torch.Tensor,
    node_positions: torch.Tensor,
    sinks: torch.Tensor | None,
    shares_values: bool,
    scale: float,
    softcap: float,
    window: int,
    block_size: int,
    split_size: int,
    num_splits: int,
    unsplit_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write keys and values, and attend. Returns [rows, heads, value_dim] and nothing; with several splits, float32
    [splits, rows, heads, value_dim] and the log 2 of the denominators, float32 [splits, rows, heads].

    shares_values: the values are the first columns of the keys, here and in the pool.
    """
    query, keys, values = (_with_dense_heads(tensor) for tensor in (query, keys, values))
    num_rows, heads, head_dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    num_sequences = len(begins)
    output, log_sums = _empty_parts(query, value_dim, num_splits)
    constants = attend_constants(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=query.dtype,
        rows_per_sequence=triton.cdiv(num_rows, num_sequences),
        block_size=block_size,
        window=window,
        has_softcap=softcap > 0.0,
        has_sinks=sinks is not None,
        is_split=num_splits > 1,
        shares_values=shares_values,
        keys=split_size,
        has_large_shared=_has_large_shared(query.device),
    )
    grid = (num_rows // constants["TILE_ROWS"] + num_sequences + 1, heads // constants["SHARED"], num_splits)
    with torch.cuda.device_of(query):
        attend_kernel[grid](
            query,
            keys,
            values,
            pool_keys,
            pool_values,
            output,
            log_sums,
            query if sinks is None else sinks,
            slots,
            first_rows,
            begins,
            tree_starts,
            block_tables,
            visible_ends,
            ancestors,
            row_positions,
            node_positions,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            pool_keys.stride(0),
            pool_values.stride(0),
            num_rows,
            num_sequences,
            block_tables.shape[1],
            ancestors.shape[1],
            split_size,
            unsplit_rows,
            scale,
            softcap,
            **constants,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return output, log_sums


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty_parts(query: torch.Tensor, value_dim: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, heads, _ = query.shape
    if num_splits == 1:
        return query.new_empty((num_rows, heads, value_dim)), query.new_empty(0, dtype=torch.float32)
    shape = (num_splits, num_rows, heads)
    return query.new_empty((*shape, value_dim), dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def _tree_combine(
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    first_rows: torch.Tensor,
    begins: torch.Tensor,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    split_size: int,
    unsplit_rows: int,
) -> torch.Tensor:
    """What `tree_attend` returned for the splits -> [rows, heads, value_dim]."""
    num_splits, num_rows, heads, value_dim = parts.shape
    output = parts.new_empty((num_rows, heads, value_dim), dtype=dtype)
    with torch.cuda.device_of(parts):
        combine_kernel[(num_rows, heads)](
            parts,
            log_sums,
            output,
            log_sums if sinks is None else sinks,
            first_rows,
            begins,
            num_rows,
            len(begins),
            split_size,
            unsplit_rows,
            **combine_constants(heads=heads, value_dim=value_dim, num_splits=num_splits, has_sinks=sinks is not None),
            num_warps=_COMBINE_WARPS,
        )
    return output


_library = torch.library.Library("paceline", "FRAGMENT")


def _register(name: str, function: Callable, fake: Callable, mutated: tuple[str, ...]) -> None:
    """By hand, because `torch.library.custom_op` costs some more microseconds a call."""
    _library.define(name + torch.library.infer_schema(function, mutates_args=mutated))
    _library.impl(name, function, "CUDA")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"paceline::{name}", fake, lib=_library)


def _fake_attend(query, keys, values, *rest):  # type: ignore[no-untyped-def]
    return _empty_parts(query, values.shape[2], rest[-2])


def _fake_combine(parts, log_sums, first_rows, begins, sinks, dtype, *rest):  # type: ignore[no-untyped-def]
    return parts.new_empty(parts.shape[1:], dtype=dtype)


_register("tree_attend", _tree_attend, _fake_attend, ("pool_keys", "pool_values"))
_register("tree_combine", _tree_combine, _fake_combine, ())
