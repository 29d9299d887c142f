"""Predicted output: the caller's guess of the answer is drafted, and found again after every place where it is wrong.

For edits of known text: code with a name changed, a document with a sentence added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree
from actors.drafters.contract import DraftContext, Outcome

# Chance that the prediction goes on to be right after so many tokens in a row that were (index 0: the answer has just
# left it, or not begun); the planner calibrates it online.
_ACCEPTANCE = np.array([0.45, 0.60, 0.75, 0.82, 0.87, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97], np.float32)
_LONGEST_MATCH = 16  # tokens that are compared to find the place again
_FLOOR = 0.02


@dataclass(slots=True)
class _Place:
    """Where an answer is in its prediction."""

    num_seen: int = 0  # tokens of the sequence that have been followed
    next: int = 0  # the predicted token that comes next if nothing changes
    length: int = 0  # tokens in a row that were as predicted


class PredictionDrafter:
    """Drafts what follows in the request's own prediction; nothing for requests without one."""

    name = "prediction"

    def __init__(self, *, floor: float = _FLOOR) -> None:
        self._floor = floor
        self._places: dict[int, _Place] = {}
        sample = _read_only(np.array([1, 2, 1], np.int32))
        _follow(sample, 0, sample, 0, 0)
        _draft(sample, 0, 0, 2, _ACCEPTANCE, 0.0)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._propose_one(context) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the next proposal brings the emitted tokens."""

    def forget(self, seq_id: int) -> None:
        self._places.pop(seq_id, None)

    def memory_bytes(self) -> int:
        return 64 * len(self._places)  # predictions belong to their requests

    def _propose_one(self, context: DraftContext) -> DraftTree:
        predicted = _read_only(context.prediction)
        if not len(predicted) or context.max_nodes < 1:
            return DraftTree.empty()
        place = self._places.get(context.seq_id)
        if place is None or place.num_seen > len(context.tokens) or context.start == 0:
            place = self._places[context.seq_id] = _Place(context.num_prompt_tokens)
        output = _read_only(context.tokens[context.num_prompt_tokens :])
        seen = place.num_seen - context.num_prompt_tokens
        place.next, place.length = _follow(output, seen, predicted, place.next, place.length)
        place.num_seen = len(context.tokens)
        found = _draft(predicted, place.next, place.length, context.max_nodes, _ACCEPTANCE, self._floor)
        return DraftTree(*found) if len(found[0]) else DraftTree.empty()


create_drafter = PredictionDrafter


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view of one kind, so that the kernels are compiled once."""
    view = array.view()
    view.flags.writeable = False
    return view


@njit(cache=True, nogil=True)
def _follow(output, seen, predicted, place, length):  # type: ignore[no-untyped-def]
    """Go through output[seen:]: (next predicted token, tokens in a row that were as predicted)."""
    for position in range(seen, len(output)):
        if place < len(predicted) and predicted[place] == output[position]:
            place += 1
            length += 1
            continue
        # The longest run of the last tokens that occurs; of equal ones the nearest, rather ahead than behind.
        best, best_distance, best_end = 0, 0, place
        for end in range(len(predicted)):
            if predicted[end] != output[position]:
                continue
            run = 1
            while run < _LONGEST_MATCH and run <= end and run <= position:
                if predicted[end - run] != output[position - run]:
                    break
                run += 1
            distance = end - place if end >= place else 2 * (place - end)
            if run > best or (run == best and distance < best_distance):
                best, best_distance, best_end = run, distance, end + 1
        if best > 1 or (best == 1 and best_distance <= _LONGEST_MATCH):
            place = best_end
        length = best if place == best_end else 0
        if best == 0:
            length = 0
    return place, length


@njit(cache=True, nogil=True)
def _draft(predicted, place, length, max_nodes, acceptance, floor):  # type: ignore[no-untyped-def]
    """What follows the place; off the path also what follows a token later, as if one had been replaced."""
    token_ids = np.empty(max_nodes, np.int32)
    parents = np.empty(max_nodes, np.int32)
    confidence = np.empty(max_nodes, np.float32)
    count = 0
    num_chains = 2 if length == 0 and place > 0 else 1
    for skipped in range(num_chains):
        sure = 1.0 / num_chains
        parent = -1
        # One place is left for the second chain's first token.
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
