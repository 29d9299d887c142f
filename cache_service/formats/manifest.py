"""The manifest of a namespace's tokens. Segments are grouped in generations.

New entries are folded into the last generation. When there are too many, the oldest generation is dropped whole.
"""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from cache_service.errors import FormatError
from cache_service.formats.folded_manifest import Count, FoldedManifest
from cache_service.formats.frame import Content
from cache_service.formats.segment import SegmentEntry

MAX_MANIFEST_SEGMENTS = 16_384
"""This many fit into MAX_MANIFEST_BYTES, whatever their sizes and generations."""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Segments that were filled together and will be dropped together."""

    number: Count  # previous generation's number + 1
    started_s: Count
    segments: tuple[SegmentEntry, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


class Manifest(FoldedManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`generations` is never empty; their numbers count up by one."""

    CONTENT: ClassVar[Content] = Content.MANIFEST

    generations: tuple[Generation, ...]
    folded_generation: Count = 0  # generation that holds the last fold's pieces

    @classmethod
    def empty(cls, epoch: str, version: int, now_s: int) -> Self:
        """A manifest that replaces the lost version `version`; 0: there was none.

        No generation's number exceeds its manifest's version, so this generation's number is new to every reader.
        """
        return cls(epoch, version, 0, generations=(Generation(version + 1 if version else 0, now_s),))

    @property
    def open_generation(self) -> Generation:
        return self.generations[-1]

    @property
    def oldest_generation(self) -> int:
        return self.generations[0].number

    @property
    def segments(self) -> list[SegmentEntry]:
        return [segment for generation in self.generations for segment in generation.segments]

    def check(self) -> None:
        super().check()
        numbers = [generation.number for generation in self.generations]
        if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise FormatError("garbage", f"a manifest's generations are {numbers[:10]}; they must count up by one")
