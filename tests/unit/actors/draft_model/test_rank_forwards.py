"""What the ranks of a draft model are told of a forward arrives as it was."""

import msgspec
import numpy as np
import pytest

from actors.draft_model.rank_forwards import _Forward, decode_forward, encode_forward
from actors.engine.arena import Part
from actors.engine.batch import PackedBatch


def batch(rows: int) -> PackedBatch:
    """Of one sequence; int32 but for token ids, positions, slots and ancestors."""
    longs, ints = np.arange(rows, dtype=np.int64), np.arange(rows, dtype=np.int32)
    tables = np.arange(6, dtype=np.int32).reshape(1, 6)
    return PackedBatch(
        4, longs, longs + 1, longs[::-1], ints[:2], ints[:1], ints[:1], tables[:, ::2], ints, longs[:, None],
        np.zeros((1, 64), np.int32), rows,
    )  # fmt: skip


def equal(sent, found) -> bool:
    if isinstance(sent, np.ndarray):
        is_same = (sent.dtype, sent.shape) == (found.dtype, found.shape) and np.array_equal(sent, found)
        return is_same and found.flags.writeable and found.flags.c_contiguous
    if isinstance(sent, (list, tuple)):
        return len(sent) == len(found) and all(map(equal, sent, found))
    return sent == found and type(sent) is type(found)


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_arrays_arrive_with_their_types_and_shapes_and_may_be_written(rows):
    words = np.zeros(3, np.dtype([("seed", np.int64), ("share", np.float64)])).view(np.int64)
    more = [Part(words, (16,), -1, np.zeros(0, np.int64)), Part(np.ones((2, 0), np.float32), (2, 0))]
    key = (8, (4, True), "logits", None, ())
    moves = [np.zeros((2, 0), np.int64), np.arange(6).reshape(2, 3)]
    sent = _Forward(moves, batch(rows), np.zeros(0, np.int64), 32, more, key, True)
    found = decode_forward(encode_forward(sent))
    assert equal(sent, found)
    assert isinstance(found.batch, PackedBatch)
    assert isinstance(found.more[0], Part)
    assert found.key == key
    assert hash(found.key) == hash(key)


@pytest.mark.parametrize("array", [np.array([None]), np.zeros(1, [("a", "<i8")]), np.array(["a"])])
def test_arrays_of_other_types_are_not_told(array):
    with pytest.raises(TypeError, match="cannot be told"):
        encode_forward(_Forward([array], batch(1), array))


def test_what_is_no_forward_is_not_read():
    with pytest.raises(msgspec.ValidationError):
        decode_forward(msgspec.msgpack.encode([1, 2]))
