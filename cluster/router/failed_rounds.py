"""Rounds that fail as a whole: the sequence at fault is found by running suspects alone.

A sequence whose rounds fail twice in a row is isolated: it runs alone, without drafts, until it gets further than ever
before. If two more of its rounds fail, its request fails. Meanwhile the other sequences have every second round.
"""

from __future__ import annotations

from cluster.router.round import Round
from cluster.router.sequence import Sequence

_ISOLATED_AFTER = 2  # consecutive failed rounds
GIVEN_UP_AFTER = 4  # consecutive failed rounds, the last of them alone
_DRAFTLESS_ROUNDS = 8  # after failed rounds or a lack of KV blocks


def suspend_drafts(sequence: Sequence, round_id: int) -> None:
    sequence.drafts.from_round = round_id + _DRAFTLESS_ROUNDS


def sequences_in_turn(running: list[Sequence], round_id: int) -> list[Sequence]:
    """The sequences of the next round: all; or alternately the oldest isolated one and all that are not isolated."""
    isolated_sequences = [sequence for sequence in running if sequence.target.num_failed_rounds >= _ISOLATED_AFTER]
    if not isolated_sequences:
        return running
    others = [sequence for sequence in running if sequence.target.num_failed_rounds < _ISOLATED_AFTER]
    return others if others and round_id % 2 else isolated_sequences[:1]


def count_failed_round(round: Round) -> list[Sequence]:
    """Count the failure for each sequence of the round. Returns the sequences whose requests are given up."""
    given_up = []
    for entry in round.entries:
        sequence = entry.sequence
        sequence.target.num_failed_rounds += 1
        if sequence.target.num_failed_rounds >= _ISOLATED_AFTER:
            suspend_drafts(sequence, round.round_id)
        has_ended = sequence.progress.is_ended or sequence.progress.is_cancelled
        if sequence.target.num_failed_rounds >= GIVEN_UP_AFTER and not has_ended:
            given_up.append(sequence)
    return given_up
