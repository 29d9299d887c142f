"""Passes over the sequences of a round: what their deltas accept and need, and what a forward has computed."""

from __future__ import annotations

import numpy as np
from numba import njit

from actors.engine.sequence import sequence_at
from actors.sampling.sequence_sampling import count_tokens, sampling_at

ITEM = np.dtype(
    [
        ("sequence", "<i8"),  # address of its record; 0: none
        ("start", "<i8"),  # of the delta
        ("num_tokens", "<i8"),  # of the delta
        ("max_rows", "<i8"),  # `judge_deltas` makes it at least 1
        ("num_nodes", "<i8"),  # of the draft tree; `apply_deltas` cuts it to those that there is room for
        ("status", "<i8"),
        ("num_accepted", "<i8"),  # nodes of the last tree that the delta accepts
        ("count", "<i8"),  # known tokens to compute
        ("is_last", "<i8"),  # whether these are all that are left
        ("num_computed", "<i8"),
        ("has_full_blocks", "<i8"),  # that are not published yet
    ]
)
NUM_TOLD = 5  # fields that come from a message
# READY: has room for everything. SHORT: a sequence whose arrays or blocks must grow. NEW: the delta begins it.
# STALE: the sequence is unknown, has another length, or has nothing left to compute, because its logits were not kept.
# STARVED: set by the caller.
READY, SHORT, NEW, STALE, STARVED = range(5)


@njit(cache=True, nogil=True)
def judge_deltas(items, tokens, accepted):  # type: ignore[no-untyped-def]
    """Find the status and the accepted nodes of each item, of ITEM. Changes no sequence. Returns whether all are ready.

    tokens: int32, those of all deltas. accepted: int32, as many; filled with accepted nodes, at the places of their
    tokens. The last token of a delta accepts none, because its logits are still needed.
    """
    first, are_ready = 0, True
    for index in range(len(items)):
        item = items[index]
        begin, last = first, first + item.num_tokens - 1
        first += item.num_tokens
        item.num_accepted = item.is_last = item.count = item.has_full_blocks = 0
        item.max_rows = max(1, item.max_rows)
        item.status = NEW if item.start == 0 and item.sequence else STALE
        if item.sequence == 0 or item.start == 0:
            are_ready = False
            continue
        one, _, _, tree_tokens, tree_parents = sequence_at(item.sequence)
        record = one[0]
        num_pending = record.length - record.num_computed
        if record.length != item.start or (item.num_tokens == 0 and num_pending == 0):
            are_ready = False
            continue
        if num_pending == 0:
            node, wanted = -1, begin
            # Parents come before children, so one pass meets every node of the walk in order.
            for other in range(record.num_nodes):
                if wanted >= last:
                    break
                if tree_parents[other] == node and tree_tokens[other] == tokens[wanted]:
                    node = other
                    accepted[wanted] = node
                    wanted += 1
            item.num_accepted = wanted - begin
        known = record.length + item.num_tokens
        needed = min(known, record.num_computed + item.num_tokens + item.max_rows)
        item.count = needed - record.num_computed  # slots to reserve, until `apply_deltas`
        item.is_last = known - record.num_computed - item.num_accepted <= item.max_rows
        if item.is_last:
            needed = known + item.num_nodes
        sampling = sampling_at(record.sampling)[0]
        has_room = (
            needed <= record.num_blocks * record.block_size
            and known <= record.token_room
            and item.num_nodes <= record.tree_room
            and (not sampling[0].uses_history or sampling[0].num_distinct + item.num_tokens <= sampling[0].room)
        )
        item.status = READY if has_room else SHORT
        are_ready = are_ready and has_room
    return are_ready


@njit(cache=True, nogil=True)
def apply_deltas(items, tokens, accepted, moves):  # type: ignore[no-untyped-def]
    """Append the tokens of the items that are ready, keep accepted nodes, and set what is to be computed.
    Sequences that begin in this round have their tokens already.

    moves: int64 [2, accepted]; filled with slots to copy, sources and destinations. Returns their number, and those of
    items with full blocks, of items that are ready, of those among them that emit, and of the draft nodes that they
    have room for.
    """
    first = num_moves = num_full = num_ready = num_emitting = num_nodes = 0
    for index in range(len(items)):
        item = items[index]
        begin, end = first, first + item.num_tokens
        first = end
        if item.status != READY:
            continue
        one, own_tokens, blocks, _, _ = sequence_at(item.sequence)
        record = one[0]
        size, length = record.block_size, record.length
        if item.start > 0:
            for place in range(item.num_accepted):
                node = accepted[begin + place]
                if node != place:
                    for row, slot in enumerate((length + node, length + place)):
                        moves[row, num_moves] = np.int64(blocks[slot // size]) * size + slot % size
                    num_moves += 1
            record.num_computed += item.num_accepted
            own_tokens[length : length + item.num_tokens] = tokens[begin:end]
            record.length += item.num_tokens
            count_tokens(record.sampling, tokens[begin:end])
        record.num_nodes = 0
        pending = record.length - record.num_computed
        item.count = min(pending, item.max_rows)
        item.is_last = item.count == pending
        room = record.num_blocks * size - record.length
        item.num_nodes = min(item.num_nodes, room) if item.is_last else 0
        item.has_full_blocks = (record.num_published + 1) * size <= record.num_computed
        num_full += item.has_full_blocks
        num_ready += 1
        num_emitting += item.is_last
        num_nodes += item.num_nodes
    return num_moves, num_full, num_ready, num_emitting, num_nodes


@njit(cache=True, nogil=True)
def record_forward(items, tree_tokens, tree_parents):  # type: ignore[no-untyped-def]
    """Record that a forward has computed the tokens and draft nodes of ready items. tree_tokens, tree_parents: int32,
    nodes of all of them. Returns the number of items with full blocks."""
    first = num_full = 0
    for index in range(len(items)):
        item = items[index]
        one, _, _, own_tokens, own_parents = sequence_at(item.sequence)
        record = one[0]
        count = item.num_nodes
        own_tokens[:count] = tree_tokens[first : first + count]
        own_parents[:count] = tree_parents[first : first + count]
        first += count
        record.num_nodes = count
        record.num_computed += item.count
        item.num_computed = record.num_computed
        item.has_full_blocks = (record.num_published + 1) * record.block_size <= record.num_computed
        num_full += item.has_full_blocks
    return num_full
