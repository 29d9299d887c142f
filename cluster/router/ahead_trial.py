"""Whether sending rounds ahead pays, found by trying: tokens a second with it and without it, in turns.

The target waits for the router between serial rounds. Where that is a small share of a round, nothing can be won and
nothing is tried. Where it is more, a share of the rounds is run either way and the rates are compared. So a router that
takes its processor time from the target (both on one CPU) finds out that it wins nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_LEAST_WAIT_SHARE = 0.03  # of a round
_DECAY = 0.98  # factor on a rate's sums with each round
_BURST = 24  # rounds of a try; the first is not measured
_KNOWN_AFTER = 16.0  # rounds that a rate needs
_FIRST_PAUSE = 512  # rounds between tries
_LONGEST_PAUSE = 4096
_WEIGHT = 0.1  # of a round in what is usual
_OUTLIER = 4.0  # times the usual duration: counted no longer than that


@dataclass(slots=True)
class _Rate:
    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.rounds = self.rounds * _DECAY + 1.0
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(slots=True)
class AheadTrial:
    """`is_on` says how the next rounds are run; call `observe` after each round of decoding sequences."""

    is_on: bool = False
    wait_s: float = 0.0  # typical time that the target waits in a serial round
    verify_s: float = 0.0  # typical time of the target in a round
    _with: _Rate = field(default_factory=_Rate)
    _without: _Rate = field(default_factory=_Rate)
    _usual_s: float = 0.0  # duration of a round
    _in_force: int = 0  # rounds since `is_on` changed
    _pause: int = _FIRST_PAUSE

    @property
    def wait_share(self) -> float:
        """Share of a serial round in which the target waits."""
        total = self.wait_s + self.verify_s
        return self.wait_s / total if total > 0.0 else 0.0

    def observe(self, tokens: int, seconds: float, verify_s: float, was_serial: bool) -> None:
        """A round has emitted `tokens`, `seconds` after the one before; the target computed for verify_s of them.

        A pause of the process, as to compile something, may take as long as all other rounds of a try. It counts as a
        few rounds at most, and for nothing once it turns out that it was one.
        """
        if self._usual_s == 0.0 or _OUTLIER * seconds < self._usual_s:
            self._usual_s, self.verify_s, self.wait_s = seconds, 0.0, 0.0
            self._with, self._without = _Rate(), _Rate()
        seconds = min(seconds, _OUTLIER * self._usual_s)
        verify_s = min(verify_s, seconds)
        self._usual_s += _WEIGHT * (seconds - self._usual_s)
        self.verify_s += (_WEIGHT if self.verify_s else 1.0) * (verify_s - self.verify_s)
        if was_serial:
            self.wait_s += (_WEIGHT if self.wait_s else 1.0) * (seconds - verify_s - self.wait_s)
        self._in_force += 1
        if self._in_force > 1:
            (self._with if self.is_on else self._without).add(tokens, seconds)
        if self._in_force >= _BURST:
            self._decide()

    def _decide(self) -> None:
        if self.wait_share < _LEAST_WAIT_SHARE:
            self._turn(False)
            return
        if self._with.rounds < _KNOWN_AFTER or self._without.rounds < _KNOWN_AFTER:
            self._turn(not self.is_on)
            return
        better = self._with.per_second > self._without.per_second
        if better != self.is_on:
            self._turn(better)
        elif self._in_force >= self._pause:
            # A new try of the other way, whose old measurements must not outvote it.
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
            other = self._without if self.is_on else self._with
            other.rounds, other.tokens, other.seconds = 0.0, 0.0, 0.0
            self._turn(not self.is_on)

    def _turn(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self.is_on = is_on
            self._in_force = 0
