"""Chooses the phrases of a text to be counted.

A phrase begins where a hash of two tokens selects it (content-defined sampling, as in Schleimer, Wilkerson and Aiken,
"Winnowing: local algorithms for document fingerprinting", 2003), so texts that share a passage share its phrases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_service.errors import FormatError

MAX_PHRASE_TOKENS = 16
"""Longest phrase, so that no whole sentence of somebody becomes public."""

LENGTHS = (4, 8, 16)
"""Lengths of the phrases that begin at one position, in tokens."""

EVERY = 8
"""On average, phrases begin at one position in EVERY."""

MAX_PHRASES = 256
"""Most phrases of one text."""

Phrase = tuple[int, ...]


def phrases_of(
    token_ids: npt.NDArray[np.integer],
    blocked: npt.NDArray[np.bool_],
    every: int = EVERY,
    max_phrases: int = MAX_PHRASES,
) -> list[Phrase]:
    """Phrases of a text (ints [n], >= 0) that contain no `blocked` token (bool [n]), each once."""
    tokens = np.asarray(token_ids, np.int64)
    if len(tokens) < 2:
        return []
    bad = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocked)])
    begins = np.flatnonzero(_mixed(tokens[:-1], tokens[1:]) % np.uint64(every) == 0)
    found: dict[Phrase, None] = {}
    for begin in begins.tolist():
        for length in LENGTHS:
            end = begin + length
            if end > len(tokens) or bad[end] != bad[begin]:
                break
            found[tuple(tokens[begin:end].tolist())] = None
        if len(found) >= max_phrases:
            break
    return list(found)[:max_phrases]


def encode_phrase(phrase: Phrase) -> bytes:
    return np.array(phrase, "<i4").tobytes()


def decode_phrase(data: bytes) -> Phrase:
    """Raises FormatError for bytes that are no phrase."""
    if not data or len(data) % 4 or len(data) > 4 * MAX_PHRASE_TOKENS:
        raise FormatError(
            "garbage", f"a phrase has {len(data)} bytes; it must have 4 for each of 1-{MAX_PHRASE_TOKENS}"
        )
    tokens = np.frombuffer(data, "<i4")
    if int(tokens.min()) < 0:
        raise FormatError("garbage", f"a phrase has token id {int(tokens.min())}; ids are >= 0")
    return tuple(tokens.tolist())


def _mixed(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The finalizer of MurmurHash3 over pairs."""
    key = (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    key = (key ^ (key >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return key ^ (key >> np.uint64(33))
