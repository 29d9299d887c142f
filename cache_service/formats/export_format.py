"""Exports: a namespace as lines of JSON, first a header, then one line per piece of a document.

    {"paceline_cache_export": 1, "fingerprint": "...", "tokenizer": "...", "namespace": "..."}
    {"document_id": "0f...", "offset": 0, "kind": 0, "time_s": 1764000000, "token_ids": [1, 2, 3]}

A piece may also have "text", for people; it is not read back.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from cache_service.errors import FormatError, FormatFault
from cache_service.formats.documents import DOCUMENT_ID_BYTES, MAX_DOCUMENT_TOKENS, Piece

VERSION = 1
MARK = "paceline_cache_export"
MAX_LINE_BYTES = 256 * 2**20

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_DOCUMENT_TOKENS)]


class ExportHeader(msgspec.Struct, frozen=True):
    """tokenizer: the fingerprint of the tokenizer that gives the token ids their meaning."""

    fingerprint: str
    tokenizer: str
    namespace: str
    version: int = msgspec.field(default=VERSION, name=MARK)


class _Version(msgspec.Struct):
    version: int = msgspec.field(name=MARK)


class _Row(msgspec.Struct, frozen=True, omit_defaults=True):
    document_id: Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{2 * DOCUMENT_ID_BYTES}}}\Z")]
    token_ids: Annotated[list[_Count], msgspec.Meta(min_length=1)]
    offset: _Count = 0
    kind: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    time_s: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    text: str | None = None


def encode_header(header: ExportHeader) -> bytes:
    return msgspec.json.encode(header) + b"\n"


def encode_piece(piece: Piece, text: str | None = None) -> bytes:
    row = _Row(
        document_id=piece.document_id.hex(),
        token_ids=piece.token_ids.tolist(),
        offset=piece.offset,
        kind=int(piece.kind),
        time_s=piece.time_s,
        text=text,
    )
    return msgspec.json.encode(row) + b"\n"


def is_export(first_line: bytes) -> bool:
    """Whether a file that begins with this line is an export, of any version."""
    if MARK.encode() not in first_line[:4096]:
        return False
    try:
        row: Any = msgspec.json.decode(first_line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and MARK in row


def decode_header(line: bytes) -> ExportHeader:
    """Raises FormatError."""
    try:
        # The version is decoded first: a later format may have other fields.
        found = msgspec.json.decode(line, type=_Version).version
        if found != VERSION:
            reason: FormatFault = "newer" if found > VERSION else "garbage"
            raise FormatError(reason, f"the export has format {found}; this side reads {VERSION}")
        return msgspec.json.decode(line, type=ExportHeader)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise FormatError("garbage", "the first line of the export cannot be read") from None


def decode_piece(line: bytes) -> Piece:
    """Raises FormatError for bytes that `encode_piece` did not make."""
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError("garbage", f"no piece of a document: {' '.join(str(error).split())[:200]}") from None
    if row.offset + len(row.token_ids) > MAX_DOCUMENT_TOKENS:
        raise FormatError("oversize", f"a document ends past {MAX_DOCUMENT_TOKENS} tokens")
    token_ids = np.array(row.token_ids, np.int32)
    return Piece(bytes.fromhex(row.document_id), row.offset, token_ids, kind=row.kind, time_s=row.time_s)
