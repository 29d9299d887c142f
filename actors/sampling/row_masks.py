"""Masks of the tokens that grammars allow, for rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from actors.messages import FREE_ROW, TokenMasks
from actors.sampling.top_tokens import order_of

_NOTHING = -(2**31)  # in the order of logits: less than any
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class RowMasks(NamedTuple):
    """Masks of R rows, as in `TokenMasks`."""

    words: np.ndarray  # int32 [D, ceil(vocab_size / 32)]: distinct masks
    rows: np.ndarray  # int32 [R]: `TokenMasks.index`

    @property
    def is_forced(self) -> np.ndarray:
        """bool [R]: rows that allow one token, -1 - rows."""
        return (self.rows < 0) & (self.rows != FREE_ROW)


def row_masks(masks: Sequence[TokenMasks | None], num_rows: Sequence[int], vocab_size: int) -> RowMasks | None:
    """Masks of the rows of several sequences, one after the other; None: all rows are free.

    masks: of each sequence, None: free. num_rows: the first ones of `TokenMasks.index` that are used. Raises ValueError
    for masks of another vocabulary, or of too few rows.
    """
    if all(mask is None for mask in masks):
        return None
    width = -(-vocab_size // 32)
    words, index, count = [np.empty((0, width), np.int32)], [], 0
    for mask, rows in zip(masks, num_rows, strict=True):
        if mask is None:
            index.append(np.full(rows, FREE_ROW, np.int32))
            continue
        own = mask.index[:rows]
        distinct = len(mask.words) // width
        is_known = (own < distinct) & ((own >= -vocab_size) | (own == FREE_ROW))
        if len(mask.words) != distinct * width or len(own) != rows or not is_known.all():
            raise ValueError(
                f"masks of {len(mask.index)} rows and {len(mask.words)} words; {rows} rows of {vocab_size} tokens need "
                f"as many and {width} words a mask, and tokens below {vocab_size}"
            )
        index.append(np.where(own >= 0, own + np.int32(count), own))
        words.append(mask.words.reshape(-1, width))
        count += distinct
    return RowMasks(np.concatenate(words), np.concatenate(index))


def mask_rows(logits: Tensor, masks: RowMasks, token_ids: Tensor | None = None) -> None:
    """Set the logits of tokens that are not allowed to -inf. logits: [R, V], in memory of the host or not, of at most
    as many tokens as the masks. token_ids: as in `mask_logits`."""
    words = masks.words if len(masks.words) else np.zeros((1, masks.words.shape[1]), np.int32)
    if logits.device.type == "cpu" and token_ids is None:
        # As integers, since NumPy has no bfloat16. Only the kernel's writes take time: most rows allow one token.
        integers = _INTEGERS[logits.element_size()]
        minus_infinity = torch.tensor(-torch.inf, dtype=logits.dtype).view(integers).item()
        _mask_rows(logits.view(integers).numpy(), words, masks.rows, minus_infinity)
    else:
        distinct, index = (torch.from_numpy(array).to(logits.device) for array in (words, masks.rows))
        mask_logits(logits, distinct, index, token_ids=token_ids)


def argmax_within(logits: Tensor, masks: RowMasks, rows: np.ndarray | None = None) -> np.ndarray:
    """The columns of the largest logits that are allowed, int64 [S], the lowest of equals; 0 where none is. Reads only
    what is allowed. logits: [R, V], in memory of the host. rows: int64 [S]; None: all."""
    bits = logits.detach().float().contiguous().view(torch.int32).numpy()
    rows = np.arange(len(bits)) if rows is None else rows
    columns = np.empty(len(rows), np.int64)
    _argmax_within(bits, masks.words, masks.rows, rows, columns)
    return columns


@njit(cache=True, nogil=True)
def _argmax_within(bits, words, index, rows, columns):  # type: ignore[no-untyped-def]
    size = bits.shape[1]
    for turn in range(len(rows)):
        place, own = index[rows[turn]], bits[rows[turn]]
        if place < 0 and place != FREE_ROW:
            columns[turn] = -1 - place
            continue
        largest, best, allowed = np.int32(_NOTHING), 0, np.int32(0)
        for word in range((size + 31) // 32):
            here = np.int32(-1) if place == FREE_ROW else words[place, word]
            if here != 0:
                found = _largest_allowed(own, 32 * word, min(32, size - 32 * word), here)
                if found > largest:
                    largest, best, allowed = found, word, here
        columns[turn] = 0
        for column in range(32 * best, min(size, 32 * best + 32)):
            if allowed >> (column - 32 * best) & 1 and order_of(own[column]) == largest:
                columns[turn] = column
                break


@njit(cache=True, nogil=True)
def _largest_allowed(bits, first, count, allowed):  # type: ignore[no-untyped-def]
    """The largest bits among the allowed columns of one word. Without a branch on bits, and with a fixed number of
    steps, loops are vectorized."""
    largest = np.int32(_NOTHING)
    if count < 32:
        for place in range(count):
            if allowed >> place & 1:
                largest = np.int32(max(largest, order_of(bits[first + place])))
        return largest
    for place in range(32):
        kept = np.int32(np.int32(allowed << np.int32(31 - place)) >> np.int32(31))  # all bits, or none
        largest = np.int32(max(largest, np.int32((order_of(bits[first + place]) & kept) | (_NOTHING & ~kept))))
    return largest


@njit(cache=True, nogil=True)
def allowed_columns(mask, size):  # type: ignore[no-untyped-def]
    """int64, ascending; [0] if none is allowed. mask: one of `RowMasks.words`. size: columns."""
    columns = np.empty(size, np.int64)
    count = 0
    for word in range((size + 31) // 32):
        allowed, first = mask[word], 32 * word
        if allowed == 0:
            continue
        for column in range(first, min(size, first + 32)):
            columns[count] = column
            count += (allowed >> (column - first)) & 1
    columns[0] = columns[0] if count else 0
    return columns[: max(1, count)].copy()


@njit(cache=True, nogil=True)
def _mask_rows(logits, words, index, minus_infinity):  # type: ignore[no-untyped-def]
    size = logits.shape[1]
    for row in range(len(index)):
        place, own = index[row], logits[row]
        if place == FREE_ROW:
            continue
        if place < 0:
            token = -1 - place
            only = own[min(token, size - 1)]
            own[:] = minus_infinity
            if token < size:
                own[token] = only
            continue
        for word in range(words.shape[1]):
            allowed, first = words[place, word], 32 * word
            if allowed == 0:
                own[first : first + 32] = minus_infinity
            elif allowed != -1:
                for token in range(first, min(size, first + 32)):
                    if not allowed >> (token - first) & 1:
                        own[token] = minus_infinity


def mask_logits(
    logits: Tensor, words: Tensor, index: Tensor, first_id: int = 0, token_ids: Tensor | None = None
) -> None:
    """As `mask_rows`, of tensors on one device, without reading their values.

    logits: [R, V], whose first column is token `first_id`. words: int32 [D, W], D at least 1. index: int32 [R].
    token_ids: integers [V], the token of each column; None: they follow one another.
    """
    tokens = token_ids
    if tokens is None:
        tokens = torch.arange(first_id, first_id + logits.shape[-1], dtype=torch.int32, device=logits.device)
    bits = words[index.clamp_min(0)][:, tokens >> 5] >> (tokens & 31)
    only, place = -1 - index.unsqueeze(-1), index.unsqueeze(-1)
    allowed = torch.where(place >= 0, (bits & 1).to(torch.bool), (tokens == only) | (place == FREE_ROW))
    logits.masked_fill_(~allowed, -torch.inf)
