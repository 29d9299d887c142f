"""What the steps of a forward share: int64 numbers, and arrays by their addresses, at the places named here."""

from __future__ import annotations

ROWS = 0
HIDDEN = 1  # float32 [rows, hidden size]: the residual stream
INPUTS = 2  # of a product: float32, or the bits of bfloat16
PRODUCTS = 3  # float32 [rows, outputs of a product]
COSINES = 4  # float32 [rows, rotated dims]
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
SIZE = 21
