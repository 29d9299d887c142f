"""What outlives its generation: texts that were asked for more than once in it, but for one copy."""

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
    """The newest copy of each piece that occurs at least twice in a generation that must go.

    Those said most often come in first, the newer of two that were said as often, as far as they fit into `max_tokens`
    together; the result is in order of time. A text that is not said again in its next generation goes with that: its
    one copy there is no repetition. So what is kept goes by how often and by how lately it was said.
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
