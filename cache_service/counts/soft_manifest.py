"""The manifest of a namespace's soft n-gram counts: which parts add up to what has been folded, and up to where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from cache_service.counts.soft_codec import MAX_PART_BYTES, MAX_PART_CONTEXTS
from cache_service.formats import manifest_codec
from cache_service.formats.frame import Content, FrameCodec
from cache_service.formats.manifest_codec import Count, Digest
from cache_service.formats.stream_id import PATTERN, START, parse_id

FORMAT_VERSION = 1


class SoftPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part as the manifest knows it."""

    digest: Digest
    num_contexts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_CONTEXTS)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_BYTES)]


class SoftManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one write of the manifest says."""

    epoch: str  # of the data set that it was folded from
    version: Count  # one more with every write
    fencing_token: Count  # of the lease that it was written under
    parts: tuple[SoftPart, ...] = ()  # oldest first; a context may be in several, and counts with all of them
    folded_id: Annotated[str, msgspec.Meta(pattern=PATTERN)] = START  # the last stream entry in the parts
    format_version: int = FORMAT_VERSION


def encode_soft_manifest(codec: FrameCodec, manifest: SoftManifest) -> bytes:
    """Raises FormatError "oversize" for a manifest that no reader would take."""
    return manifest_codec.encode(codec, Content.SOFT_MANIFEST, manifest)


def decode_soft_manifest(codec: FrameCodec, frame: bytes) -> SoftManifest:
    """Raises FormatError for anything that `encode_soft_manifest` has not made."""
    manifest = manifest_codec.decode(codec, Content.SOFT_MANIFEST, frame, SoftManifest, FORMAT_VERSION)
    parse_id(manifest.folded_id)
    return manifest


def num_absorbed(sizes: Sequence[int], num_new: int, max_contexts: int) -> int:
    """How many of the last parts, of `sizes` contexts, to write anew together with `num_new` contexts.

    A part is absorbed by half as many as its own, so that a context is rewritten only a few times; all are when they
    would be more than `max_contexts` together: then those of least use have to go.
    """
    if sum(sizes) + num_new > max_contexts:
        return len(sizes)
    absorbed, total = 0, num_new
    for size in reversed(sizes):
        if size > 2 * total:
            break
        total += size
        absorbed += 1
    return absorbed
