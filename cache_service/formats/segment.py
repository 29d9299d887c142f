"""Segments: immutable files of documents, named by the SHA-256 of their bytes as they lie in Redis.

The digest is over the frame, not over the tokens: it can be checked before anything is decrypted or expanded, and tells
nobody who lacks the key whether a guessed text is inside. Frames are deterministic, so folding the same pieces twice
gives the same segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.frame import Content, FrameCodec
from cache_service.formats.piece_codec import PieceColumns, body_size, decode_columns, encode_pieces

MAX_SEGMENT_TOKENS = 4 * 2**20
MAX_SEGMENT_PIECES = 2**18
MAX_SEGMENT_BYTES = body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS) + 2**20


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as it is stored."""

    digest: str  # SHA-256 of `frame`, 64 hex digits
    frame: bytes
    num_tokens: int
    first_s: int  # Unix times of its oldest and newest piece
    last_s: int


def digest_of(frame: bytes) -> str:
    return hashlib.sha256(frame).hexdigest()


def encode_segment(codec: FrameCodec, pieces: Sequence[Piece]) -> Segment:
    """One segment of one piece or more. Raises FormatError "oversize" beyond MAX_SEGMENT_TOKENS, MAX_SEGMENT_PIECES."""
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    if not pieces or len(pieces) > MAX_SEGMENT_PIECES or num_tokens > MAX_SEGMENT_TOKENS:
        raise FormatError(
            "oversize",
            f"a segment has {len(pieces)} pieces, {num_tokens} tokens; it must have 1 to {MAX_SEGMENT_PIECES} and at "
            f"most {MAX_SEGMENT_TOKENS}",
        )
    frame = codec.pack(Content.SEGMENT, encode_pieces(pieces))
    times = [piece.time_s for piece in pieces]
    return Segment(digest_of(frame), frame, num_tokens, min(times), max(times))


def decode_segment(codec: FrameCodec, digest: str, frame: bytes) -> list[Piece]:
    """The pieces of the segment that `digest` names. Raises FormatError, also for another segment's bytes."""
    return decode_segment_columns(codec, digest, frame).pieces()


def decode_segment_columns(codec: FrameCodec, digest: str, frame: bytes) -> PieceColumns:
    """The same column by column."""
    if digest_of(frame) != digest:
        raise FormatError("garbage", f"segment {digest[:12]} has other bytes than its name says")
    body = codec.unpack(Content.SEGMENT, frame, body_size(MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS))
    return decode_columns(body, MAX_SEGMENT_PIECES, MAX_SEGMENT_TOKENS)
