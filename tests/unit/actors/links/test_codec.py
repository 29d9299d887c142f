"""Frames: every message survives, and whatever else arrives ends in a FrameError and in nothing worse."""

import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from actors.draft_tree import DraftTree, TopProbs
from actors.errors import LinkError
from actors.links.codec import MAGIC, FrameError, pack, unpack
from actors.messages import (
    PROTOCOL_VERSION,
    DraftBatch,
    DraftItem,
    DraftResult,
    Failure,
    Hello,
    Message,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    Verdict,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)

HEADER = MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")

ids = st.integers(0, 2**63 - 1)
id_lists = st.lists(ids, max_size=3)
counts = st.integers(0, 2**31 - 1)
floats = st.floats(width=32)
int32s = npst.arrays(np.int32, st.integers(0, 20))
float32s = npst.arrays(np.float32, st.integers(0, 20))
samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=floats,
    top_k=counts,
    logit_bias=st.lists(st.tuples(counts, floats), max_size=3).map(tuple),
    acceptance=st.sampled_from(["coupled", "rejection"]),
)
starts = st.builds(SequenceStart, samplings, counts, st.text(max_size=8))
deltas = st.builds(SequenceDelta, ids, counts, int32s)
top_probs = st.none() | st.builds(TopProbs, int32s, float32s, counts)
methods = st.sampled_from(["tree", "lookahead"])
draft_items = st.builds(DraftItem, deltas, counts, st.none() | starts, counts, counts, methods, int32s, int32s)
trees = st.builds(DraftTree, int32s, int32s, float32s, top_probs)
verify_items = st.builds(VerifyItem, deltas, counts, st.none() | trees, st.none() | starts)
verdicts = st.builds(Verdict, ids, counts, counts, st.integers(-1, 2**31 - 1), int32s, counts)
messages = st.one_of(
    st.just(Hello()),
    st.builds(WorkerInfo, st.sampled_from(["target", "draft"]), ids, counts, counts, counts, counts),
    st.builds(Failure, ids, st.text(max_size=20)),
    st.builds(DraftBatch, ids, st.lists(draft_items, max_size=3), id_lists),
    st.builds(DraftResult, ids, id_lists, st.lists(trees, max_size=3), id_lists, floats),
    st.builds(VerifyBatch, ids, st.lists(verify_items, max_size=3), id_lists),
    st.builds(VerifyResult, ids, st.lists(verdicts, max_size=3), id_lists, elapsed_s=floats),
)


def survives(frame: bytes) -> Message | None:
    """The message of a frame or None; any error but FrameError fails the test."""
    try:
        return unpack(frame)
    except FrameError:
        return None


def contents(value: object) -> object:
    """A message as plain comparable values: arrays as (dtype, bytes), floats by their bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, msgspec.Struct):
        return type(value), [contents(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return np.float64(value).tobytes() if isinstance(value, float) else value


@given(messages)
def test_every_message_survives_the_wire_bit_for_bit(message: Message) -> None:
    assert contents(unpack(pack(message))) == contents(message)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_raise_only_frame_errors_behind_a_valid_header(data: bytes) -> None:
    assert survives(data) is None or data.startswith(HEADER)
    survives(HEADER + data)


@settings(max_examples=200)
@given(messages, st.data())
def test_a_frame_with_changed_bytes_raises_only_frame_errors(message: Message, data: st.DataObject) -> None:
    frame = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(frame))


@given(messages, st.data())
def test_a_frame_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    frame = pack(message)
    assert survives(frame[: data.draw(st.integers(0, len(frame) - 1))]) is None


@given(messages, st.binary(min_size=1, max_size=10))
def test_a_frame_with_a_tail_is_refused(message: Message, tail: bytes) -> None:
    assert survives(pack(message) + tail) is None


@settings(max_examples=200)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | st.builds(msgspec.msgpack.Ext, st.sampled_from([1, 2, 3, -1]), st.binary(max_size=9)),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=15,
    ),
    st.sampled_from(["hello", "info", "failure", "draft", "drafted", "verify", "verified"]),
)
def test_well_formed_msgpack_of_the_wrong_shape_raises_only_frame_errors(value: object, tag: str) -> None:
    fields = value if isinstance(value, list) else [value]
    survives(HEADER + msgspec.msgpack.encode([tag, *fields]))
    survives(HEADER + msgspec.msgpack.encode(value))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_an_array_whose_length_is_no_multiple_of_four_is_refused(length: int) -> None:
    array = msgspec.msgpack.Ext(1, b"x" * length)
    frame = HEADER + msgspec.msgpack.encode(["verify", 1, [[[7, 0, array], 4]]])
    with pytest.raises(FrameError) as caught:
        unpack(frame)
    assert caught.value.reason == "garbage"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x92\xa5hello" + b"\x91" * 200_000,  # a field that is skipped, nested without end
        b"\x93\xa5draft\x01\xdd\xff\xff\xff\xff",  # a list that says it has 4 billion items
        b"\x93\xa5draft\x01\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x93\xa7failure\x01\xdb\xff\xff\xff\xff",  # as much text
        b"\xdd\xff\xff\xff\xff\xa5hello",
        b"\x93\xa7failure\x01\xa2\xff\xfe",  # not UTF-8
        b"\xc1",
    ],
)
def test_hostile_payloads_are_refused_at_once(payload: bytes) -> None:
    started = time.perf_counter()
    assert survives(HEADER + payload) is None
    assert time.perf_counter() - started < 1.0


def test_another_protocol_version_is_named_as_such() -> None:
    frame = MAGIC + (PROTOCOL_VERSION + 1).to_bytes(2, "big") + pack(Hello())[len(HEADER) :]
    with pytest.raises(FrameError, match=f"version {PROTOCOL_VERSION + 1}") as caught:
        unpack(frame)
    assert caught.value.reason == "version"


def test_a_frame_over_the_limit_is_refused_on_both_sides_and_one_at_the_limit_is_not() -> None:
    message = Failure(1, "x" * 100)
    frame = pack(message)
    assert unpack(frame, max_bytes=len(frame)) == message
    assert pack(message, max_bytes=len(frame)) == frame
    for attempt in (lambda: unpack(frame, len(frame) - 1), lambda: pack(message, len(frame) - 1)):
        with pytest.raises(FrameError, match=f"limit is {len(frame) - 1}") as caught:
            attempt()
        assert caught.value.reason == "oversize"


@pytest.mark.parametrize(
    "message",
    [
        DraftBatch(1, [DraftItem(SequenceDelta(1, 0, np.zeros(2, np.int64)), 1)]),
        DraftBatch(1, [DraftItem(SequenceDelta(1, 0, np.zeros((2, 2), np.int32)), 1)]),
        Failure(2**70, "an integer that msgpack does not know"),
    ],
)
def test_a_message_that_is_not_part_of_the_protocol_cannot_be_packed(message: Message) -> None:
    with pytest.raises(FrameError) as caught:
        pack(message)
    assert caught.value.reason == "unencodable"
    assert isinstance(caught.value, LinkError)
