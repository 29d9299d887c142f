"""Base of the manifests of folded logs: a frame around JSON.

A manifest lists the segments that hold the past of a log, and the last entry that was folded into them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Protocol, Self

import msgspec

from cache_service.errors import FormatError, FormatFault
from cache_service.formats.frame import Content, FrameCodec
from cache_service.formats.stream_id import PATTERN, START, parse_id

MAX_MANIFEST_BYTES = 4 * 2**20
"""Limit of a manifest's body; about 25,000 segments."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class SegmentRef(Protocol):
    """A segment in a manifest."""

    @property
    def digest(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class _Format(msgspec.Struct):
    format_version: int = 1


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frame around JSON."""

    CONTENT: ClassVar[Content]
    FORMAT_VERSION: ClassVar[int] = 1

    format_version: int = 1

    def check(self) -> None:
        """Raises FormatError where fields contradict each other."""

    def encode(self, codec: FrameCodec) -> bytes:
        """Raises FormatError "oversize" beyond MAX_MANIFEST_BYTES."""
        body = msgspec.json.encode(self)
        if len(body) > MAX_MANIFEST_BYTES:
            raise FormatError("oversize", f"a manifest takes {len(body)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        return codec.pack(self.CONTENT, body)

    @classmethod
    def decode(cls, codec: FrameCodec, frame: bytes) -> Self:
        """Raises FormatError for a frame that `encode` did not make."""
        body = codec.unpack(cls.CONTENT, frame, MAX_MANIFEST_BYTES)
        try:
            # The version is decoded first: a later format may have other fields.
            found = msgspec.json.decode(body, type=_Format).format_version
            if found != cls.FORMAT_VERSION:
                reason: FormatFault = "newer" if found > cls.FORMAT_VERSION else "garbage"
                raise FormatError(reason, f"a manifest has format {found}; this side reads {cls.FORMAT_VERSION}")
            record = msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FormatError("garbage", f"a manifest cannot be read: {type(error).__name__}") from None
        record.check()
        return record


class FoldedManifest(Record, frozen=True, forbid_unknown_fields=True):
    """One version of a log's manifest."""

    epoch: str  # names the data set
    version: Count  # grows by one with every write
    fencing_token: Count  # lease under which it was written
    folded_id: Annotated[str, msgspec.Meta(pattern=PATTERN)] = START  # the last stream entry in the segments

    @property
    @abstractmethod
    def segments(self) -> Sequence[SegmentRef]:
        """Oldest first."""

    def check(self) -> None:
        parse_id(self.folded_id)
