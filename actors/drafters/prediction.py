"""Predicted output: drafts the caller's guess of the answer, and finds the place again wherever the guess is wrong.

For edits of known text: code with a changed name, a document with an added sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.messages import GenerationRequest
from cache_service.splitmix64 import hash_pair

# Probability that the next predicted token is right, by the number of right tokens before it (index 0: after a mismatch
# or at the start). The planner calibrates it online.
_ACCEPTANCE = np.array([0.45, 0.60, 0.75, 0.82, 0.87, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97], np.float32)
_LONGEST_MATCH = 16  # limit of tokens that are compared to find the place again
_NEARBY = 16  # distance from the place within which one equal token is enough
_MOST_PLACES = 64  # limit of compared places with the same last two tokens
_MOST_FOLLOWED = 1024  # limit of tokens followed at once; earlier ones are assumed to be as predicted
_FLOOR = 0.02


@dataclass(slots=True)
class _Place:
    """Position of an answer in its prediction."""

    predicted: np.ndarray  # int32 [n], copied
    bigrams: np.ndarray  # uint64 [n - 1], from `_bigrams_of`
    num_seen: int  # tokens of the sequence that have been followed
    next: int = 0  # index of the next predicted token
    length: int = 0  # right predictions in a row

    @property
    def memory_bytes(self) -> int:
        return 64 + self.predicted.nbytes + self.bigrams.nbytes


class PredictionDrafter(CpuDrafter):
    """Drafts the next tokens of the request's prediction."""

    name = "prediction"

    def __init__(self, *, floor: Floor = _FLOOR) -> None:
        self._floor = float(floor)
        self._places: dict[int, _Place] = {}
        sample = np.array([1, 2, 1], np.int32)
        _follow(sample, 0, sample, _bigrams_of(sample), 0, 0)
        _draft(sample, 0, 0, 2, _ACCEPTANCE, 0.0)

    def may_draft_for(self, request: GenerationRequest) -> bool:
        return len(request.prediction_token_ids) > 0

    def forget(self, seq_id: int) -> None:
        self._places.pop(seq_id, None)

    def memory_bytes(self) -> int:
        return sum(place.memory_bytes for place in self._places.values())

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if not len(context.prediction) or context.max_nodes < 1:
            return DraftTree.empty()
        place = self._places.get(context.seq_id)
        if place is None or place.num_seen > len(context.tokens) or context.start == 0:
            # Copied, here and below: numba would compile another version for read-only arrays.
            predicted = np.array(context.prediction, np.int32)
            place = _Place(predicted, _bigrams_of(predicted), context.num_prompt_tokens)
            self._places[context.seq_id] = place
        self._catch_up(place, context)
        found = _draft(place.predicted, place.next, place.length, context.max_nodes, _ACCEPTANCE, self._floor)
        return DraftTree(*found) if len(found[0]) else DraftTree.empty()

    def _catch_up(self, place: _Place, context: DraftContext) -> None:
        size = len(context.tokens)
        skipped = max(0, size - place.num_seen - _MOST_FOLLOWED)
        if skipped:
            place.next, place.length = min(place.next + skipped, len(place.predicted)), 0
        first = place.num_seen + skipped
        begin = max(context.num_prompt_tokens, first - _LONGEST_MATCH)
        output = np.array(context.tokens[begin:], np.int32)
        place.next, place.length = _follow(
            output, first - begin, place.predicted, place.bigrams, place.next, place.length
        )
        place.num_seen = size


def _bigrams_of(predicted: np.ndarray) -> np.ndarray:
    """All bigrams, uint64 [n - 1], ascending: hash in the upper, index of the second token in the lower 32 bits."""
    return np.sort(_keys_of(predicted))


@njit(cache=True, nogil=True)
def _hash(before, token):  # type: ignore[no-untyped-def]
    """32-bit hash in the upper half of a uint64. Collisions are found when tokens are compared."""
    return (hash_pair(before, token) >> np.uint64(32)) << np.uint64(32)


@njit(cache=True, nogil=True)
def _keys_of(predicted):  # type: ignore[no-untyped-def]
    keys = np.empty(max(0, len(predicted) - 1), np.uint64)
    for end in range(1, len(predicted)):
        keys[end - 1] = _hash(predicted[end - 1], predicted[end]) | np.uint64(end)
    return keys


@njit(cache=True, nogil=True)
def _run(output, position, predicted, end):  # type: ignore[no-untyped-def]
    """Number of equal tokens up to output[position] and predicted[end], at most _LONGEST_MATCH."""
    run = 0
    while run < _LONGEST_MATCH and run <= end and run <= position:
        if predicted[end - run] != output[position - run]:
            break
        run += 1
    return run


@njit(cache=True, nogil=True)
def _distance(end, place):  # type: ignore[no-untyped-def]
    return end - place if end >= place else 2 * (place - end)


@njit(cache=True, nogil=True)
def _end(bigrams, at):  # type: ignore[no-untyped-def]
    return np.int64(bigrams[at] & np.uint64(0xFFFFFFFF))


@njit(cache=True, nogil=True)
def _find(output, position, predicted, bigrams, place):  # type: ignore[no-untyped-def]
    """The longest run of predicted tokens that ends as output[: position + 1]: (index of its last token, length or 0).

    Among equal lengths the nearest to `place`, where distances backwards count twice. Single tokens are searched only
    nearby, longer runs at the _MOST_PLACES nearest occurrences of their last two tokens.
    """
    best_end, best = place, 0
    for end in range(max(0, place - _NEARBY // 2), min(place + _NEARBY + 1, len(predicted))):
        run = _run(output, position, predicted, end)
        if run > best or (run == best and run > 0 and _distance(end, place) < _distance(best_end, place)):
            best_end, best = end, run
    if position == 0:
        return best_end, best
    pair = _hash(output[position - 1], output[position])
    ahead = np.searchsorted(bigrams, pair | np.uint64(place))
    behind = ahead - 1
    for _ in range(_MOST_PLACES):
        has_ahead = ahead < len(bigrams) and (bigrams[ahead] ^ pair) >> np.uint64(32) == 0
        has_behind = behind >= 0 and (bigrams[behind] ^ pair) >> np.uint64(32) == 0
        if not has_ahead and not has_behind:
            break
        if has_ahead and has_behind:
            has_ahead = _distance(_end(bigrams, ahead), place) <= _distance(_end(bigrams, behind), place)
        at = _end(bigrams, ahead if has_ahead else behind)
        if has_ahead:
            ahead += 1
        else:
            behind -= 1
        run = _run(output, position, predicted, at)
        if run > 1 and (run > best or (run == best and _distance(at, place) < _distance(best_end, place))):
            best_end, best = at, run
    return best_end, best


@njit(cache=True, nogil=True)
def _follow(output, seen, predicted, bigrams, place, length):  # type: ignore[no-untyped-def]
    """Follow output[seen:]. Returns the index of the next predicted token and the right predictions in a row."""
    for position in range(seen, len(output)):
        if place < len(predicted) and predicted[place] == output[position]:
            place += 1
            length += 1
            continue
        end, length = _find(output, position, predicted, bigrams, place)
        if length > 0:
            place = end + 1
    return place, length


@njit(cache=True, nogil=True)
def _draft(predicted, place, length, max_nodes, acceptance, floor):  # type: ignore[no-untyped-def]
    """The chain from `place`; after a mismatch also the chain one token later, as if one token was replaced."""
    token_ids = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    confidence = np.empty(max_nodes, np.float32)
    count = 0
    num_chains = 2 if length == 0 and place > 0 else 1
    for skipped in range(num_chains):
        sure = 1.0 / num_chains
        parent = -1
        # Leaves room for the second chain.
        room = max_nodes if skipped + 1 == num_chains else max(1, (max_nodes + 1) // 2)
        first = place + skipped
        if skipped and first < len(predicted) and count and predicted[first] == token_ids[0]:
            continue  # siblings are distinct
        index = first
        run = length
        while index < len(predicted) and count < room:
            sure *= acceptance[min(run, len(acceptance) - 1)]
            if sure < floor:
                break
            token_ids[count], parents[count], confidence[count] = predicted[index], parent, sure
            parent = count
            count += 1
            index += 1
            run += 1
    return token_ids[:count].copy(), parents[:count].copy(), confidence[:count].copy()
