"""Writes what the launches of a round read straight into the buffer that goes to the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from actors.engine.batch import fill_rows, largest_branching_tree, num_words
from actors.engine.device_inputs import SAMPLING_PLACE, Shape, arrays_in, ints_in, pad_rows
from actors.engine.draft_trees import Trees, logit_places, tree_paths
from actors.engine.sequence import sequence_at
from actors.records import pointer
from actors.sampling.device_sampling import NO_TREE
from actors.sampling.packed_rows import ROW_WORDS, complete_rows
from actors.sampling.rows import ROW, fill_records, shared_ranges
from actors.sampling.sequence_sampling import ADJUSTMENT, sampling_at


class Sizes(NamedTuple):
    """Sizes of a round without padding."""

    rows: int
    words: int  # of ancestor bits
    max_context: int
    most_rows: int  # of a sequence
    trees: int  # of sequences that emit
    logits: int  # a row for the root and each node of these trees
    largest_tree: int  # nodes
    adjusted: int  # rows of logits with penalties or bias
    own_adjustments: int  # at most so many, of tokens on paths to nodes
    truncates: bool  # whether a row of logits has top-k, top-p or min-p


def sizes_of(items: np.ndarray, trees: Trees) -> Sizes:
    """items: ITEM [S], ready ones. trees: of all of them; those that do not emit have no nodes."""
    return Sizes(*_sizes(items, trees.parents, trees.offsets))


@njit(cache=True, nogil=True)
def _sizes(items, parents, offsets):  # type: ignore[no-untyped-def]
    num_rows = max_context = most_rows = num_trees = num_logits = largest = num_adjusted = num_own = 0
    truncates = False
    depths = np.empty(len(parents), np.int64)
    for s in range(len(items)):
        item = items[s]
        record = sequence_at(item.sequence)[0][0]
        first, nodes = offsets[s], offsets[s + 1] - offsets[s]
        num_rows += item.count + nodes
        most_rows = max(most_rows, item.count + nodes)
        max_context = max(max_context, record.num_computed + item.count + nodes)
        largest = max(largest, nodes)
        if not item.is_last:
            continue
        num_trees += 1
        num_logits += 1 + nodes
        sampling = sampling_at(record.sampling)[0][0]
        is_truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_log_ratio > -np.inf
        truncates = truncates or (sampling.is_hot != 0 and is_truncated)
        if sampling.num_distinct > 0:
            num_adjusted += 1 + nodes
        elif sampling.uses_history:
            num_adjusted += nodes
        if sampling.uses_history:
            for node in range(first, first + nodes):
                depths[node] = 1 if parents[node] < 0 else depths[first + parents[node]] + 1
                num_own += depths[node]
    words = num_words(largest_branching_tree(parents, offsets))
    return (
        num_rows, words, max_context, most_rows, num_trees, num_logits, largest, num_adjusted, num_own, truncates,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def sampling_addresses(items):  # type: ignore[no-untyped-def]
    """int64 [T]: of the sampling records of sequences that emit."""
    addresses = np.empty(len(items), np.int64)
    count = 0
    for s in range(len(items)):
        if items[s].is_last:
            addresses[count] = sequence_at(items[s].sequence)[0][0].sampling
            count += 1
    return addresses[:count]


def write_round(
    items: np.ndarray, trees: Trees, padding_slot: int, words: np.ndarray, places: np.ndarray, shape: Shape
) -> None:
    """Fill the words of `shape`. Arguments as for `sizes_of` and `send_written`. With trees to draw after, what rows of
    a sequence share of its adjustments is in an `AdjustmentTable`."""
    _write(words, places, *shape, padding_slot, items, *trees)


@njit(cache=True, nogil=True)
def _write(  # type: ignore[no-untyped-def]
    longs, places, rows, sequences, words, max_context, block_size, logits, trees, sampling, padding_slot, items,
    tokens, parents, offsets,
):  # fmt: skip
    longs[:] = 0
    (
        token_ids, positions, logit_rows, slots, first_rows, begins, tree_starts, block_tables, visible_ends, ancestors,
        positions32, node_positions,
    ) = arrays_in(longs, places, rows, sequences, words, max_context, block_size, logits)  # fmt: skip
    shapes = np.zeros((len(items), 3), np.int64)
    for s in range(len(items)):
        shapes[s, 0], shapes[s, 1] = items[s].sequence, items[s].count
    fill_rows(
        shapes, tokens, parents, offsets, token_ids, positions, slots, first_rows, begins, tree_starts, block_tables,
        visible_ends, ancestors, node_positions,
    )  # fmt: skip
    pad_rows(positions, slots, first_rows, positions32, first_rows[len(items)], len(items), padding_slot)
    row = 0
    for s in range(len(items)):
        if items[s].is_last:
            for own in range(first_rows[s + 1] - 1 - (offsets[s + 1] - offsets[s]), first_rows[s + 1]):
                logit_rows[row] = own
                row += 1
    if trees:
        _write_draws(longs, places, logits, trees, items, tokens, parents, offsets)


@njit(cache=True, nogil=True)
def _write_draws(longs, places, logits, trees, items, tokens, parents, offsets):  # type: ignore[no-untyped-def]
    """What tokens are drawn by: parameters of rows, and the trees of sequences that emit."""
    ints_in(longs, places[SAMPLING_PLACE + 1], logits)[: len(tokens)] = tokens
    ints_in(longs, places[SAMPLING_PLACE + 2], logits)[: len(parents)] = parents
    own_offsets = np.zeros(len(items) + 1, np.int64)
    lengths, addresses = np.empty(len(items), np.int64), np.empty(len(items), np.int64)
    count, uses_history = 0, False
    for s in range(len(items)):
        if not items[s].is_last:
            continue
        record = sequence_at(items[s].sequence)[0][0]
        lengths[count], addresses[count] = record.length, record.sampling
        uses_history = uses_history or sampling_at(record.sampling)[0][0].uses_history != 0
        count += 1
        own_offsets[count] = offsets[s + 1]
    own_offsets, lengths, addresses = own_offsets[: count + 1], lengths[:count], addresses[:count]
    offsets_there = ints_in(longs, places[SAMPLING_PLACE + 3], trees + 1)
    offsets_there[: count + 1] = own_offsets
    offsets_there[count + 1 :] = NO_TREE
    row_sequence, row_positions = logit_places(parents, own_offsets, lengths)
    num_rows = len(row_sequence)
    if uses_history:
        path_tokens, path_offsets = tree_paths(tokens, parents, own_offsets)
    else:
        path_tokens, path_offsets = tokens[:0], np.zeros(num_rows + 1, np.int64)
    start = longs.ctypes.data + 8 * places[SAMPLING_PLACE]
    records = carray(pointer(start), logits, ROW)
    adjustments = carray(pointer(start + 8 * ROW_WORDS * logits), len(path_tokens), ADJUSTMENT)
    ranges, _ = shared_ranges(addresses, True)
    fill_records(
        addresses, ranges, True, row_sequence, row_positions, path_tokens, path_offsets, records[:num_rows], adjustments
    )
    complete_rows(records, num_rows)
