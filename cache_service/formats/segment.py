"""Segments: immutable files of documents, named by the SHA-256 of their bytes as they lie in Redis.

The digest is over the frame, not over the tokens: it can be checked before anything is decrypted or expanded, and tells
nobody who lacks the key whether a guessed text is inside. Frames are deterministic, so folding the same pieces twice
gives the same segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.folded_manifest import Count, Digest
from cache_service.formats.frame import Content, FrameCodec, digest_of
from cache_service.formats.piece_codec import PieceColumns, body_size, decode_columns, encode_pieces

MAX_SEGMENT_TOKENS = 4 * 2**20
MAX_SEGMENT_PIECES = 2**18
MAX_SEGMENT_BYTES = body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS) + 2**20


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment as the manifest knows it."""

    digest: Digest
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_TOKENS)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    first_s: Count  # Unix times of its oldest and newest piece
    last_s: Count


def encode_segment(codec: FrameCodec, pieces: Sequence[Piece]) -> tuple[SegmentEntry, bytes]:
    """A segment of one piece or more, and its frame. Raises FormatError "oversize" beyond MAX_SEGMENT_TOKENS or
    MAX_SEGMENT_PIECES."""
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


def decode_segment(codec: FrameCodec, digest: str, frame: bytes) -> list[Piece]:
    """The pieces of the segment that `digest` names. Raises FormatError, also for another segment's bytes."""
    return decode_segment_columns(codec, digest, frame).pieces()


def decode_segment_columns(codec: FrameCodec, digest: str, frame: bytes) -> PieceColumns:
    """The same column by column."""
    body = codec.unpack_named(Content.SEGMENT, digest, frame, body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS))
    return decode_columns(body, MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS)
