"""Segments: immutable sets of documents, named by the SHA-256 of their frame in Redis.

The digest is of the frame, not of the tokens: it can be checked before decryption and decompression, and without the
key it does not confirm a guessed text. Frames are deterministic, so folding the same pieces twice gives one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.folded_manifest import Count, Digest
from cache_service.formats.frame import Content, FrameCodec, digest_of
from cache_service.formats.piece_codec import PieceColumns, body_size, decode_pieces, encode_pieces

MAX_SEGMENT_TOKENS = 4 * 2**20
MAX_SEGMENT_PIECES = 2**18
MAX_SEGMENT_BYTES = body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS) + 2**20


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment's entry in the manifest."""

    digest: Digest
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_TOKENS)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    first_s: Count  # Unix times of the oldest and newest piece
    last_s: Count


def encode_segment(codec: FrameCodec, pieces: Sequence[Piece]) -> tuple[SegmentEntry, bytes]:
    """Raises FormatError "oversize" for no piece, or beyond MAX_SEGMENT_TOKENS or MAX_SEGMENT_PIECES."""
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    if not pieces or len(pieces) > MAX_SEGMENT_PIECES or num_tokens > MAX_SEGMENT_TOKENS:
        raise FormatError(
            "oversize",
            f"a segment has {len(pieces)} pieces, {num_tokens} tokens; it must have 1 to {MAX_SEGMENT_PIECES} and at "
            f"most {MAX_SEGMENT_TOKENS}",
        )
    frame = codec.pack(Content.SEGMENT, encode_pieces(pieces))
    times = [piece.time_s for piece in pieces]
    return SegmentEntry(digest_of(frame), num_tokens, len(frame), first_s=min(times), last_s=max(times)), frame


def decode_segment(codec: FrameCodec, digest: str, frame: bytes) -> PieceColumns:
    """Raises FormatError, also where the frame does not have this digest."""
    body = codec.unpack_named(Content.SEGMENT, digest, frame, body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS))
    return decode_pieces(body, MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS)
