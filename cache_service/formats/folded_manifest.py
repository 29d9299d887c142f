"""What the manifests of all folded logs have in common: a frame around JSON that names its format.

A manifest says which segments make up the past of a log, and up to which entry the log has been folded into them.
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
"""The limit of a manifest's body: room for some 25,000 segments."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class SegmentRef(Protocol):
    """How a manifest names a segment."""

    @property
    def digest(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class _Format(msgspec.Struct):
    format_version: int = 1


class FoldedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one write of the manifest says."""

    CONTENT: ClassVar[Content]
    FORMAT_VERSION: ClassVar[int] = 1

    epoch: str  # identifies the data set that it was folded from
    version: Count  # one more with every write
    fencing_token: Count  # belongs to the lease that it was written under
    folded_id: Annotated[str, msgspec.Meta(pattern=PATTERN)] = START  # the last stream entry in the segments
    format_version: int = 1

    @property
    @abstractmethod
    def segments(self) -> Sequence[tuple[int, SegmentRef]]:
        """(generation, segment), oldest first."""

    def check(self) -> None:
        """Raises FormatError where fields that are valid one by one do not fit together."""

    def encode(self, codec: FrameCodec) -> bytes:
        """The manifest as a frame. Raises FormatError "oversize" for one that no reader would take."""
        body = msgspec.json.encode(self)
        if len(body) > MAX_MANIFEST_BYTES:
            raise FormatError("oversize", f"a manifest takes {len(body)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        return codec.pack(self.CONTENT, body)

    @classmethod
    def decode(cls, codec: FrameCodec, frame: bytes) -> Self:
        """The manifest in a frame. Raises FormatError for anything that `encode` has not made."""
        body = codec.unpack(cls.CONTENT, frame, MAX_MANIFEST_BYTES)
        try:
            # The version is read alone and first: a later format may have other fields.
            found = msgspec.json.decode(body, type=_Format).format_version
            if found != cls.FORMAT_VERSION:
                reason: FormatFault = "newer" if found > cls.FORMAT_VERSION else "garbage"
                raise FormatError(reason, f"a manifest has format {found}; this side reads {cls.FORMAT_VERSION}")
            manifest = msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FormatError("garbage", f"a manifest cannot be read: {type(error).__name__}") from None
        parse_id(manifest.folded_id)
        manifest.check()
        return manifest
