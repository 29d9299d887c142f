"""What lies in Redis: pieces, frames, entries, segments, manifests; whole, damaged, forged and encrypted.

Covers also `cache_service.formats.folded_manifest`.
"""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.errors import FormatError, SettingError
from cache_service.formats.documents import Piece, assemble, split_pieces
from cache_service.formats.entry_codec import MAX_ENTRY_PIECES, MAX_ENTRY_TOKENS, decode_entry, encode_entry
from cache_service.formats.frame import FRAME_OVERHEAD, Content, FrameCodec
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.manifest import Generation, Manifest
from cache_service.formats.piece_codec import decode_pieces, encode_pieces
from cache_service.formats.segment import SegmentEntry, decode_segment, encode_segment
from cache_service.formats.store_keys import StoreKeys
from paceline_testing.cache_stores import contents, piece

KEYS = StoreKeys("model", "tenant")
RING = KeyRing({1: b"1" * 32, 2: b"2" * 32})
PLAIN, SEALED = FrameCodec(KEYS), FrameCodec(KEYS, RING)

codecs = st.sampled_from([PLAIN, SEALED])
pieces = st.builds(
    lambda document, offset, tokens, kind, time_s: Piece(document, offset, np.array(tokens, np.int32), kind, time_s),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**31 - 100),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
)
batches = st.lists(pieces, max_size=8)


def values(pieces):
    return [(p.document_id, p.offset, p.token_ids.tolist(), p.kind, p.time_s) for p in pieces]


def checked_again(frame):
    """The frame with a checksum that fits, as a forger would leave it."""
    header, payload = frame[: FRAME_OVERHEAD - 4], frame[FRAME_OVERHEAD:]
    return header + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header))) + payload


@given(codecs, batches)
def test_an_entry_gives_back_its_pieces(codec, batch):
    assert values(decode_entry(codec, encode_entry(codec, batch))) == values(batch)


@given(codecs, st.lists(pieces, min_size=1, max_size=8))
def test_a_segment_gives_back_its_pieces_and_is_named_by_its_bytes(codec, batch):
    segment, frame = encode_segment(codec, batch)
    assert values(decode_segment(codec, segment.digest, frame).pieces()) == values(batch)
    assert encode_segment(codec, batch) == (segment, frame)
    with pytest.raises(FormatError):
        decode_segment(codec, segment.digest, frame + b"\0")


@given(codecs, batches, st.data())
def test_a_changed_bit_is_noticed(codec, batch, data):
    frame = bytearray(encode_entry(codec, batch))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_entry(codec, bytes(frame))


@given(batches, st.data())
def test_a_forged_bit_is_noticed_under_encryption(batch, data):
    frame = bytearray(encode_entry(SEALED, batch))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    checksum = slice(FRAME_OVERHEAD - 4, FRAME_OVERHEAD)
    if bit // 8 not in range(checksum.start, checksum.stop):
        with pytest.raises(FormatError):
            decode_entry(SEALED, checked_again(bytes(frame)))


@given(codecs, batches, st.data())
def test_a_cut_or_longer_entry_is_noticed(codec, batch, data):
    frame = encode_entry(codec, batch)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for other in (cut, checked_again(cut) if len(cut) >= FRAME_OVERHEAD else b"", frame + b"\0"):
        with pytest.raises(FormatError):
            decode_entry(codec, other)


@given(codecs, st.binary(max_size=200))
def test_garbage_raises_one_kind_of_error(codec, garbage):
    for content in (garbage, b"PCLC\1\1" + garbage, checked_again(b"PCLC\1\1\0\0" + garbage + bytes(24))):
        with pytest.raises(FormatError):
            decode_entry(codec, content)
        with pytest.raises(FormatError):
            Manifest.decode(codec, content)


@given(st.binary(max_size=300), st.integers(0, 20), st.integers(0, 60))
@settings(max_examples=300)
def test_any_body_is_pieces_or_a_format_error(body, num_pieces, num_tokens):
    for candidate in (body, struct.pack("<II", num_pieces, num_tokens) + body.ljust(29 * num_pieces + 4 * num_tokens)):
        try:
            found = decode_pieces(candidate, 20, 60).pieces()
        except FormatError:
            continue
        assert values(decode_pieces(encode_pieces(found), 20, 60).pieces()) == values(found)


def test_counts_that_do_not_fit_the_bytes_are_refused_before_anything_is_made_of_them():
    body = bytearray(encode_pieces([piece("a", 0, [1, 2, 3])]))
    for place, value in ((0, 2**32 - 1), (4, 2**32 - 1), (0, 0), (4, 2), (8 + 16 + 4, 2**32 - 1), (8 + 16 + 4, 0)):
        forged = bytes(body[:place]) + struct.pack("<I", value) + bytes(body[place + 4 :])
        with pytest.raises(FormatError):
            decode_pieces(forged, 2**32, 2**32)


def test_a_negative_token_is_refused():
    body = encode_pieces([piece("a", 0, [7])])[:-4] + struct.pack("<i", -1)
    with pytest.raises(FormatError, match="-1"):
        decode_pieces(body, 10, 10)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"document_id": b"short"}, "16 bytes"),
        ({"offset": -1}, "at 0 or later"),
        ({"token_ids": np.array([], np.int32)}, "have a token"),
        ({"offset": 2**31 - 3}, str(2**31 - 1)),
        ({"kind": 256}, "255"),
        ({"time_s": 2**32}, str(2**32 - 1)),
    ],
)
def test_a_piece_that_has_no_room_is_refused_with_the_limit(fields, limit):
    with pytest.raises(FormatError, match=limit):
        encode_pieces([replace(piece("a", 0, [1, 2, 3]), **fields)])


@pytest.mark.parametrize("has_size", [True, False])
def test_a_decompression_bomb_is_not_expanded(has_size):
    if has_size:
        bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    else:
        made = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        bomb = made.compress(bytes(2**20)) + made.flush()
    header = struct.pack("<4sBBBBIII", b"PCLC", 1, Content.ENTRY, 0, 0, 100, len(bomb), 0)
    with pytest.raises(FormatError, match="say"):
        decode_entry(PLAIN, checked_again(header + bytes(4) + bomb))
    honest = struct.pack("<4sBBBBIII", b"PCLC", 1, Content.ENTRY, 0, 0, 2**28, len(bomb), 0)
    with pytest.raises(FormatError, match="limit"):
        decode_entry(PLAIN, checked_again(honest + bytes(4) + bomb))


def test_another_version_says_so():
    frame = bytearray(encode_entry(PLAIN, []))
    frame[4] = 9
    with pytest.raises(FormatError, match="checksum"):
        decode_entry(PLAIN, bytes(frame))
    with pytest.raises(FormatError, match="version 9") as raised:
        decode_entry(PLAIN, checked_again(bytes(frame)))
    assert raised.value.reason == "newer"


def test_an_entry_is_bounded():
    with pytest.raises(FormatError, match=str(MAX_ENTRY_TOKENS)):
        encode_entry(PLAIN, [piece("a", 0, np.zeros(MAX_ENTRY_TOKENS + 1))])
    with pytest.raises(FormatError, match=str(MAX_ENTRY_PIECES)):
        encode_entry(PLAIN, [piece("a", 0, [1])] * (MAX_ENTRY_PIECES + 1))


def test_an_older_key_still_opens_and_the_newest_encrypts():
    old = encode_entry(FrameCodec(KEYS, KeyRing({1: b"1" * 32})), [piece("a", 0, [1])])
    assert values(decode_entry(SEALED, old)) == values([piece("a", 0, [1])])
    new = encode_entry(SEALED, [piece("a", 0, [1])])
    with pytest.raises(FormatError, match="key 2") as raised:
        decode_entry(FrameCodec(KEYS, KeyRing({1: b"1" * 32})), new)
    assert raised.value.reason == "newer"


def test_what_an_erased_key_encrypted_is_gone():
    frame = encode_entry(FrameCodec(KEYS, KeyRing({1: b"1" * 32})), [piece("a", 0, [1])])
    with pytest.raises(FormatError, match="key 1") as raised:
        decode_entry(FrameCodec(KEYS, KeyRing({2: b"2" * 32})), frame)
    assert raised.value.reason == "key"


@pytest.mark.parametrize("keys", [StoreKeys("model", "other"), StoreKeys("other", "tenant")])
def test_another_namespace_cannot_open_it(keys):
    frame = encode_entry(SEALED, [piece("a", 0, [1])])
    with pytest.raises(FormatError) as raised:
        decode_entry(FrameCodec(keys, RING), frame)
    assert raised.value.reason == "key"


def test_an_entry_cannot_be_passed_off_as_a_segment():
    frame = bytearray(encode_entry(SEALED, [piece("a", 0, [1])]))
    frame[5] = Content.SEGMENT
    with pytest.raises(FormatError):
        SEALED.unpack(Content.SEGMENT, checked_again(bytes(frame)), 2**20)


def test_with_keys_nothing_unencrypted_is_taken_and_without_nothing_encrypted():
    for writer, reader, reason in ((PLAIN, SEALED, "key"), (SEALED, PLAIN, "newer")):
        with pytest.raises(FormatError) as raised:
            decode_entry(reader, encode_entry(writer, []))
        assert raised.value.reason == reason


def test_tokens_do_not_show_through_encryption():
    tokens = np.arange(1000, 1100)
    assert np.array(tokens, "<i4").tobytes()[:40] not in encode_entry(SEALED, [piece("a", 0, tokens)])


def test_a_key_ring_shows_no_secret_and_refuses_bad_ones():
    assert repr(RING) == "KeyRing(ids=[1, 2])"
    for secrets in ({}, {0: b"1" * 32}, {2**32: b"1" * 32}, {1: b"short"}):
        with pytest.raises(SettingError) as raised:
            KeyRing(secrets)
        assert "short" not in str(raised.value)


def manifest_of(*generations, **fields):
    return Manifest("epoch", 3, 2, generations=tuple(generations), **fields)


ENTRY = SegmentEntry("a" * 64, 10, 100, 5, 9)


@pytest.mark.parametrize("codec", [PLAIN, SEALED])
def test_a_manifest_gives_back_what_it_was_made_of(codec):
    manifest = manifest_of(Generation(4, 1, (ENTRY, ENTRY)), Generation(5, 2), folded_id="17-0", folded_generation=4)
    assert Manifest.decode(codec, manifest.encode(codec)) == manifest


@pytest.mark.parametrize(
    "manifest",
    [
        manifest_of(),
        manifest_of(Generation(2, 1), Generation(4, 1)),
        manifest_of(Generation(2, 1), folded_id="17"),
        manifest_of(Generation(2, 1), folded_id="-"),
        manifest_of(Generation(2, 1), folded_id="17-0\n"),
        manifest_of(Generation(-1, 1)),
        manifest_of(Generation(1, 1), format_version=2),
        manifest_of(Generation(1, 1, (SegmentEntry("../" * 21 + "a", 1, 1, 1, 1),))),
        manifest_of(Generation(1, 1, (SegmentEntry("a" * 64 + "\n", 1, 1, 1, 1),))),
        manifest_of(Generation(1, 1, (SegmentEntry("a" * 64, 2**40, 1, 1, 1),))),
        manifest_of(Generation(1, 1, (SegmentEntry("a" * 64, 1, 2**40, 1, 1),))),
        manifest_of(Generation("1", 1)),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(manifest):
    with pytest.raises(FormatError):
        Manifest.decode(PLAIN, manifest.encode(PLAIN))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"epoch": "e", "surplus": 1}'])
def test_a_manifest_must_be_json_of_its_form(body):
    with pytest.raises(FormatError):
        Manifest.decode(PLAIN, PLAIN.pack(Content.MANIFEST, body))


def test_a_manifest_of_a_later_format_is_known_as_one_whatever_its_fields():
    body = b'{"format_version": 2, "epoch": 7, "surplus": []}'
    with pytest.raises(FormatError, match="format 2") as raised:
        Manifest.decode(PLAIN, PLAIN.pack(Content.MANIFEST, body))
    assert raised.value.reason == "newer"


cuts = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=12)


@given(cuts, st.randoms())
def test_assembled_pieces_hold_every_token_once_in_any_order(cuts, random):
    text = {"a": list(range(100, 120)), "b": list(range(200, 220))}
    given = [piece(name, offset, text[name][offset : offset + length]) for name, offset, length in cuts]
    whole = contents(given)
    random.shuffle(given)
    assert contents(given + given) == whole
    wanted = {(name, place) for name, offset, length in cuts for place in range(offset, offset + length)}
    ids = {piece(name, 0, [1]).document_id: name for name in "ab"}
    found = [
        (ids[document], offset + row, token)
        for (document, _, offset), run in whole.items()
        for row, token in enumerate(run)
    ]
    assert {(name, place) for name, place, _ in found} == wanted
    assert len(found) == len(wanted)
    assert all(token == text[name][place] for name, place, token in found)


def test_pieces_of_other_kinds_stay_apart_and_gaps_stay_gaps():
    given = [piece("a", 0, [1, 2]), piece("a", 2, [3], kind=1), piece("a", 5, [4])]
    assert [(p.kind, p.offset, p.token_ids.tolist()) for p in assemble(given)] == [
        (0, 0, [1, 2]),
        (0, 5, [4]),
        (1, 2, [3]),
    ]


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 10), st.integers(1, 4))
def test_split_pieces_lose_nothing_and_keep_their_bounds(lengths, max_tokens, max_pieces):
    given = [piece(str(row), 3, range(length)) for row, length in enumerate(lengths)]
    batches = list(split_pieces(given, max_tokens, max_pieces))
    assert contents([p for batch in batches for p in batch]) == contents(given)
    assert all(sum(len(p.token_ids) for p in batch) <= max_tokens and len(batch) <= max_pieces for batch in batches)
    assert all(batches)
