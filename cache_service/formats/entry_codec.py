"""Stream entries: a batch of pieces in one frame."""

from __future__ import annotations

from collections.abc import Sequence

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.frame import Content, FrameCodec
from cache_service.formats.piece_codec import body_size, decode_pieces, encode_pieces

MAX_ENTRY_TOKENS = 16_384
MAX_ENTRY_PIECES = 4_096
MAX_ENTRY_BODY_BYTES = body_size(MAX_ENTRY_PIECES, MAX_ENTRY_TOKENS)


def encode_entry(codec: FrameCodec, pieces: Sequence[Piece]) -> bytes:
    """Raises FormatError "oversize" for more than MAX_ENTRY_PIECES or MAX_ENTRY_TOKENS."""
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    if len(pieces) > MAX_ENTRY_PIECES or num_tokens > MAX_ENTRY_TOKENS:
        raise FormatError(
            "oversize",
            f"an entry has {len(pieces)} pieces, {num_tokens} tokens; the limits are {MAX_ENTRY_PIECES}, "
            f"{MAX_ENTRY_TOKENS}",
        )
    return codec.pack(Content.ENTRY, encode_pieces(pieces))


def decode_entry(codec: FrameCodec, entry: bytes) -> list[Piece]:
    """Raises FormatError for bytes that `encode_entry` did not make."""
    body = codec.unpack(Content.ENTRY, entry, MAX_ENTRY_BODY_BYTES)
    return decode_pieces(body, MAX_ENTRY_PIECES, MAX_ENTRY_TOKENS).pieces()
