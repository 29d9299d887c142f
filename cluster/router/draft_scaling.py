"""Estimates how one draft worker more, or one fewer, would change this router's tokens a second."""

from __future__ import annotations

from actors.workers.demand import DraftDemand

_DECAY = 0.97  # factor on all sums with each round that asked, or each answer
_IDLE_S = 30.0  # after this time without a round that asked, the demand is 0
_PRIOR_WEIGHT = 0.05  # squared sequences; weight of the prior that a draft's time is proportional to its sequences
_MOST_LATE = 0.95  # limit of the late share when the worth of late drafts is estimated from those in time


class DraftScaling:
    """A round waits for its slowest worker, whose time grows linearly with its sequences; the line is fitted to the
    times that workers measure. With more workers each has fewer sequences: rounds wait less, and drafts that are late
    now come in time. The estimate compares a round's tokens a second with one worker more, one fewer, and as it is; a
    round that asks nobody is always possible."""

    def __init__(self) -> None:
        self._answers = 0.0
        self._sequences = 0.0
        self._elapsed_s = 0.0
        self._squares = 0.0
        self._products = 0.0
        self._awaited = 0.0
        self._late = 0.0
        self._rounds = 0.0
        self._round_sequences = 0.0
        self._tokens = 0.0
        self._gained = 0.0
        self._wait_s = 0.0
        self._plain_s = 0.0
        self._num_workers = 0
        self._asked_at = float("-inf")

    def observe_answer(self, num_sequences: int, elapsed_s: float) -> None:
        """A worker that a round waited for has answered; elapsed_s: the worker's own time."""
        self._awaited = self._awaited * _DECAY + 1.0
        self._late *= _DECAY
        if num_sequences < 1 or elapsed_s <= 0.0:
            return
        self._answers = self._answers * _DECAY + 1.0
        self._sequences = self._sequences * _DECAY + num_sequences
        self._elapsed_s = self._elapsed_s * _DECAY + elapsed_s
        self._squares = self._squares * _DECAY + num_sequences * num_sequences
        self._products = self._products * _DECAY + num_sequences * elapsed_s

    def observe_late(self) -> None:
        """A worker that a round waited for has not answered in time."""
        self._awaited = self._awaited * _DECAY + 1.0
        self._late = self._late * _DECAY + 1.0

    def observe_round(
        self, num_sequences: int, num_workers: int, tokens: int, gained: int, wait_s: float, plain_s: float, now: float
    ) -> None:
        """A round that asked num_workers workers to draft for num_sequences sequences.

        tokens: emitted; gained: those of them that only the draft model had proposed. wait_s: time spent waiting for
        drafts; plain_s: the rest of the round.
        """
        self._rounds = self._rounds * _DECAY + 1.0
        self._round_sequences = self._round_sequences * _DECAY + num_sequences
        self._tokens = self._tokens * _DECAY + tokens
        self._gained = self._gained * _DECAY + gained
        self._wait_s = self._wait_s * _DECAY + wait_s
        self._plain_s = self._plain_s * _DECAY + plain_s
        self._num_workers = num_workers
        self._asked_at = now

    def demand(self, now: float) -> DraftDemand:
        if now - self._asked_at > _IDLE_S or not self._num_workers or not self._tokens:
            return DraftDemand()
        late_share = self._late / self._awaited if self._awaited else 0.0
        plain_s = max(self._plain_s / self._rounds, 1e-9)
        wait_s = self._wait_s / self._rounds
        owed = self._gained / self._rounds
        others = self._tokens / self._rounds - owed
        sequences = self._round_sequences / self._rounds
        per_sequence_s = self._seconds_per_sequence()
        workers = self._num_workers
        without = others / plain_s

        def rate(num_workers: int, gained: float) -> float:
            if num_workers == 0:
                return without
            saved_s = per_sequence_s * (_most_each(sequences, workers) - _most_each(sequences, num_workers))
            return max(without, (others + gained) / (plain_s + max(0.0, wait_s - saved_s)))

        in_time = owed / (1.0 - min(late_share, _MOST_LATE)) if sequences > workers else owed
        present = rate(workers, owed)
        gain = rate(workers + 1, in_time) / present - 1.0
        loss = 1.0 - rate(workers - 1, owed) / present
        return DraftDemand(late_share, max(0.0, gain), max(0.0, loss))

    def _seconds_per_sequence(self) -> float:
        """A worker's additional time for one more sequence, between 0 and its mean time a sequence."""
        if not self._answers:
            return 0.0
        mean, mean_s = self._sequences / self._answers, self._elapsed_s / self._answers
        variance = max(0.0, self._squares / self._answers - mean * mean)
        covariance = self._products / self._answers - mean * mean_s
        proportional_s = mean_s / mean
        slope_s = (covariance + _PRIOR_WEIGHT * proportional_s) / (variance + _PRIOR_WEIGHT)
        return min(max(slope_s, 0.0), proportional_s)


def _most_each(sequences: float, num_workers: int) -> float:
    """Sequences of each worker, at least one."""
    return max(1.0, sequences / num_workers)
