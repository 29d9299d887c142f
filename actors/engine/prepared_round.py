"""Prepares a round that the router has sent ahead while the device computes the round before it.

Work that depends on the outcome of that round is left to compiled passes over all sequences (`next_round`), so that
little has to be done between the two rounds. No outcome is guessed, and no state changes before it is known, so a
prepared round that does not begin has nothing to undo.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from actors.engine.draft_trees import Trees
from actors.engine.draws import Emitted
from actors.engine.planned_round import PlannedRound
from actors.engine.round_items import ITEM
from actors.engine.sequence import Sequence
from actors.messages import VerifyAhead
from actors.round_ahead import Guesses, foresee, guesses_of, is_carried_out


class PreparedRound(NamedTuple):
    """A round sent ahead, for the A sequences that go on after the round before."""

    ahead: VerifyAhead
    before: PlannedRound  # the round whose outcome it waits for
    sequences: list[Sequence]
    places: np.ndarray  # int64 [A]: in `before`
    guesses: Guesses


class NextRound(NamedTuple):
    """Deltas and trees of a prepared round, made when the outcome of the round before is known."""

    items: np.ndarray  # ITEM [A]: the fields that a message sets
    tokens: np.ndarray  # int32: tokens of all deltas
    trees: Trees  # to verify


def prepare(ahead: VerifyAhead, before: PlannedRound) -> PreparedRound | None:
    """Prepare the round, which must be well-formed (`is_well_formed`). Returns None if no sequence goes on."""
    places = {before.sequences[place].seq_id: place for place in before.emitting.tolist()}
    finished = set(ahead.finished)
    asked = [item for item in ahead.items if item.seq_id in places and item.seq_id not in finished]
    if not asked:
        return None
    own = np.array([places[item.seq_id] for item in asked], np.int64)
    return PreparedRound(ahead, before, [before.sequences[place] for place in own.tolist()], own, guesses_of(asked))


def next_round(prepared: PreparedRound, emitted: Emitted) -> NextRound | None:
    """The round that follows this outcome of the round before; None if the target declines it."""
    before, places = prepared.before, prepared.places
    items = np.zeros(len(places), ITEM)
    tokens, ends = np.empty(len(places) + len(emitted.nodes), np.int32), np.empty(len(places) + 1, np.int64)
    _tell(before.items, *before.trees, emitted.nodes, emitted.ends, emitted.next_tokens, places, items, tokens, ends)
    tokens = tokens[: ends[-1]]
    found = foresee(prepared.guesses, tokens, ends, prepared.ahead)
    if not is_carried_out(prepared.ahead, found):
        return None
    items["num_nodes"] = found.offsets[1:] - found.offsets[:-1]
    return NextRound(items, tokens, Trees(found.tokens, found.parents, found.offsets))


@njit(cache=True, nogil=True)
def _tell(  # type: ignore[no-untyped-def]
    before, tree_tokens, tree_parents, offsets, nodes, ends, next_tokens, places, items, tokens, token_ends
):
    """Fill the deltas: their items, the tokens of all of them, and the offsets of each delta's tokens."""
    tree_of = np.cumsum(before["is_last"]) - 1  # among those that emit
    count = 0
    token_ends[0] = 0
    for index in range(len(places)):
        place = places[index]
        last, item, tree = before[place], items[index], tree_of[place]
        for at in range(ends[tree], ends[tree + 1]):
            tokens[count] = tree_tokens[offsets[place] + nodes[at]]
            count += 1
        tokens[count] = next_tokens[tree]
        count += 1
        token_ends[index + 1] = count
        item.sequence, item.start = last.sequence, last.start + last.num_tokens
        item.num_tokens, item.max_rows = count - token_ends[index], 1
