"""Frames: the form of all data of the shared cache in Redis; compressed, checksummed, and encrypted with a key ring.

    magic "PCLC" | version u8 | content u8 | encrypted u8 | 0 u8 | raw size u32 | payload size u32 | key id u32 |
    CRC-32 of everything else u32 | payload: zstd of the body; if encrypted: nonce, AES-GCM of the zstd data, tag

Numbers are little-endian. Later versions keep the magic, the header's length and the checksum. For any bytes, `unpack`
raises nothing but FormatError and allocates no more than the frame's size and the caller's limit.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum

import zstandard

from cache_service.errors import FormatError, FormatFault
from cache_service.formats.key_ring import SEAL_BYTES, KeyRing, NamespaceCipher
from cache_service.formats.store_keys import StoreKeys

MAGIC = b"PCLC"
VERSION = 1

_HEADER = struct.Struct("<4sBBBBIII")
_CRC = struct.Struct("<I")
FRAME_OVERHEAD = _HEADER.size + _CRC.size
_COMPRESSION_LEVEL = 3
_MAX_CIPHERS = 16


class Content(IntEnum):
    """What a frame holds."""

    ENTRY = 1
    SEGMENT = 2
    MANIFEST = 3
    SOFT_DELTA = 4
    SOFT_PART = 5
    SOFT_MANIFEST = 6
    PHRASE = 7
    REGION_LISTING = 8
    REGIONS_STATE = 9


class FrameCodec:
    """Packs and unpacks the frames of one namespace. Not thread-safe."""

    def __init__(self, keys: StoreKeys, ring: KeyRing | None = None) -> None:
        """With a ring, frames are encrypted and plain frames are refused; without one, encrypted frames are refused."""
        self._ring = ring
        self._place = f"{keys.fingerprint}:{keys.namespace}"
        self._ciphers: dict[int, NamespaceCipher] = {}

    def pack(self, content: Content, body: bytes) -> bytes:
        """Deterministic: equal bodies give equal frames."""
        payload = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_content_size=True).compress(body)
        if self._ring is None:
            header = _HEADER.pack(MAGIC, VERSION, content, 0, 0, len(body), len(payload), 0)
        else:
            key_id = self._ring.newest
            size = len(payload) + SEAL_BYTES
            header = _HEADER.pack(MAGIC, VERSION, content, 1, 0, len(body), size, key_id)
            payload = self._cipher(key_id).encrypt(payload, self._bound(header))
        return header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload

    def unpack(self, content: Content, frame: bytes, max_body_bytes: int) -> bytes:
        """The body of a frame. Raises FormatError, also where the frame does not hold `content`."""
        if len(frame) < FRAME_OVERHEAD:
            raise FormatError("garbage", f"a frame has {len(frame)} bytes; its header takes {FRAME_OVERHEAD}")
        header = frame[: _HEADER.size]
        magic, version, found, encrypted, zero, raw_size, payload_size, key_id = _HEADER.unpack(header)
        if magic != MAGIC:
            raise FormatError("garbage", f"a frame begins with {magic!r}; it must begin with {MAGIC!r}")
        payload = frame[FRAME_OVERHEAD:]
        (checksum,) = _CRC.unpack_from(frame, _HEADER.size)
        if zlib.crc32(payload, zlib.crc32(header)) != checksum:
            raise FormatError("garbage", "a frame's checksum does not fit its bytes")
        if version != VERSION:
            reason: FormatFault = "newer" if version > VERSION else "garbage"
            raise FormatError(reason, f"a frame has format version {version}; this side reads {VERSION}")
        if found != content or zero != 0 or encrypted > 1:
            raise FormatError("garbage", f"a frame holds content {found}, flags {encrypted}; expected {content.name}")
        if raw_size > max_body_bytes:
            raise FormatError("oversize", f"a frame's body takes {raw_size} bytes; the limit is {max_body_bytes}")
        if payload_size != len(payload):
            raise FormatError("garbage", f"a frame's payload has {len(payload)} bytes; its header says {payload_size}")
        if encrypted and self._ring is None:
            raise FormatError("newer", f"a frame is encrypted with key {key_id}; this side has no keys")
        if not encrypted and self._ring is not None:
            raise FormatError("key", "a frame is not encrypted; this side has keys and takes no other")
        if encrypted:
            payload = self._cipher(key_id).decrypt(payload, self._bound(header))
        return _expand(payload, raw_size)

    def unpack_named(self, content: Content, digest: str, frame: bytes, max_body_bytes: int) -> bytes:
        """`unpack` after checking the frame's SHA-256. Raises FormatError."""
        if digest_of(frame) != digest:
            raise FormatError("garbage", f"segment {digest[:12]} has other bytes than its name says")
        return self.unpack(content, frame, max_body_bytes)

    def _bound(self, header: bytes) -> bytes:
        return header + self._place.encode()

    def _cipher(self, key_id: int) -> NamespaceCipher:
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            assert self._ring is not None
            cipher = self._ring.cipher(key_id, self._place)
            if len(self._ciphers) >= _MAX_CIPHERS:
                self._ciphers.clear()
            self._ciphers[key_id] = cipher
        return cipher


def digest_of(frame: bytes) -> str:
    """SHA-256 in 64 hex digits; names a segment."""
    return hashlib.sha256(frame).hexdigest()


def _expand(compressed: bytes, size: int) -> bytes:
    try:
        # zstandard allocates the size that the data state, whatever limit it is given; so check it first.
        stated = zstandard.frame_content_size(compressed)
        if stated != size:
            raise FormatError("garbage", f"compressed data say {stated} bytes; the frame's header says {size}")
        body = zstandard.ZstdDecompressor().decompress(compressed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("garbage", f"compressed data cannot be expanded: {error}") from None
    if len(body) != size:
        raise FormatError("garbage", f"compressed data hold {len(body)} bytes; they say {size}")
    return body
