"""Masks of the tokens that grammars allow, for rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from actors.messages import FREE_ROW, TokenMasks

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class RowMasks(NamedTuple):
    """Masks of R rows, as in `TokenMasks`."""

    words: np.ndarray  # int32 [D, ceil(vocab_size / 32)]: distinct masks
    rows: np.ndarray  # int32 [R]: `TokenMasks.index`


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


def mask_rows(logits: Tensor, masks: RowMasks) -> None:
    """Set the logits of tokens that are not allowed to -inf. logits: [R, V], in memory of the host or not."""
    words = masks.words if len(masks.words) else np.zeros((1, -(-logits.shape[-1] // 32)), np.int32)
    if logits.device.type == "cpu":
        # As integers, since NumPy has no bfloat16. Only the kernel's writes take time: most rows allow one token.
        integers = _INTEGERS[logits.element_size()]
        minus_infinity = torch.tensor(-torch.inf, dtype=logits.dtype).view(integers).item()
        _mask_rows(logits.view(integers).numpy(), words, masks.rows, minus_infinity)
    else:
        mask_logits(logits, *(torch.from_numpy(array).to(logits.device) for array in (words, masks.rows)))


@njit(cache=True, nogil=True)
def _mask_rows(logits, words, index, minus_infinity):  # type: ignore[no-untyped-def]
    size = logits.shape[1]
    for row in range(len(index)):
        place, own = index[row], logits[row]
        if place == FREE_ROW:
            continue
        if place < 0:
            only = own[-1 - place]
            own[:] = minus_infinity
            own[-1 - place] = only
            continue
        for word in range(words.shape[1]):
            allowed, first = words[place, word], 32 * word
            if allowed == 0:
                own[first : first + 32] = minus_infinity
            elif allowed != -1:
                for token in range(first, min(size, first + 32)):
                    if not allowed >> (token - first) & 1:
                        own[token] = minus_infinity


def mask_logits(logits: Tensor, words: Tensor, index: Tensor, first_id: int = 0) -> None:
    """As `mask_rows`, of tensors on one device, without reading their values.

    logits: [R, V], whose first column is token `first_id`. words: int32 [D, W], D at least 1. index: int32 [R].
    """
    tokens = torch.arange(first_id, first_id + logits.shape[-1], dtype=torch.int32, device=logits.device)
    bits = words[index.clamp_min(0)][:, tokens >> 5] >> (tokens & 31)
    only, place = -1 - index.unsqueeze(-1), index.unsqueeze(-1)
    allowed = torch.where(place >= 0, (bits & 1).to(torch.bool), (tokens == only) | (place == FREE_ROW))
    logits.masked_fill_(~allowed, -torch.inf)
