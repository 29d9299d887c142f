"""Whether it pays to wait for a pool of draft workers or for the target's head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_DECAY = 0.97  # factor on all sums with each round that asked
_FIRST_ROUNDS = 8.0  # asked anyway until this much is known
_BURST = 4  # rounds of a new try; one alone would only measure how the worker catches up
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 1024
_TRY_SHARE = 0.005  # share of the rounds' time that unsuccessful tries may take


class RoundTimes(NamedTuple):
    """Seconds of a round, without the share of prompts."""

    outside_s: float  # without the target's forward
    verify_s: float  # of that forward, without rows_s
    rows_s: float = 0.0  # of its rows that only those who were asked for drafts proposed

    def parts(self, overhead_s: float) -> tuple[float, float, float]:
        """Seconds of waiting for drafts, of these rows, and of the rest. overhead_s: of a round that asks nobody."""
        return max(0.0, self.outside_s - overhead_s), self.rows_s, self.verify_s + min(self.outside_s, overhead_s)


@dataclass(slots=True)
class Load:
    """Statistics of rounds with about this many sequences."""

    rounds: float = 0.0
    sequences: float = 0.0  # sum over these rounds
    tokens: float = 0.0
    gained: float = 0.0
    wait_s: float = 0.0
    rows_s: float = 0.0  # of the target's rows that only draft models proposed
    verify_s: float = 0.0  # of the rest of the round
    since: int = 0  # rounds since the last try
    pause: int = _FIRST_PAUSE
    burst: int = 0  # rounds left of a try
    lost_s: float = 0.0  # by waiting in vain, not yet made up for by rounds without

    def begin_like(self, other: Load) -> None:
        """Take over what another load has shown, with the weight of the first rounds."""
        share = _FIRST_ROUNDS / other.rounds
        self.rounds = _FIRST_ROUNDS
        self.sequences = other.sequences * share
        self.tokens, self.gained = other.tokens * share, other.gained * share
        self.wait_s, self.rows_s, self.verify_s = other.wait_s * share, other.rows_s * share, other.verify_s * share

    @property
    def is_known(self) -> bool:
        return self.rounds >= _FIRST_ROUNDS

    @property
    def has_paid(self) -> bool:
        plain_s = max(self.verify_s, 1e-9)
        return self.tokens * plain_s >= (self.tokens - self.gained) * (plain_s + self.rows_s + self.wait_s)

    @property
    def advantage(self) -> float:
        """Tokens a second of the rounds that asked / what the same rounds would have given without."""
        plain_s = max(self.verify_s, 1e-9)
        asking_s = plain_s + self.rows_s + self.wait_s
        return self.tokens * plain_s / max((self.tokens - self.gained) * asking_s, 1e-9)

    def settle(self) -> None:
        """It pays: another try, when it no longer does, comes soon."""
        self.pause = _FIRST_PAUSE
        self.since = 0
        self.lost_s = 0.0

    def try_again(self) -> bool:
        """Whether a round that would not ask should, for a new try. Counts the call as a round."""
        self.since += 1
        self.lost_s -= _TRY_SHARE * self.verify_s / self.rounds
        if self.since < self.pause or self.lost_s > 0.0:
            return False
        self.since = 0
        self.pause = min(_LONGEST_PAUSE, self.pause * 2)
        self.burst = _BURST - 1
        self.scale(0.25)  # old evidence must not outvote the new try
        return True

    def is_being_tried(self) -> bool:
        """Whether a round asks because not enough is known yet. Counts the call as a round."""
        if self.is_known and self.burst == 0:
            return False
        self.burst -= self.is_known
        return True

    def scale(self, factor: float) -> None:
        self.rounds *= factor
        self.sequences *= factor
        self.tokens *= factor
        self.gained *= factor
        self.wait_s *= factor
        self.rows_s *= factor
        self.verify_s *= factor


class DraftWait:
    """Compares, in the rounds that asked draft workers, tokens / time with what the same rounds would have given
    without: `gained` are the accepted tokens that no other source had proposed, `wait_s` the time the round spent
    waiting, `rows_s` what the target took for nodes that no other source had proposed. Paired within a round, so the
    text being easy or hard does not disturb the comparison.

    Kept apart by load (powers of two of the sequences that emit): waiting delays everyone, so what pays for one
    sequence may not for sixteen. A load that is new is taken to be like the nearest one known: a first try makes the
    draft models compute every context, which is dear. Where it does not pay, it is tried again after 64 rounds, then
    ever more seldom, and not before the rounds without have taken 200 times what the last tries have lost: a context
    of thousands of tokens costs a draft model as much as many rounds.
    """

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self.overhead_s = 0.0  # time of a round outside of the target's forward and the wait for drafts
        self._has_overhead = False

    def with_same_overhead(self) -> DraftWait:
        """Another one, which knows what rounds take without asking, and nothing else."""
        other = DraftWait()
        other.overhead_s, other._has_overhead = self.overhead_s, self._has_overhead
        return other

    def expected_wait_s(self, num_emitting: int) -> float:
        load = self._loads.get(num_emitting.bit_length())
        return load.wait_s / load.rounds if load is not None and load.rounds > 0.0 else 0.0

    def tokens_per_s(self, num_emitting: int) -> float | None:
        """What rounds that asked have emitted in their time, in proportion to the sequences; None: not known."""
        load = self._loads.get(num_emitting.bit_length())
        if load is None or load.verify_s <= 0.0:
            return None
        return load.tokens / (load.wait_s + load.rows_s + load.verify_s) * num_emitting * load.rounds / load.sequences

    def pays(self, num_emitting: int) -> bool:
        """Whether to ask in a round with this many emitting sequences. Counts the call as a round."""
        load = self.load(num_emitting)
        if load.is_being_tried():
            return True
        if load.has_paid:
            load.settle()
            return True
        return load.try_again()

    def seems_to_pay(self, num_emitting: int) -> bool:
        """Whether it has paid so far, or is not known; no try is due for this."""
        load = self.load(num_emitting)
        return not load.is_known or load.has_paid

    def observe(
        self,
        num_emitting: int,
        asked: bool,
        tokens: int,
        gained: int,
        times: RoundTimes,
        *,
        best: float = 1.0,
    ) -> None:
        """Learn from a round. tokens: emitted; gained: those that only draft models proposed; best: `Load.advantage` of
        the pools that the round would have asked if it were not a trial."""
        if not asked:
            self.overhead_s += (times.outside_s - self.overhead_s) * (0.1 if self._has_overhead else 1.0)
            self._has_overhead = True
            return
        load = self.load(num_emitting)
        load.scale(_DECAY)
        load.rounds += 1.0
        load.sequences += num_emitting
        load.tokens += tokens
        load.gained += gained
        wait_s, rows_s, plain_s = times.parts(self.overhead_s)
        load.wait_s += wait_s
        load.rows_s += rows_s
        load.verify_s += plain_s
        saved_s = (wait_s + rows_s + plain_s) * gained / max(1, tokens)
        load.lost_s = max(0.0, load.lost_s + wait_s + rows_s - saved_s + plain_s * (1.0 - 1.0 / best))

    def forget_loads(self) -> None:
        """Drop what asking has brought."""
        self._loads.clear()

    def load(self, num_emitting: int) -> Load:
        """The statistics for rounds with this many emitting sequences."""
        size = num_emitting.bit_length()
        load = self._loads.get(size)
        if load is None:
            load = Load()
            known = [other for other in self._loads if self._loads[other].rounds >= _FIRST_ROUNDS / 2]
            if known:
                load.begin_like(self._loads[min(known, key=lambda other: abs(other - size))])
            self._loads[size] = load
        return load
