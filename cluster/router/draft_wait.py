"""Whether it pays to wait for draft workers or the target's head, learnt separately for each namespace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_service.store.fair_share import first_to_give_way
from cluster.router.draft_depth import DraftDepth

FIRST_EXPLORE_ROUNDS = 32  # between rounds that verify more than seems to pay

_MAX_NAMESPACES = 64  # that are known at a time
_DECAY = 0.97  # factor on all sums with each round that asked
_FIRST_ROUNDS = 8.0  # asked anyway until this much is known
_BURST = 4  # rounds of a new try; one alone would only measure how the worker catches up
_FIRST_PAUSE = 64
_LONGEST_PAUSE = 1024
_TRY_SHARE = 0.005  # share of the rounds' time that unsuccessful tries may take


@dataclass(slots=True)
class _Load:
    """Statistics of rounds with about this many sequences."""

    rounds: float = 0.0
    tokens: float = 0.0
    gained: float = 0.0
    wait_s: float = 0.0
    verify_s: float = 0.0
    since: int = 0  # rounds since the last try
    pause: int = _FIRST_PAUSE
    burst: int = 0  # rounds left of a try
    lost_s: float = 0.0  # by waiting in vain, not yet made up for by rounds without

    def begin_like(self, other: _Load) -> None:
        """Take over what another load has shown, with the weight of the first rounds."""
        share = _FIRST_ROUNDS / other.rounds
        self.rounds = _FIRST_ROUNDS
        self.tokens, self.gained = other.tokens * share, other.gained * share
        self.wait_s, self.verify_s = other.wait_s * share, other.verify_s * share

    @property
    def has_paid(self) -> bool:
        plain_s = max(self.verify_s, 1e-9)
        return self.tokens * plain_s >= (self.tokens - self.gained) * (plain_s + self.wait_s)

    def scale(self, factor: float) -> None:
        self.rounds *= factor
        self.tokens *= factor
        self.gained *= factor
        self.wait_s *= factor
        self.verify_s *= factor


class DraftWait:
    """Compares, in the rounds that asked draft workers, tokens / time with what the same rounds would have given
    without: `gained` are the accepted tokens that no other source had proposed, `wait_s` the time the round spent
    waiting. Paired within a round, so the text being easy or hard does not disturb the comparison.

    Kept apart by load (powers of two of the sequences that emit): waiting delays everyone, so what pays for one
    sequence may not for sixteen. A load that is new is taken to be like the nearest one known: a first try makes the
    draft models compute every context, which is dear. Where it does not pay, it is tried again after 64 rounds, then
    ever more seldom, and not before the rounds without have taken 200 times what the last tries have lost: a context
    of thousands of tokens costs a draft model as much as many rounds.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self.overhead_s = 0.0  # time of a round outside of the target's forward and the wait for drafts
        self._has_overhead = False

    def expected_wait_s(self, num_emitting: int) -> float:
        load = self._loads.get(num_emitting.bit_length())
        return load.wait_s / load.rounds if load is not None and load.rounds > 0.0 else 0.0

    def tokens_per_s(self, num_emitting: int) -> float | None:
        """What rounds that asked have emitted in their time; None: not known."""
        load = self._loads.get(num_emitting.bit_length())
        return load.tokens / (load.wait_s + load.verify_s) if load is not None and load.verify_s > 0.0 else None

    def pays(self, num_emitting: int) -> bool:
        """Whether to ask in a round with this many emitting sequences. Counts the call as a round."""
        load = self._load(num_emitting)
        if load.rounds < _FIRST_ROUNDS:
            return True
        if load.burst > 0:
            load.burst -= 1
            return True
        if load.has_paid:
            load.pause = _FIRST_PAUSE
            load.since = 0
            load.lost_s = 0.0
            return True
        load.since += 1
        load.lost_s -= _TRY_SHARE * load.verify_s / load.rounds
        if load.since >= load.pause and load.lost_s <= 0.0:
            load.since = 0
            load.pause = min(_LONGEST_PAUSE, load.pause * 2)
            load.burst = _BURST - 1
            load.scale(0.25)  # old evidence must not outvote the new try
            return True
        return False

    def seems_to_pay(self, num_emitting: int) -> bool:
        """Whether it has paid so far, or is not known; no try is due for this."""
        load = self._load(num_emitting)
        return load.rounds < _FIRST_ROUNDS or load.has_paid

    def observe(
        self, num_emitting: int, asked: bool, tokens: int, gained: int, outside_s: float, verify_s: float
    ) -> None:
        """Take in a round: emitted tokens, those owed to draft models alone, and the time the target took for them;
        outside_s: what the round took besides the target's forward."""
        if not asked:
            self.overhead_s += (outside_s - self.overhead_s) * (0.1 if self._has_overhead else 1.0)
            self._has_overhead = True
            return
        load = self._load(num_emitting)
        load.scale(_DECAY)
        load.rounds += 1.0
        load.tokens += tokens
        load.gained += gained
        wait_s, plain_s = max(0.0, outside_s - self.overhead_s), verify_s + min(outside_s, self.overhead_s)
        load.wait_s += wait_s
        load.verify_s += plain_s
        saved_s = (wait_s + plain_s) * gained / max(1, tokens)
        load.lost_s = max(0.0, load.lost_s + wait_s - saved_s)

    def _load(self, num_emitting: int) -> _Load:
        size = num_emitting.bit_length()
        load = self._loads.get(size)
        if load is None:
            load = _Load()
            known = [other for other in self._loads if self._loads[other].rounds >= _FIRST_ROUNDS / 2]
            if known:
                load.begin_like(self._loads[min(known, key=lambda other: abs(other - size))])
            self._loads[size] = load
        return load


@dataclass(slots=True)
class Traffic:
    """Drafting statistics of the rounds of one namespace, or of all rounds of several.

    What pays for one tenant's text says something of the text. So a round of one namespace is planned by what such
    rounds of its own have shown, whatever others have asked before. Rounds of several namespaces share one record: a
    request in such a round meets the other requests in its time anyway.
    """

    draft_wait: DraftWait = field(default_factory=DraftWait)
    head_wait: DraftWait = field(default_factory=DraftWait)  # for the target's head
    depth: DraftDepth = field(default_factory=DraftDepth)  # of draft workers' trees
    head_depth: DraftDepth = field(default_factory=DraftDepth)  # of the head's
    explore_rounds: int = FIRST_EXPLORE_ROUNDS
    explore_in: int = FIRST_EXPLORE_ROUNDS


class TrafficRecords:
    """A `Traffic` for each namespace. When there are too many, the owner with most namespaces loses its least recently
    used one."""

    def __init__(self) -> None:
        self._mixed = Traffic()
        self._records: OrderedDict[str, Traffic] = OrderedDict()

    def of(self, namespaces: Iterable[str]) -> Traffic:
        """The record of a round of sequences of these namespaces."""
        distinct = set(namespaces)
        if len(distinct) != 1:
            return self._mixed
        namespace = distinct.pop()
        record = self._records.get(namespace)
        if record is None:
            record = self._records[namespace] = Traffic()
            if len(self._records) > _MAX_NAMESPACES:
                del self._records[first_to_give_way(list(self._records))]
        self._records.move_to_end(namespace)
        return record

    def drop(self, namespace: str) -> None:
        """Drop this namespace's statistics; statistics of mixed rounds are shared and kept."""
        self._records.pop(namespace, None)
