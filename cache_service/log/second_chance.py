"""Texts that survive the drop of their generation: those that occur in it more than once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cache_service.formats.documents import Piece


@dataclass(slots=True)
class _Text:
    newest: Piece
    count: int = 1


def survivors(pieces: Iterable[Piece], max_tokens: int) -> list[Piece]:
    """The newest copy of each piece that occurs at least twice in a dropped generation, in order of time.

    The most frequent come first, then the newest, as far as they fit into `max_tokens` together. A survivor that does
    not recur in its next generation is dropped with it, since its copy there is the only one.
    """
    texts: dict[bytes, _Text] = {}
    for piece in pieces:
        content = hashlib.blake2b(piece.token_ids.tobytes(), digest_size=16, salt=bytes([piece.kind])).digest()
        text = texts.get(content)
        if text is None:
            texts[content] = _Text(piece)
            continue
        text.count += 1
        if piece.time_s > text.newest.time_s:
            text.newest = piece
    repeated = sorted(
        (text for text in texts.values() if text.count > 1), key=lambda text: (-text.count, -text.newest.time_s)
    )
    kept, room = [], max_tokens
    for text in repeated:
        if len(text.newest.token_ids) <= room:
            kept.append(text.newest)
            room -= len(text.newest.token_ids)
    return sorted(kept, key=lambda piece: (piece.time_s, piece.document_id, piece.offset))
