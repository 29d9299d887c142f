"""Reads the body of an HTTP request, within a limit, and decompresses it."""

from __future__ import annotations

import asyncio
import io
import zlib

import zstandard
from ray.exceptions import RayError
from starlette.requests import ClientDisconnect, Request

from actors.errors import InvalidRequest, Size
from cluster.gateway.errors import BodyTooLarge, UnknownEncoding
from cluster.validation import counted

ENCODINGS = ("gzip", "zstd")  # besides none
_GZIP_WBITS = 31  # zlib's number for the gzip format
_MAX_WINDOW_BYTES = 8 << 20  # zstd frames declare how much memory they need; RFC 8878 asks decoders for this much
_READ_BYTES = 1 << 16


async def read_body(request: Request, limit: int) -> bytes:
    """The body without its content encoding, at most `limit` bytes of it, as sent and decompressed.

    Raises BodyTooLarge without reading the rest, UnknownEncoding, ClientDisconnect, or InvalidRequest for data that is
    not compressed as the header says.
    """
    encoding = _encoding_of(request)
    data = await _read(request, limit)
    if encoding is None:
        return data
    return await asyncio.to_thread(_unzip if encoding == "gzip" else _unzstd, data, limit)


def _encoding_of(request: Request) -> str | None:
    """Raises UnknownEncoding."""
    given = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if given in ("", "identity"):
        return None
    encoding = "gzip" if given == "x-gzip" else given
    if encoding not in ENCODINGS:
        known = " and ".join(ENCODINGS)
        raise UnknownEncoding("content-encoding", given[:64], f"known encodings are {known}, one at a time")
    return encoding


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(None, limit)
            parts.append(part)
    except RayError:  # of Serve's proxy, which is asked for each part: it has lost the client, or has ended
        raise ClientDisconnect from None
    return b"".join(parts)


def _unzip(data: bytes, limit: int) -> bytes:
    output = bytearray()
    while True:  # a gzip file may have several members
        stream = zlib.decompressobj(wbits=_GZIP_WBITS)
        try:
            output += stream.decompress(data, limit + 1 - len(output))
        except zlib.error:
            raise _damaged(data, "gzip") from None
        if len(output) > limit:
            raise _too_large(None, limit, "decompressed")
        if not stream.eof:
            raise _damaged(data, "gzip")
        data = stream.unused_data
        if not data:
            return bytes(output)


def _unzstd(data: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    output = bytearray()
    try:
        with decompressor.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
            while part := reader.read(_READ_BYTES):
                output += part
                if len(output) > limit:
                    raise _too_large(None, limit, "decompressed")
    except zstandard.ZstdError:
        raise _damaged(data, "zstd") from None
    return bytes(output)


def _damaged(data: bytes, encoding: str) -> InvalidRequest:
    limit = f"it is not whole {encoding} data, as content-encoding says"
    return InvalidRequest("body", counted(len(data), "byte"), limit, "invalid_encoding")


def _too_large(size: int | None, limit: int, when: str = "") -> BodyTooLarge:
    told = counted(size, "byte") if size is not None else Size(f"more than {limit} bytes{when and ' '}{when}")
    return BodyTooLarge("body", told, f"at most {limit} bytes are read (gateway.max_body_bytes)")
