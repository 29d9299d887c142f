"""Soft counts as bytes of the shared cache: round trips, damage, and which parts are written anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cache_service.counts import soft_codec
from cache_service.counts.soft_codec import (
    Delta,
    SoftManifest,
    SoftPart,
    area_of,
    decode_delta,
    decode_part,
    encode_delta,
    encode_part,
)
from cache_service.counts.soft_compactor import SoftCompactorSettings
from cache_service.counts.soft_exchange import SoftExchangeSettings
from cache_service.counts.soft_ngram import SoftNgramTable
from cache_service.errors import FormatError, SettingError
from cache_service.formats.frame import Content, FrameCodec, digest_of
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.store_keys import StoreKeys

KEYS = StoreKeys("model", "tenant")
PLAIN, SEALED = FrameCodec(KEYS), FrameCodec(KEYS, KeyRing({1: b"k" * 32}))
ORIGIN = bytes(range(16))


def learnt(seed=0, rows=20, order=3):
    rng = np.random.default_rng(seed)
    table = SoftNgramTable(64 * 1024, order)
    probs = rng.dirichlet(np.ones(4), rows).astype(np.float32)
    table.learn(rng.integers(0, 50, (rows, 4)), rng.integers(0, 1000, (rows, 4)), probs)
    return table.entries()


def same(left, right):
    return all((one == other).all() for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("codec", [PLAIN, SEALED], ids=["plain", "encrypted"])
def test_deltas_and_parts_come_back_as_they_were(codec):
    entries = learnt()
    delta = decode_delta(codec, 3, encode_delta(codec, 3, Delta(ORIGIN, "epoch", entries)))
    assert (delta.origin, delta.epoch) == (ORIGIN, "epoch")
    assert same(delta.entries, entries)
    part, frame = encode_part(codec, 3, entries)
    assert (part.num_contexts, part.num_bytes) == (len(entries.keys), len(frame))
    assert same(decode_part(codec, 3, part.digest, frame), entries)
    assert (part, frame) == encode_part(codec, 3, entries), "equal counts have one name"


def test_another_order_content_or_name_is_refused():
    entries = learnt()
    delta, (part, frame) = encode_delta(PLAIN, 3, Delta(ORIGIN, "e", entries)), encode_part(PLAIN, 3, entries)
    for read in (
        lambda: decode_delta(PLAIN, 2, delta),
        lambda: decode_delta(PLAIN, 3, frame),
        lambda: decode_part(PLAIN, 3, part.digest, delta),
        lambda: decode_part(PLAIN, 3, encode_part(PLAIN, 3, learnt(1))[0].digest, frame),
        lambda: decode_delta(FrameCodec(StoreKeys("model", "other"), SEALED._ring), 3, delta),
    ):
        with pytest.raises(FormatError):
            read()


def test_what_is_too_large_is_refused(monkeypatch):
    entries = learnt()
    monkeypatch.setattr(soft_codec, "MAX_DELTA_CONTEXTS", 3)
    monkeypatch.setattr(soft_codec, "MAX_PART_CONTEXTS", 3)
    for write in (lambda: encode_delta(PLAIN, 3, Delta(ORIGIN, "e", entries)), lambda: encode_part(PLAIN, 3, entries)):
        with pytest.raises(FormatError, match="3") as raised:
            write()
        assert raised.value.reason == "oversize"


@given(data=st.data())
def test_damaged_bodies_are_refused_and_nothing_else_happens(data):
    body = PLAIN.unpack(Content.SOFT_DELTA, encode_delta(PLAIN, 3, Delta(ORIGIN, "e", learnt())), 2**20)
    position = data.draw(st.integers(0, len(body) - 1))
    damaged = data.draw(
        st.sampled_from(
            [
                body[:position],
                body + b"x",
                body[:position] + bytes([body[position] ^ 1 << position % 8]) + body[position + 1 :],
            ]
        )
    )
    try:
        delta = decode_delta(PLAIN, 3, PLAIN.pack(Content.SOFT_DELTA, damaged))
    except FormatError:
        return
    # Only origin and epoch are free to be anything.
    assert same(delta.entries, learnt())
    assert position <= 18


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(body):
    for content, read in (
        (Content.SOFT_DELTA, decode_delta),
        (Content.SOFT_PART, lambda codec, order, frame: decode_part(codec, order, digest_of(frame), frame)),
    ):
        with pytest.raises(FormatError):
            read(PLAIN, 3, PLAIN.pack(content, body))
    with pytest.raises(FormatError):
        SoftManifest.decode(PLAIN, PLAIN.pack(Content.SOFT_MANIFEST, body))


def test_a_later_format_is_told_from_garbage():
    later = PLAIN.pack(Content.SOFT_DELTA, b"\x02" + b"whatever comes")
    with pytest.raises(FormatError) as raised:
        decode_delta(PLAIN, 3, later)
    assert raised.value.reason == "newer"


def test_manifests_come_back_as_they_were():
    manifest = SoftManifest("e", 3, 2, "7-1", parts=(SoftPart("a" * 64, 5, 9),))
    assert SoftManifest.decode(PLAIN, manifest.encode(PLAIN)) == manifest
    later = SoftManifest("e", 3, 2, "7-1", format_version=2)
    with pytest.raises(FormatError) as raised:
        SoftManifest.decode(PLAIN, later.encode(PLAIN))
    assert raised.value.reason == "newer"


def test_areas_have_keys_of_their_own_and_one_epoch():
    keys = StoreKeys("fp", "ns").beside(area_of(3))
    assert (keys.log, keys.segment("a")) == ("sd:{fp:ns}:soft-3:log", "sd:{fp:ns}:soft-3:segment:a")
    assert keys.epoch == StoreKeys("fp", "ns").epoch == "sd:{fp:ns}:epoch"
    with pytest.raises(SettingError, match="area"):
        keys.beside("a}b")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (lambda: SoftExchangeSettings(order=5), "order"),
        (lambda: SoftExchangeSettings(tick_s=0), "tick_s"),
        (lambda: SoftExchangeSettings(max_namespaces=0), "max_namespaces"),
        (lambda: SoftCompactorSettings(max_contexts=1), "max_contexts"),
        (lambda: SoftCompactorSettings(fold_entries=0), "fold_entries"),
    ],
)
def test_settings_out_of_range_are_named(settings, field):
    with pytest.raises(ValidationError, match=field):
        settings()
