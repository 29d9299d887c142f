"""Joins the pieces of segments into one text for an automaton: whole documents, each followed by a separator.

The same as `assemble`, but for millions of tokens and without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from cache_service.automata.suffix_automaton import SEPARATOR
from cache_service.formats.piece_codec import PieceColumns

Int32Array = npt.NDArray[np.int32]


def joined_text(segments: Sequence[PieceColumns], vocab_size: int) -> tuple[Int32Array, int]:
    """The documents of `segments` in one text, int32 [n], and its number of separators, one after each document.

    Each token of a document occurs once, for any order and repetition of its pieces. Where pieces disagree, the
    one that begins first wins, then the longer, then the earlier. A document is split at a gap and at a token id that
    is not below `vocab_size`.
    """
    ids = np.frombuffer(b"".join(segment.document_ids for segment in segments), "<u8").reshape(-1, 2)
    lengths = _concatenated([segment.lengths for segment in segments], np.int64)
    offsets = _concatenated([segment.offsets for segment in segments], np.int64)
    kinds = _concatenated([segment.kinds for segment in segments], np.uint8)
    tokens = _concatenated([segment.token_ids for segment in segments], np.int32)
    order = np.lexsort((-(offsets + lengths), offsets, kinds, ids[:, 1], ids[:, 0]))
    text = np.empty(len(tokens) + len(order), np.int32)
    size, num_separators = _join(
        order, ids.astype(np.uint64), kinds, offsets, lengths, np.cumsum(lengths) - lengths, tokens, vocab_size, text
    )
    return text[:size], int(num_separators)


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache."""
    columns = PieceColumns(
        document_ids=bytes(16),
        offsets=np.zeros(1, np.int64),
        lengths=np.ones(1, np.int64),
        times=np.zeros(1, np.int64),
        kinds=np.zeros(1, np.uint8),
        token_ids=np.zeros(1, np.int32),
    )
    joined_text([columns], 1)


def _concatenated(parts: list[npt.NDArray], dtype: type) -> npt.NDArray:
    """A fresh array, also of no parts: numba would compile another version for read-only arrays."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")


@njit(cache=True, nogil=True)
def _join(order, ids, kinds, offsets, lengths, begins, tokens, vocab_size, text):  # type: ignore[no-untyped-def]
    size = 0
    separators = 0
    end = np.int64(0)
    before = np.int64(-1)
    for row in order:
        skipped = np.int64(0)
        is_same = (
            before >= 0
            and ids[row, 0] == ids[before, 0]
            and ids[row, 1] == ids[before, 1]
            and kinds[row] == kinds[before]
            and offsets[row] <= end
        )
        if is_same:
            skipped = end - offsets[row]
            if skipped >= lengths[row]:
                continue
        elif size > 0 and text[size - 1] != SEPARATOR:
            text[size] = SEPARATOR
            size += 1
            separators += 1
        for place in range(begins[row] + skipped, begins[row] + lengths[row]):
            token = tokens[place]
            if token < vocab_size:
                text[size] = token
                size += 1
            elif size > 0 and text[size - 1] != SEPARATOR:
                text[size] = SEPARATOR
                size += 1
                separators += 1
        before = row
        end = offsets[row] + lengths[row]
    if size > 0 and text[size - 1] != SEPARATOR:
        text[size] = SEPARATOR
        size += 1
        separators += 1
    return size, separators
