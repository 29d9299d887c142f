"""Estimates how one draft worker more, or one fewer, would change this router's tokens a second."""

from __future__ import annotations

import numpy as np

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
        self.clear()

    def clear(self) -> None:
        """Drop what has been observed."""
        # Decayed sums, float64 each.
        self._answers = np.zeros(5)  # answers, their sequences, their seconds, sequences ** 2, sequences * seconds
        self._awaited = np.zeros(2)  # awaited answers, late ones
        # rounds, their sequences, tokens, gained tokens, seconds of waiting, of rows of drafts, of the rest
        self._rounds = np.zeros(7)
        self._num_workers = 0
        self._asked_at = float("-inf")

    def observe_answer(self, num_sequences: int, elapsed_s: float) -> None:
        """A worker that a round waited for has answered; elapsed_s: the worker's own time."""
        self._awaited = self._awaited * _DECAY + (1.0, 0.0)
        if num_sequences < 1 or elapsed_s <= 0.0:
            return
        products = num_sequences * num_sequences, num_sequences * elapsed_s
        self._answers = self._answers * _DECAY + (1.0, num_sequences, elapsed_s, *products)

    def observe_late(self) -> None:
        """A worker that a round waited for has not answered in time."""
        self._awaited = self._awaited * _DECAY + 1.0

    def observe_round(
        self,
        num_sequences: int,
        num_workers: int,
        tokens: int,
        gained: int,
        parts: tuple[float, float, float],
        now: float,
    ) -> None:
        """A round that asked num_workers workers to draft for num_sequences sequences.

        tokens: emitted; gained: those of them that only the draft model had proposed. parts: from
        `RoundTimes.parts`.
        """
        self._rounds = self._rounds * _DECAY + (1.0, num_sequences, tokens, gained, *parts)
        self._num_workers = num_workers
        self._asked_at = now

    def demand(self, now: float) -> DraftDemand:
        rounds, *sums = self._rounds.tolist()
        awaited, late = self._awaited.tolist()
        if now - self._asked_at > _IDLE_S or not self._num_workers or not self._rounds[2]:
            return DraftDemand()
        late_share = late / awaited if awaited else 0.0
        sequences, tokens, owed, wait_s, rows_s, plain_s = (one / rounds for one in sums)
        plain_s, others = max(plain_s, 1e-9), tokens - owed
        per_sequence_s = self._seconds_per_sequence()
        workers = self._num_workers
        without = others / plain_s

        def rate(num_workers: int, gained: float) -> float:
            if num_workers == 0:
                return without
            saved_s = per_sequence_s * (_most_each(sequences, workers) - _most_each(sequences, num_workers))
            return max(without, (others + gained) / (plain_s + rows_s + max(0.0, wait_s - saved_s)))

        in_time = owed / (1.0 - min(late_share, _MOST_LATE)) if sequences > workers else owed
        present = rate(workers, owed)
        gain = rate(workers + 1, in_time) / present - 1.0
        loss = 1.0 - rate(workers - 1, owed) / present
        return DraftDemand(late_share, max(0.0, gain), max(0.0, loss))

    def _seconds_per_sequence(self) -> float:
        """A worker's additional time for one more sequence, between 0 and its mean time a sequence."""
        answers, *sums = self._answers.tolist()
        if not answers:
            return 0.0
        mean, mean_s, mean_square, mean_product = (one / answers for one in sums)
        variance = max(0.0, mean_square - mean * mean)
        covariance = mean_product - mean * mean_s
        proportional_s = mean_s / mean
        slope_s = (covariance + _PRIOR_WEIGHT * proportional_s) / (variance + _PRIOR_WEIGHT)
        return min(max(slope_s, 0.0), proportional_s)


def _most_each(sequences: float, num_workers: int) -> float:
    """Sequences of each worker, at least one."""
    return max(1.0, sequences / num_workers)
