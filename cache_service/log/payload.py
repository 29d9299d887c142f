"""Payloads of a folded log: the types of its manifest, entries and segments, and their decoders.

There are two: tokens, and soft counts (see `counts.soft_codec`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cache_service.formats.documents import Piece
from cache_service.formats.entry_codec import decode_entry
from cache_service.formats.folded_manifest import FoldedManifest, SegmentRef
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import MAX_SEGMENT_BYTES, SegmentEntry, decode_segment

ManifestT = TypeVar("ManifestT", bound=FoldedManifest)
RefT = TypeVar("RefT", bound=SegmentRef)
EntryT = TypeVar("EntryT")
SegmentT = TypeVar("SegmentT")


@dataclass(frozen=True, slots=True)
class Payload(Generic[ManifestT, RefT, EntryT, SegmentT]):
    """The decoders raise FormatError."""

    manifest: type[ManifestT]
    decode_entry: Callable[[FrameCodec, bytes], EntryT]
    decode_segment: Callable[[FrameCodec, str, bytes], SegmentT]  # takes digest and frame
    max_segment_bytes: int


TOKENS: Payload[Manifest, SegmentEntry, list[Piece], PieceColumns] = Payload(
    Manifest, decode_entry, decode_segment, MAX_SEGMENT_BYTES
)
