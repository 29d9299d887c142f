"""The rows of one forward: the uncomputed tokens of each sequence, then the nodes of its draft tree."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numba import njit

from actors.engine.draft_trees import Trees, joined
from actors.engine.sequence import Sequence, sequence_at

NODES_OF_A_WORD = 64  # ancestor bits


class SequenceRows(msgspec.Struct, frozen=True, gc=False):
    """Rows that one sequence contributes: `count` committed tokens from num_computed on, then a draft tree.

    A tree that grows over several forwards is passed whole each time; its first nodes have their KV already.
    """

    sequence: Sequence
    count: int  # >= 1, or 0 if all known tokens are computed and there are nodes
    tree_tokens: np.ndarray  # int32 [n]; empty unless `count` completes the known tokens
    tree_parents: np.ndarray  # int32 [n]
    first_node: int = 0  # nodes before this one are computed; more than 0 only with count == 0

    @property
    def num_rows(self) -> int:
        return self.count + len(self.tree_tokens) - self.first_node


class PackedBatch(NamedTuple):
    """All rows of S sequences in one [1, rows] input, and what each row sees.

    A sequence's logical slots are its committed tokens, then the nodes of its draft tree. A row sees every logical slot
    below its visible end and the nodes whose ancestor bit is set. The nodes of a chain count as committed: a chain is
    causal. Committed slots have their index as position.
    """

    block_size: int
    token_ids: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]: depth positions, equal for siblings
    slots: np.ndarray  # int64 [rows]: where each row's keys and values go
    first_rows: np.ndarray  # int32 [S + 1]: rows first_rows[s] .. first_rows[s + 1] are those of sequence s
    begins: np.ndarray  # int32 [S]: logical slot of the first own row; slots before it are in the cache
    tree_starts: np.ndarray  # int32 [S]: logical slot of the first draft node, also of nodes computed before
    block_tables: np.ndarray  # int32 [S, max_blocks]
    visible_ends: np.ndarray  # int32 [rows]: own slot + 1 of a committed row, the tree start of a draft node
    ancestors: np.ndarray  # int64 [rows, words]: bit i: sees the node in slot tree_start + i; 0 for committed rows
    node_positions: np.ndarray  # int32 [S, 64 * words]: position of each draft node
    max_context: int  # logical slots of the longest sequence

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def contexts(self) -> np.ndarray:
        """int32 [S]: logical slots of each sequence; the last of them are those of its rows."""
        contexts: np.ndarray = self.begins + self.first_rows[1:] - self.first_rows[:-1]
        return contexts


@njit(cache=True, nogil=True)
def num_words(num_nodes: int) -> int:
    """int64 words of a row of ancestor bits: a power of two, because kernels are compiled for each size."""
    words = 1
    while NODES_OF_A_WORD * words < num_nodes:
        words *= 2
    return words


def trees_of(parts: Sequences[SequenceRows]) -> Trees:
    return joined([part.tree_tokens for part in parts], [part.tree_parents for part in parts])


def pack(parts: Sequences[SequenceRows]) -> PackedBatch:
    """Lay out the rows. Every sequence must have reserved num_computed + count + nodes slots."""
    shapes = np.array([(part.sequence.address, part.count, part.first_node) for part in parts], np.int64)
    return pack_shapes(parts[0].sequence.block_size, shapes, trees_of(parts))


def pack_shapes(block_size: int, shapes: np.ndarray, trees: Trees) -> PackedBatch:
    """As `pack`. shapes: as for `fill_rows`. trees: of all sequences."""
    rows: tuple[Any, ...] = _lay_out(shapes, *trees)
    return PackedBatch(block_size, *rows)


@njit(cache=True, nogil=True)
def _is_chain(parents: np.ndarray) -> bool:
    node = 0
    while node < len(parents) and parents[node] == node - 1:
        node += 1
    return node == len(parents)


@njit(cache=True, nogil=True)
def largest_branching_tree(parents: np.ndarray, offsets: np.ndarray) -> int:
    """Nodes of the largest tree that is no chain. Arguments as of `Trees`."""
    largest = 0
    for tree in range(len(offsets) - 1):
        first, end = offsets[tree], offsets[tree + 1]
        if end - first > largest and not _is_chain(parents[first:end]):
            largest = end - first
    return largest


@njit(cache=True, nogil=True)
def _lay_out(shapes, tokens, parents, offsets):  # type: ignore[no-untyped-def]
    """The arrays of a `PackedBatch`, in order. Arguments as for `fill_rows`."""
    num_sequences = len(shapes)
    words = num_words(largest_branching_tree(parents, offsets))
    num_rows = max_blocks = 0
    for s in range(num_sequences):
        num_rows += shapes[s, 1] + offsets[s + 1] - offsets[s] - shapes[s, 2]
        max_blocks = max(max_blocks, sequence_at(shapes[s, 0])[0][0].num_blocks)
    token_ids, positions, slots = (
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int64),
    )
    first_rows = np.zeros(num_sequences + 1, np.int32)
    begins, tree_starts = np.empty(num_sequences, np.int32), np.empty(num_sequences, np.int32)
    block_tables = np.zeros((num_sequences, max_blocks), np.int32)
    visible_ends = np.empty(num_rows, np.int32)
    ancestors = np.zeros((num_rows, words), np.int64)
    node_positions = np.zeros((num_sequences, NODES_OF_A_WORD * words), np.int32)
    max_context = fill_rows(
        shapes, tokens, parents, offsets, token_ids, positions, slots, first_rows, begins, tree_starts, block_tables,
        visible_ends, ancestors, node_positions,
    )  # fmt: skip
    return (
        token_ids, positions, slots, first_rows, begins, tree_starts, block_tables, visible_ends, ancestors,
        node_positions, max_context,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def fill_rows(  # type: ignore[no-untyped-def]
    shapes, tokens, parents, offsets, token_ids, positions, slots, first_rows, begins, tree_starts, block_tables,
    visible_ends, ancestors, node_positions,
):  # fmt: skip
    """Fill the arrays of a `PackedBatch`, which may be larger and hold zeros. Returns its `max_context`.

    shapes: int64 [S, 3], address of the sequence, tokens to compute, first node to compute. tokens, parents, offsets:
    as of `Trees`.
    """
    words, row, max_context = ancestors.shape[1], 0, 0
    bits = np.empty((NODES_OF_A_WORD * words, words), np.int64)
    for s in range(len(shapes)):
        one, known_tokens, blocks, _, _ = sequence_at(shapes[s, 0])
        computed, block_size, num_blocks = one[0].num_computed, one[0].block_size, one[0].num_blocks
        # A sequence may hold more blocks than its context needs, and more than the table has columns for.
        held = min(num_blocks, block_tables.shape[1])
        block_tables[s, :held] = blocks[:held]
        known, begin = computed + shapes[s, 1], computed + shapes[s, 2]
        own_tokens, own_parents = tokens[offsets[s] : offsets[s + 1]], parents[offsets[s] : offsets[s + 1]]
        context = known + len(own_parents)
        max_context = max(max_context, context)
        start = context if _is_chain(own_parents) else known
        begins[s], tree_starts[s], first_rows[s + 1] = begin, start, row + context - begin
        for node in range(context - start):
            parent = own_parents[node]
            node_positions[s, node] = known if parent < 0 else node_positions[s, parent] + 1
            for word in range(words):
                bits[node, word] = 0 if parent < 0 else bits[parent, word]
            bits[node, node // NODES_OF_A_WORD] |= np.int64(1) << (node % NODES_OF_A_WORD)
        for slot in range(begin, context):
            token_ids[row] = known_tokens[slot] if slot < known else own_tokens[slot - known]
            slots[row] = np.int64(blocks[slot // block_size]) * block_size + slot % block_size
            if slot < start:
                positions[row], visible_ends[row] = slot, slot + 1
            else:
                positions[row], visible_ends[row] = node_positions[s, slot - start], start
                ancestors[row] = bits[slot - start]
            row += 1
    return max_context
