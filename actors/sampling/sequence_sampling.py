"""Sampling state of one sequence: its parameters and, if they need them, counts of its tokens."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from actors.messages import SamplingParams
from actors.records import address_of, pointer
from actors.sampling.noise import signed_seed

# What penalties and bias make of the logit of a token
ADJUSTMENT = np.dtype([("token", "<i4"), ("divisor", "<f4"), ("subtrahend", "<f4"), ("bias", "<f4")])
SAMPLING = np.dtype(
    [
        ("seed", "<i8"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("presence", "<f8"),
        ("frequency", "<f8"),
        ("temperature", "<f4"),
        ("min_log_ratio", "<f4"),
        ("repetition", "<f4"),
        ("is_hot", "<i4"),
        ("uses_history", "<i8"),
        ("num_prompt_tokens", "<i8"),
        ("num_tokens", "<i8"),
        # For the distinct tokens that have a bias or have occurred:
        ("num_distinct", "<i8"),
        ("room", "<i8"),  # a power of two, or 0
        ("adjustments", "<i8"),  # address of `room` records of ADJUSTMENT, for a row without draft tokens
        ("counts", "<i8"),  # address of int32 [room]: how often each is in the output
        ("places", "<i8"),  # address of int32 [2 * room], hashed by token: its place in `adjustments` plus 1, 0: none
        ("changed", "<i8"),  # address of int32 [room]: places in `adjustments` of changes that are not in the table yet
        ("num_changed", "<i8"),  # more than `room`: all may have changed
        # The part of an `AdjustmentTable` that is the sequence's as long as the table has this number
        ("table", "<i8"),
        ("table_begin", "<i8"),
        ("table_room", "<i8"),
    ]
)
_FIRST_ROOM = 16


class SequenceSampling:
    """Parameters and counts as a record of `SAMPLING`, which compiled functions read at `address`.

    Takes O(new tokens) a round. Pass every committed token to `extend` once, prompt first.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises ValueError for a seed out of range."""
        self.params = params
        self.uses_history = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.adjusts = self.uses_history or bool(params.logit_bias)
        is_hot = not params.is_greedy
        self.is_plain = not (is_hot or self.adjusts)  # its tokens are the argmax of the raw logits
        self._record = np.zeros(1, SAMPLING)
        self.address = address_of(self._record)
        record = self._record[0]
        record["seed"] = signed_seed(params.seed)
        record["top_k"], record["top_p"] = params.top_k, params.top_p
        record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
        record["temperature"] = params.temperature if is_hot else 1.0
        record["min_log_ratio"] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        record["repetition"] = params.repetition_penalty
        record["is_hot"], record["uses_history"] = is_hot, self.uses_history
        record["num_prompt_tokens"] = num_prompt_tokens
        self._adjustments, self._counts = np.zeros(0, ADJUSTMENT), np.zeros(0, np.int32)
        for token, bias in params.logit_bias:
            self.make_room(1)
            _add_bias(self.address, token, bias)

    @property
    def num_tokens(self) -> int:
        return int(self._record["num_tokens"][0])

    def extend(self, token_ids: np.ndarray) -> None:
        """Count committed tokens, int [n], in order."""
        tokens = np.array(token_ids, np.int32)
        while len(tokens):
            tokens = tokens[count_tokens(self.address, tokens) :]
            if len(tokens):
                self.make_room(1)

    def make_room(self, count: int) -> None:
        """Let `count` further distinct tokens be counted."""
        record = self._record[0]
        needed = int(record["num_distinct"]) + count
        if needed <= record["room"]:
            return
        room = max(_FIRST_ROOM, 1 << (needed - 1).bit_length())
        adjustments, counts = np.zeros(room, ADJUSTMENT), np.zeros(room, np.int32)
        adjustments[: len(self._adjustments)], counts[: len(self._counts)] = self._adjustments, self._counts
        self._adjustments, self._counts, self._places = adjustments, counts, np.zeros(2 * room, np.int32)
        self._changed = np.empty(room, np.int32)
        record["room"], record["changed"], record["num_changed"] = room, address_of(self._changed), room + 1
        record["adjustments"], record["counts"] = address_of(adjustments), address_of(counts)
        record["places"] = address_of(self._places)
        _hash_again(self.address)


@njit(cache=True, nogil=True)
def sampling_at(address):  # type: ignore[no-untyped-def]
    """The record, as an array of one, and the arrays of its tokens: `adjustments`, `counts` and `places`."""
    one = carray(pointer(address), 1, SAMPLING)
    record = one[0]
    return (
        one,
        carray(pointer(record.adjustments), record.room, ADJUSTMENT),
        carray(pointer(record.counts), record.room, np.int32),
        carray(pointer(record.places), 2 * record.room, np.int32),
    )


@njit(cache=True, nogil=True)
def find_token(adjustments, places, token):  # type: ignore[no-untyped-def]
    """Where a token is in `adjustments`, and where in `places` that is kept; -1 for a token that is not there."""
    if len(places) == 0:
        return -1, -1
    at = (np.int64(token) * 0x9E3779B1 >> 7) & (len(places) - 1)
    while places[at] and adjustments[places[at] - 1].token != token:
        at = (at + 1) & (len(places) - 1)
    return places[at] - 1, at


@njit(cache=True, nogil=True)
def subtrahend(record, count):  # type: ignore[no-untyped-def]
    """What presence and frequency penalties subtract from a token that is `count` times in the output."""
    return np.float32(record.presence * (1.0 if count > 0 else 0.0) + record.frequency * np.float64(count))


@njit(cache=True, nogil=True)
def _add(record, adjustments, places, token, at):  # type: ignore[no-untyped-def]
    """The place of a token that was not there."""
    place = record.num_distinct
    record.num_distinct += 1
    places[at] = place + 1
    new = adjustments[place]
    new.token, new.divisor, new.subtrahend, new.bias = token, 1.0, subtrahend(record, 0), 0.0
    return place


@njit(cache=True, nogil=True)
def _hash_again(address):  # type: ignore[no-untyped-def]
    one, adjustments, _, places = sampling_at(address)
    for place in range(one[0].num_distinct):
        _, at = find_token(adjustments, places, adjustments[place].token)
        places[at] = place + 1


@njit(cache=True, nogil=True)
def _add_bias(address, token, bias):  # type: ignore[no-untyped-def]
    one, adjustments, _, places = sampling_at(address)
    place, at = find_token(adjustments, places, token)
    if place < 0:
        place = _add(one[0], adjustments, places, token, at)
    adjustments[place].bias += np.float32(bias)


@njit(cache=True, nogil=True)
def count_tokens(address, tokens):  # type: ignore[no-untyped-def]
    """Count tokens, int32 [n]. Returns how many were counted: all, or those before a token without room."""
    one, adjustments, counts, places = sampling_at(address)
    record = one[0]
    changed = carray(pointer(record.changed), record.room, np.int32)
    if not record.uses_history:
        record.num_tokens += len(tokens)
        return len(tokens)
    for index in range(len(tokens)):
        place, at = find_token(adjustments, places, tokens[index])
        if place < 0:
            if record.num_distinct == record.room:
                return index
            place = _add(record, adjustments, places, tokens[index], at)
        adjustments[place].divisor = record.repetition
        if record.num_tokens >= record.num_prompt_tokens:
            counts[place] += 1
            adjustments[place].subtrahend = subtrahend(record, counts[place])
        if record.num_changed < record.room:
            changed[record.num_changed] = place
        record.num_changed = min(record.num_changed, record.room) + 1
        record.num_tokens += 1
    return len(tokens)
