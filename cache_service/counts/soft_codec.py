"""Soft n-gram counts as the payload of a folded log: entries are deltas, segments are parts.

    body of a delta: version u8 | origin 16 bytes | epoch: length u8, ASCII | entries as `soft_ngram` writes them
    body of a part:  version u8 | entries

A delta is what one replica learnt; a part holds merged counts. A delta names its epoch, so that it is ignored after a
purge, and its origin, so that a table does not add its own counts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from cache_service.counts.soft_ngram import (
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_ORDER,
    Entries,
    decode_entries,
    encode_entries,
)
from cache_service.errors import FormatError, FormatFault
from cache_service.formats.folded_manifest import Digest, FoldedManifest
from cache_service.formats.frame import Content, FrameCodec, digest_of
from cache_service.log.payload import Payload

ORIGIN_BYTES = 16
MAX_DELTA_CONTEXTS = 2**14
MAX_PART_CONTEXTS = 2**17
MAX_PART_BYTES = HEADER_BYTES + ENTRY_BYTES * MAX_PART_CONTEXTS + 2**20

_VERSION = 1
_MAX_EPOCH = 64
_MAX_DELTA_BODY = 1 + ORIGIN_BYTES + 1 + _MAX_EPOCH + HEADER_BYTES + ENTRY_BYTES * MAX_DELTA_CONTEXTS
_MAX_PART_BODY = 1 + HEADER_BYTES + ENTRY_BYTES * MAX_PART_CONTEXTS


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What one table learnt since its last delta."""

    origin: bytes  # [ORIGIN_BYTES], identifies the table
    epoch: str
    entries: Entries  # at most MAX_DELTA_CONTEXTS


class SoftPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part's entry in the manifest."""

    digest: Digest
    num_contexts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_CONTEXTS)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_BYTES)]


class SoftManifest(FoldedManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parts whose sum is what has been folded, in one generation."""

    CONTENT: ClassVar[Content] = Content.SOFT_MANIFEST

    parts: tuple[SoftPart, ...] = ()  # oldest first; a context may occur in several

    @property
    def segments(self) -> tuple[SoftPart, ...]:
        return self.parts


SoftPayload = Payload[SoftManifest, SoftPart, Delta, Entries]


def soft_payload(order: int) -> SoftPayload:
    return Payload(
        SoftManifest,
        decode_entry=lambda codec, frame: decode_delta(codec, order, frame),
        decode_segment=lambda codec, digest, frame: decode_part(codec, order, digest, frame),
        max_segment_bytes=MAX_PART_BYTES,
    )


def area_of(order: int) -> str:
    """A namespace's area for tables of this order; those of different orders cannot be merged."""
    return f"soft-{order}"


def order_of(area: str) -> int | None:
    """The order of an area's tables; None if it is no area of tables."""
    return next((order for order in range(1, MAX_ORDER + 1) if area == area_of(order)), None)


def encode_delta(codec: FrameCodec, order: int, delta: Delta) -> bytes:
    """Raises FormatError "oversize" beyond MAX_DELTA_CONTEXTS."""
    count = len(delta.entries.keys)
    if count > MAX_DELTA_CONTEXTS:
        raise FormatError("oversize", f"a delta has {count} contexts; the limit is {MAX_DELTA_CONTEXTS}")
    epoch = delta.epoch.encode("ascii")
    if len(delta.origin) != ORIGIN_BYTES or len(epoch) > _MAX_EPOCH:
        raise FormatError("garbage", f"a delta has an origin of {len(delta.origin)}, an epoch of {len(epoch)} bytes")
    head = bytes([_VERSION]) + delta.origin + bytes([len(epoch)]) + epoch
    return codec.pack(Content.SOFT_DELTA, head + encode_entries(order, delta.entries))


def decode_delta(codec: FrameCodec, order: int, frame: bytes) -> Delta:
    """Raises FormatError for bytes that `encode_delta` did not make for this order."""
    body = _versioned(codec.unpack(Content.SOFT_DELTA, frame, _MAX_DELTA_BODY))
    place = ORIGIN_BYTES + 1
    if len(body) < place or len(body) < place + body[ORIGIN_BYTES]:
        raise FormatError("garbage", f"a delta has {len(body)} bytes; origin and epoch take more")
    end = place + body[ORIGIN_BYTES]
    try:
        epoch = body[place:end].decode("ascii")
    except UnicodeDecodeError:
        raise FormatError("garbage", "the epoch of a delta is not ASCII") from None
    return Delta(body[:ORIGIN_BYTES], epoch, _entries(body[end:], order, "a delta"))


def encode_part(codec: FrameCodec, order: int, entries: Entries) -> tuple[SoftPart, bytes]:
    """Deterministic. Raises FormatError "oversize" unless there are 1 to MAX_PART_CONTEXTS contexts."""
    count = len(entries.keys)
    if not 1 <= count <= MAX_PART_CONTEXTS:
        raise FormatError("oversize", f"a part has {count} contexts; it must have 1 to {MAX_PART_CONTEXTS}")
    frame = codec.pack(Content.SOFT_PART, bytes([_VERSION]) + encode_entries(order, entries))
    return SoftPart(digest_of(frame), count, len(frame)), frame


def decode_part(codec: FrameCodec, order: int, digest: str, frame: bytes) -> Entries:
    """Raises FormatError, also where the frame does not have this digest."""
    body = codec.unpack_named(Content.SOFT_PART, digest, frame, _MAX_PART_BODY)
    return _entries(_versioned(body), order, "a part")


def _versioned(body: bytes) -> bytes:
    version = body[0] if body else 0
    if version != _VERSION:
        reason: FormatFault = "newer" if version > _VERSION else "garbage"
        raise FormatError(reason, f"soft counts have format version {version}; this side reads {_VERSION}")
    return body[1:]


def _entries(data: bytes, order: int, name: str) -> Entries:
    try:
        return decode_entries(data, order, name)
    except ValueError as error:
        raise FormatError("garbage", str(error)) from None
