"""What the steps of a forward share: int64 numbers, and arrays by their addresses, at the places named here."""

from __future__ import annotations

import numpy as np
from numba import njit

ROWS = 0
HIDDEN = 1  # float32 [rows, hidden size]: the residual stream
INPUTS = 2  # of a product: float32, or the bits of bfloat16
PRODUCTS = 3  # float32 [rows, outputs of a product]
COSINES = 4  # float32 [angles, rotated dims]
SINES = 5
SLOTS = 6  # int64 [rows]
SEQUENCES = 7  # their number, and the arrays of `PackedBatch`
FIRST_ROWS = 8
CONTEXTS = 9
TREE_STARTS = 10
BLOCK_TABLES = 11
TABLE_WIDTH = 12
BLOCK_SIZE = 13
VISIBLE_ENDS = 14
ANCESTORS = 15
WORDS = 16
POSITIONS = 17
NODE_POSITIONS = 18
CACHE = 19  # int64 [layers, 2]: addresses of keys and values
ROTATED = 20  # dims of a head that are rotated
ANGLES_AT = 21  # int64 [rows]: which row of the cosines and sines each row takes
# Only for a whole forward:
TOKEN_IDS = 22  # int64 [rows]
NUM_WANTED = 23  # rows with logits
WANTED = 24  # int64 [wanted]
LOGITS = 25  # float32 [wanted, outputs of a product]
SIZE = 26


@njit(cache=True, nogil=True)
def tell_batch(  # type: ignore[no-untyped-def]
    state, rows, cache, angles_at, slots, block_size, positions, first_rows, contexts, tree_starts, block_tables,
    visible_ends, ancestors, node_positions,
):  # fmt: skip
    """Write the rows of a forward and where its arrays are. The caller keeps the arrays, most of which have
    these names in `PackedBatch`. cache: int64 [layers, 2]; angles_at: int64 [rows]."""
    state[ROWS], state[CACHE] = rows, _address(cache)
    state[ANGLES_AT], state[SLOTS] = _address(angles_at), _address(slots)
    state[SEQUENCES], state[TABLE_WIDTH] = len(contexts), block_tables.shape[1]
    state[BLOCK_SIZE], state[WORDS] = block_size, ancestors.shape[1]
    state[POSITIONS], state[FIRST_ROWS], state[CONTEXTS] = _address(positions), _address(first_rows), _address(contexts)
    state[TREE_STARTS], state[BLOCK_TABLES] = _address(tree_starts), _address(block_tables)
    state[VISIBLE_ENDS], state[ANCESTORS] = _address(visible_ends), _address(ancestors)
    state[NODE_POSITIONS] = _address(node_positions)


@njit(cache=True, nogil=True)
def tell_whole(state, token_ids, num_ids, wanted, logits):  # type: ignore[no-untyped-def]
    """Write where the arrays of a whole forward are, which the caller keeps. False: there are only `num_ids` tokens."""
    for token in token_ids:
        if not 0 <= token < num_ids:
            return False
    state[TOKEN_IDS], state[NUM_WANTED] = _address(token_ids), len(wanted)
    state[WANTED], state[LOGITS] = _address(wanted), _address(logits)
    return True


@njit(nogil=True)
def _address(array):  # type: ignore[no-untyped-def]
    return np.int64(array.ctypes.data)
