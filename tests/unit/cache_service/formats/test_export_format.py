"""Formats of the cache's administration: what is written is what is read, and nothing else is."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.errors import FormatError, SettingError
from cache_service.formats.documents import Piece, content_id
from cache_service.formats.earnings import Earnings
from cache_service.formats.export_format import (
    ExportHeader,
    decode_header,
    decode_piece,
    encode_header,
    encode_piece,
    is_export,
)
from cache_service.formats.purged_times import LAST_S, PurgedTimes, TimeRange
from cache_service.formats.store_keys import StoreKeys, parse_key

HEADER = ExportHeader("model", "tokenizer", "open")
times = st.integers(0, LAST_S)
ranges = st.tuples(times, times).map(sorted).map(lambda pair: TimeRange(*pair))


@given(
    document_id=st.binary(min_size=16, max_size=16),
    offset=st.integers(0, 2**30),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30),
    kind=st.integers(0, 255),
    time_s=times,
    text=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_piece_is_a_line_that_is_read_back(document_id, offset, tokens, kind, time_s, text):
    piece = Piece(document_id, offset, np.array(tokens, np.int32), kind, time_s)
    line = encode_piece(piece, text)
    assert line.count(b"\n") == 1
    found = decode_piece(line)
    assert (found.document_id, found.offset, found.kind, found.time_s) == (document_id, offset, kind, time_s)
    assert (found.token_ids.tolist(), found.token_ids.dtype) == (tokens, np.int32)
    assert json.loads(line).get("text") == text


@given(
    st.binary() | st.text().map(str.encode) | st.from_regex(rb'\{"(document_id|token_ids|paceline_cache_export)":.*\}')
)
def test_nothing_makes_the_decoders_raise_anything_but_ours(line):
    for decode in (decode_header, decode_piece):
        with contextlib.suppress(FormatError):
            decode(line)
    assert is_export(line) in (True, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"document_id": "0" * 31}, {"document_id": "0" * 32 + "\n"}, {"document_id": "G" * 32}, {"token_ids": []},
        {"token_ids": [-1]}, {"token_ids": [2**31]}, {"token_ids": [1.5]}, {"token_ids": "1"}, {"offset": -1},
        {"offset": 2**31 - 1}, {"kind": 256}, {"time_s": 2**32}, {"time_s": None},
    ],
)  # fmt: skip
def test_a_line_with_a_wrong_value_is_refused(changes):
    row = {"document_id": "0" * 32, "offset": 0, "kind": 0, "time_s": 0, "token_ids": [1]}
    decode_piece(json.dumps(row).encode())
    with pytest.raises(FormatError):
        decode_piece(json.dumps({**row, **changes}).encode())


def test_an_export_is_known_by_its_first_line():
    line = encode_header(HEADER)
    assert decode_header(line) == HEADER
    assert is_export(line)
    assert not is_export(b'{"text": "paceline_cache_export"}')
    assert not is_export(line[:-5])
    with pytest.raises(FormatError, match="format 2") as raised:
        decode_header(b'{"paceline_cache_export": 2}')
    assert raised.value.reason == "newer"


def test_documents_of_equal_tokens_have_one_name():
    assert content_id(np.array([1, 2], np.int64)) == content_id(np.array([1, 2], np.int32))
    assert content_id(np.array([1, 2], np.int32)) != content_id(np.array([2, 1], np.int32))
    assert len(content_id(np.array([1], np.int32))) == 16


@given(st.lists(ranges, max_size=40), times)
def test_purged_times_are_kept_and_cover_what_any_of_them_does(purged, time_s):
    noted = PurgedTimes()
    for each in purged:
        noted = noted.and_also(each)
    assert PurgedTimes.decode(noted.encode()) == noted
    assert noted.covers(time_s) <= any(each.covers(time_s) for each in purged)
    if len(purged) <= 32:
        assert noted.covers(time_s) == any(each.covers(time_s) for each in purged)


@given(st.binary() | st.from_regex(rb"[0-9]{0,12}-[0-9]{0,12}( [0-9]{1,11}-[0-9]{1,11})*", fullmatch=True))
def test_purged_times_of_others_are_refused(text):
    try:
        found = PurgedTimes.decode(text)
    except ValueError:
        return
    assert PurgedTimes.decode(found.encode()) == found


@given(ranges, times, times)
def test_a_range_holds_and_meets_what_it_should(purged, one, other):
    first_s, last_s = sorted((one, other))
    assert purged.holds(first_s, last_s) == (purged.covers(first_s) and purged.covers(last_s))
    assert purged.meets(first_s, last_s) == (
        purged.covers(first_s) or purged.covers(last_s) or first_s <= purged.since_s <= last_s
    )


@pytest.mark.parametrize(("since_s", "until_s"), [(-1, 5), (5, 4), (0, 2**32)])
def test_ranges_name_what_is_wrong(since_s, until_s):
    with pytest.raises(SettingError, match=r"since_s|until_s"):
        TimeRange(since_s, until_s)


def test_keys_are_parsed_back():
    keys = StoreKeys("model", "open.docs")
    for kind in ("log", "segment:0f", "soft3:log"):
        assert parse_key(keys.key(kind).encode()) == (keys, kind)
    for foreign in (b"sd:model:log", b"other", b"sd:{a:b}", b"sd:{a:b:c}:log", b"sd:{a:b}:\xff"):
        assert parse_key(foreign) is None


def test_earnings_add_up():
    total = Earnings(4, 1, 10, 5) + Earnings(0, 0, 0, 5)
    assert total == Earnings(4, 1, 10, 10)
    assert (total.hit_rate, total.tokens_per_round) == (0.25, 1.0)
    assert (Earnings().hit_rate, Earnings().tokens_per_round) == (None, None)
