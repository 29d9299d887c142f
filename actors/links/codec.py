"""Frames: what one ZeroMQ message between a router and a worker looks like.

    magic "PCLN" (4 bytes) | PROTOCOL_VERSION (2 bytes, big endian) | msgpack of one `actors.messages.Message`

Nothing a peer can send makes `unpack` raise anything but `FrameError`.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from actors.errors import LinkError
from actors.messages import PROTOCOL_VERSION, Message, decode_message, encode_message

MAGIC = b"PCLN"
MAX_FRAME_BYTES = 64 * 1024 * 1024  # 128 sequences of 128 k tokens, sent whole

_HEADER = struct.Struct(">4sH")

FrameFault = Literal["garbage", "version", "oversize", "unencodable"]


class FrameError(LinkError):
    """A frame could not be read or made. `reason` is one of `FrameFault` and names a counter of `LinkStats`."""

    def __init__(self, reason: FrameFault, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason: FrameFault = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


def pack(message: Message, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame holding `message`.

    Raises FrameError "unencodable" for values that are not part of the protocol (an int64 array, an integer beyond
    64 bits) and "oversize" for a frame of more than `max_bytes`, which a receiver would drop.
    """
    try:
        payload = encode_message(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError("unencodable", f"{type(message).__name__} cannot be encoded: {error}") from None
    size = _HEADER.size + len(payload)
    if size > max_bytes:
        raise FrameError("oversize", f"{type(message).__name__} takes {size} bytes; the limit is {max_bytes}")
    return _HEADER.pack(MAGIC, PROTOCOL_VERSION) + payload


def unpack(frame: bytes, max_bytes: int = MAX_FRAME_BYTES) -> Message:
    """The message in a frame. Its arrays are read-only views of the frame's payload and need not be aligned.

    Raises FrameError "oversize", "garbage" or "version".
    """
    if len(frame) > max_bytes:
        raise FrameError("oversize", f"a frame has {len(frame)} bytes; the limit is {max_bytes}")
    if len(frame) < _HEADER.size:
        raise FrameError("garbage", f"a frame has {len(frame)} bytes; a header takes {_HEADER.size}")
    magic, version = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError("garbage", f"a frame begins with {magic!r}; it must begin with {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise FrameError("version", f"a frame has protocol version {version}; this side speaks {PROTOCOL_VERSION}")
    try:
        return decode_message(frame[_HEADER.size :])
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        # Deep nesting in a field that is skipped ends in RecursionError: the reason for the long list.
        raise FrameError("garbage", f"a frame holds no message: {type(error).__name__}") from None
