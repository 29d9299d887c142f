"""The manifest of a namespace's tokens. Segments stand in generations.

The last generation is open: everything that is not folded yet will be folded into it. The oldest is dropped whole when
there are too many.
"""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from cache_service.errors import FormatError
from cache_service.formats.folded_manifest import Count, FoldedManifest
from cache_service.formats.frame import Content
from cache_service.formats.segment import SegmentEntry

MAX_MANIFEST_SEGMENTS = 16_384
"""So many fit, whatever their sizes and however many generations they make up."""


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


class Manifest(FoldedManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one write of the manifest says. `generations` is never empty and counts up."""

    CONTENT: ClassVar[Content] = Content.MANIFEST

    generations: tuple[Generation, ...]
    folded_generation: Count = 0  # where the last fold put its pieces

    @classmethod
    def empty(cls, epoch: str, version: int, now_s: int) -> Self:
        """A manifest in place of version `version`, which is lost, or 0 where there was none.

        No generation's number exceeds the version of its manifest, so its one generation is new to every reader.
        """
        return cls(epoch, version, 0, generations=(Generation(version + 1 if version else 0, now_s),))

    @property
    def open_generation(self) -> Generation:
        return self.generations[-1]

    @property
    def oldest_generation(self) -> int:
        return self.generations[0].number

    @property
    def segments(self) -> list[tuple[int, SegmentEntry]]:
        return [(generation.number, segment) for generation in self.generations for segment in generation.segments]

    def check(self) -> None:
        numbers = [generation.number for generation in self.generations]
        if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise FormatError("garbage", f"a manifest's generations are {numbers[:10]}; they must count up by one")
