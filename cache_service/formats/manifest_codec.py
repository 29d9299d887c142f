"""Manifests as frames: JSON that says which format it has."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from cache_service.errors import FormatError, FormatFault
from cache_service.formats.frame import Content, FrameCodec

MAX_MANIFEST_BYTES = 4 * 2**20
"""Of a manifest's body: room for some 25,000 segments."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

_Manifest = TypeVar("_Manifest", bound=msgspec.Struct)


class _Format(msgspec.Struct):
    format_version: int = 1


def encode(codec: FrameCodec, content: Content, manifest: msgspec.Struct) -> bytes:
    """Raises FormatError "oversize" for a manifest that no reader would take."""
    body = msgspec.json.encode(manifest)
    if len(body) > MAX_MANIFEST_BYTES:
        raise FormatError("oversize", f"a manifest takes {len(body)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    return codec.pack(content, body)


def decode(codec: FrameCodec, content: Content, frame: bytes, kind: type[_Manifest], version: int) -> _Manifest:
    """version: of the format that `kind` is. Raises FormatError for anything that `encode` has not made of one."""
    body = codec.unpack(content, frame, MAX_MANIFEST_BYTES)
    try:
        # Alone and first: a later format may have other fields, which are no reason to take it for garbage.
        found = msgspec.json.decode(body, type=_Format).format_version
        if found != version:
            reason: FormatFault = "newer" if found > version else "garbage"
            raise FormatError(reason, f"a manifest has format {found}; this side reads {version}")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError("garbage", f"a manifest cannot be read: {type(error).__name__}") from None
