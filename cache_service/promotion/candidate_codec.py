"""A phrase of the promotion gate in Redis: its tokens, and when enough tenants had said it.

A frame of content PHRASE around: version u8 | Unix time u64 | token ids i32. Numbers are little-endian.
"""

from __future__ import annotations

from cache_service.errors import FormatError
from cache_service.formats.frame import Content, FrameCodec
from cache_service.promotion.phrases import MAX_PHRASE_TOKENS, Phrase, decode_phrase, encode_phrase

_VERSION = 1
_HEAD_BYTES = 9
_MAX_BODY = _HEAD_BYTES + 4 * MAX_PHRASE_TOKENS


def encode_candidate(codec: FrameCodec, phrase: Phrase, reached_s: int) -> bytes:
    """reached_s: Unix time at which enough tenants had said it."""
    return codec.pack(Content.PHRASE, bytes([_VERSION]) + reached_s.to_bytes(8, "little") + encode_phrase(phrase))


def decode_candidate(codec: FrameCodec, frame: bytes) -> tuple[Phrase, int]:
    """(phrase, reached_s). Raises FormatError."""
    body = codec.unpack(Content.PHRASE, frame, _MAX_BODY)
    if len(body) < _HEAD_BYTES or body[0] != _VERSION:
        raise FormatError("newer" if body[:1] > bytes([_VERSION]) else "garbage", "a phrase of another format")
    return decode_phrase(body[_HEAD_BYTES:]), int.from_bytes(body[1:_HEAD_BYTES], "little")
