"""Feeds damaged entries, segments, manifests, soft counts and phrases of the gate to their decoders, guided by
coverage, until one does not refuse them.

    pip install atheris; python tests/fuzz/fuzz_cache_formats.py -max_total_time=60

Only FormatError may come out. The checksum is made to fit, since nothing would get past it otherwise.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import zlib

import atheris
import numpy as np

with atheris.instrument_imports(include=["cache_service"]):
    from cache_service.counts import soft_ngram
    from cache_service.counts.soft_codec import (
        Delta,
        SoftManifest,
        decode_delta,
        decode_part,
        encode_delta,
        encode_part,
    )
    from cache_service.counts.soft_ngram import ENTRY_BYTES, Entries
    from cache_service.errors import FormatError
    from cache_service.formats.documents import Piece
    from cache_service.formats.entry_codec import decode_entry, encode_entry
    from cache_service.formats.frame import FRAME_OVERHEAD, Content, FrameCodec, digest_of
    from cache_service.formats.manifest import Generation, Manifest
    from cache_service.formats.piece_codec import decode_pieces, encode_pieces
    from cache_service.formats.segment import decode_segment
    from cache_service.formats.store_keys import StoreKeys
    from cache_service.promotion.candidate_codec import decode_candidate, encode_candidate

CODEC = FrameCodec(StoreKeys("fuzz", "fuzz"))
PIECES = [Piece(bytes(16), 3, np.arange(20, dtype=np.int32)), Piece(b"x" * 16, 0, np.array([7], np.int32))]
ORDER = 2
# Two contexts with two successors each. A table would compile what atheris has instrumented.
COUNTS = Entries(
    np.array([5, 9], np.uint64),
    np.tile(np.array([[3, 4, -1, -1, -1, -1, -1, -1]], np.int32), (2, 1)),
    np.tile(np.array([[900, 300, 0, 0, 0, 0, 0, 0]], np.uint16), (2, 1)),
    np.array([[2048, 0], [2048, 1]], np.uint16),
)
SEEDS = [
    encode_entry(CODEC, PIECES),
    Manifest("e", 1, 1, generations=(Generation(0, 0),)).encode(CODEC),
    encode_pieces(PIECES),
    encode_delta(CODEC, ORDER, Delta(bytes(16), "e", COUNTS)),
    encode_part(CODEC, ORDER, COUNTS)[1],
    SoftManifest("e", 1, 1).encode(CODEC),
    encode_candidate(CODEC, (1, 2, 3), 7),
]


def frame_of(content: Content, data: bytes) -> bytes:
    """`data` as a frame that says it holds `content`, with a checksum that fits."""
    if len(data) < FRAME_OVERHEAD:
        return data
    header, payload = data[:5] + bytes([content]) + data[6 : FRAME_OVERHEAD - 4], data[FRAME_OVERHEAD:]
    return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload


def frame_of_counts(data: bytes) -> bytes:
    """A part of as many contexts as `data` has bytes for, with a checksum of theirs that fits, too."""
    count = len(data) // ENTRY_BYTES
    body = data[: count * ENTRY_BYTES]
    header = soft_ngram._HEADER.pack(soft_ngram._MAGIC, soft_ngram._VERSION, ORDER, count, zlib.crc32(body))
    return CODEC.pack(Content.SOFT_PART, b"\1" + header + body)


def decode_everything(data: bytes) -> None:
    segment, part = frame_of(Content.SEGMENT, data), frame_of(Content.SOFT_PART, data)
    counts = frame_of_counts(data)
    for decode in (
        lambda: decode_entry(CODEC, frame_of(Content.ENTRY, data)),
        lambda: decode_segment(CODEC, digest_of(segment), segment).pieces(),
        lambda: Manifest.decode(CODEC, frame_of(Content.MANIFEST, data)),
        lambda: decode_entry(CODEC, CODEC.pack(Content.ENTRY, data)),
        lambda: Manifest.decode(CODEC, CODEC.pack(Content.MANIFEST, data)),
        lambda: decode_pieces(data, 1000, 1000).pieces(),
        lambda: decode_delta(CODEC, ORDER, frame_of(Content.SOFT_DELTA, data)),
        lambda: decode_part(CODEC, ORDER, digest_of(part), part),
        lambda: decode_part(CODEC, ORDER, digest_of(counts), counts),
        lambda: SoftManifest.decode(CODEC, frame_of(Content.SOFT_MANIFEST, data)),
        lambda: decode_candidate(CODEC, frame_of(Content.PHRASE, data)),
        lambda: decode_delta(CODEC, ORDER, CODEC.pack(Content.SOFT_DELTA, data)),
        lambda: SoftManifest.decode(CODEC, CODEC.pack(Content.SOFT_MANIFEST, data)),
        lambda: decode_candidate(CODEC, CODEC.pack(Content.PHRASE, data)),
    ):
        with contextlib.suppress(FormatError):
            decode()


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Now and then from a whole seed, so that the fuzzer need not invent one."""
    start = SEEDS[seed % len(SEEDS)] if seed % 16 == 0 else data
    return atheris.Mutate(start, max_size)


if __name__ == "__main__":
    atheris.Setup(sys.argv, decode_everything, custom_mutator=mutate)
    atheris.Fuzz()
