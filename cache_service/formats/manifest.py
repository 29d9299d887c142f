"""The manifest of a namespace: which segments make up its past, and up to where the stream has been folded into them.

Segments stand in generations. The last is open: everything that is not folded yet will be folded into it. The oldest is
dropped whole when there are too many.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from cache_service.errors import FormatError
from cache_service.formats import manifest_codec
from cache_service.formats.frame import Content, FrameCodec
from cache_service.formats.manifest_codec import Count, Digest
from cache_service.formats.segment import MAX_SEGMENT_BYTES, MAX_SEGMENT_TOKENS, Segment
from cache_service.formats.stream_id import PATTERN, START, parse_id

FORMAT_VERSION = 1
MAX_MANIFEST_SEGMENTS = 16_384
"""So many fit, whatever their sizes and however many generations they make up."""


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One segment as the manifest knows it."""

    digest: Digest
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_TOKENS)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    first_s: Count  # Unix times of its oldest and newest piece
    last_s: Count


def entry_of(segment: Segment) -> SegmentEntry:
    return SegmentEntry(segment.digest, segment.num_tokens, len(segment.frame), segment.first_s, segment.last_s)


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Segments that were filled at the same time and will be dropped at the same time."""

    number: Count  # one more than the generation before it
    started_s: Count
    segments: tuple[SegmentEntry, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one write of the manifest says. `generations` is never empty and counts up."""

    epoch: str  # of the data set that it was folded from
    version: Count  # one more with every write
    fencing_token: Count  # of the lease that it was written under
    generations: tuple[Generation, ...]
    folded_id: Annotated[str, msgspec.Meta(pattern=PATTERN)] = START  # the last stream entry in the segments
    folded_generation: Count = 0  # where the last fold put its pieces
    format_version: int = FORMAT_VERSION

    @property
    def open_generation(self) -> Generation:
        return self.generations[-1]

    @property
    def oldest_generation(self) -> int:
        return self.generations[0].number

    @property
    def segments(self) -> list[tuple[int, SegmentEntry]]:
        """(generation, segment), oldest first."""
        return [(generation.number, segment) for generation in self.generations for segment in generation.segments]


def encode_manifest(codec: FrameCodec, manifest: Manifest) -> bytes:
    """Raises FormatError "oversize" for a manifest that no reader would take."""
    return manifest_codec.encode(codec, Content.MANIFEST, manifest)


def decode_manifest(codec: FrameCodec, frame: bytes) -> Manifest:
    """Raises FormatError for anything that `encode_manifest` has not made."""
    manifest = manifest_codec.decode(codec, Content.MANIFEST, frame, Manifest, FORMAT_VERSION)
    numbers = [generation.number for generation in manifest.generations]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise FormatError("garbage", f"a manifest's generations are {numbers[:10]}; they must count up by one")
    parse_id(manifest.folded_id)
    return manifest
