"""Retokenises cached documents for a model with another tokenizer.

Documents are cut at special tokens, since chat templates differ, and the text between them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.models.catalog import Progress, silent
from cache_service.admin.importer import MAX_DOCUMENT_TOKENS
from cache_service.formats.documents import Int32Array, Piece, content_id
from cluster.text.documents import tokenise_text

_DAMAGED = "\ufffd"  # at a cut inside a character
_MIN_CHARS = 8  # shorter stretches are of no use to draft from


@dataclass(slots=True)
class MigrationCounts:
    """Counts in the old tokenizer's tokens."""

    pieces: int = 0
    tokens: int = 0
    special_tokens: int = 0
    left_out_tokens: int = 0  # in stretches that are too short or not valid text


class Migration:
    """From one `transformers` tokenizer to another."""

    def __init__(self, old: Any, new: Any) -> None:
        self.counts = MigrationCounts()
        self._old = old
        self._new = new
        self._special = np.array(sorted(old.all_special_ids), np.int64)

    def pieces(self, pieces: list[Piece], progress: Progress = silent) -> Iterator[Piece]:
        """Documents in the new tokens. Each stretch becomes a document named by its content, so that repeating a
        migration adds nothing."""
        for row, piece in enumerate(pieces):
            self.counts.pieces += 1
            self.counts.tokens += len(piece.token_ids)
            for text in self._texts(piece.token_ids):
                yield from self._retokenised(text, piece)
            progress("migrating", row + 1, len(pieces))

    def _texts(self, token_ids: Int32Array) -> Iterator[str]:
        is_special = np.isin(token_ids, self._special)
        self.counts.special_tokens += int(is_special.sum())
        for stretch in np.split(token_ids, np.flatnonzero(is_special)):
            plain = stretch[1:] if len(stretch) and stretch[0] in self._special else stretch
            if len(plain) == 0:
                continue
            text = self._old.decode(plain.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            text = text.strip(_DAMAGED)
            if len(text) < _MIN_CHARS or _DAMAGED in text:
                self.counts.left_out_tokens += len(plain)
                continue
            yield text

    def _retokenised(self, text: str, piece: Piece) -> Iterator[Piece]:
        parts = [token_ids for token_ids, _ in tokenise_text(text, self._new)]
        if not parts:
            return
        whole = np.concatenate(parts)
        for begin in range(0, len(whole), MAX_DOCUMENT_TOKENS):
            token_ids = whole[begin : begin + MAX_DOCUMENT_TOKENS]
            yield replace(piece, document_id=content_id(token_ids), offset=0, token_ids=token_ids)
