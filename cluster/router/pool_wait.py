"""Which pools of draft workers a round asks, by what asking them has brought in its namespace."""

from __future__ import annotations

from collections.abc import Collection

from cluster.router.draft_wait import DraftWait, Load, RoundTimes

Pools = tuple[int, ...]  # indices of the pools that a round asks

_CAUTION = 1.02  # each further pool must make a choice better by this factor: it is busy for it


class PoolWait:
    """A round asks no pool, one of them, or several together. What asking has brought is known for each choice that has
    been tried (`DraftWait`), and the one with most tokens a second is taken.

    Tried are each pool alone, and the best choice so far with one pool more or one less, so that a third pool joins
    only two that are better together than alone. Of two pools these are all choices. Of more, choices grow with the
    square of their number, not as its power of two.

    The choices are compared by their gain over the same rounds without drafts of these pools, so the text being easy
    or hard does not disturb the comparison. Each is asked in a few consecutive rounds first: a draft model that is
    asked again must compute the tokens since. What is not chosen is tried again, and ever more seldom, as in
    `DraftWait`, where the time that tries lose is measured against what would have been chosen.
    """

    def __init__(self, num_pools: int = 1) -> None:
        self._waits: dict[Pools, DraftWait] = {(pool,): DraftWait() for pool in range(num_pools)}
        self._first = self._waits[(0,)]

    @property
    def overhead_s(self) -> float:
        """Time of a round outside of the target's forward and the wait for drafts."""
        return self._first.overhead_s

    def expected_wait_s(self, num_emitting: int, pools: Pools) -> float:
        wait = self._waits.get(pools)
        return 0.0 if wait is None else wait.expected_wait_s(num_emitting)

    def tokens_per_s(self, num_emitting: int, pools: Pools) -> float | None:
        """What rounds that asked these pools have emitted in their time; None: not known."""
        wait = self._waits.get(pools)
        return None if wait is None else wait.tokens_per_s(num_emitting)

    def pools_to_ask(self, num_emitting: int, there: Collection[int]) -> Pools:
        """The pools that a round with this many emitting sequences asks. there: those that it could ask, at least one.
        Counts the call as a round."""
        if len(there) == 1:
            (pool,) = there
            return (pool,) if self._waits[(pool,)].pays(num_emitting) else ()
        loads = self._loads(num_emitting, there)
        for pools, load in loads.items():
            if load.is_being_tried():
                return pools
        best = _best_of(loads)
        if best:
            loads[best].settle()
        for pools, load in loads.items():
            if pools != best and load.try_again():
                return pools
        return best

    def seems_to_pay(self, num_emitting: int, pool: int) -> bool:
        """Whether rounds ask the pool by what is known, or do not know yet; no try is due for this."""
        if len(self._waits) == 1:
            return self._first.seems_to_pay(num_emitting)
        loads = self._loads(num_emitting, self._pools())
        if any(not load.is_known for pools, load in loads.items() if pool in pools):
            return True
        return pool in _best_of(loads)

    def observe(self, num_emitting: int, asked: Pools, tokens: int, gained: int, times: RoundTimes) -> None:
        """Take in a round that asked these pools, none if (): see `DraftWait.observe`."""
        if not asked:
            for wait in self._waits.values():
                wait.observe(num_emitting, False, tokens, gained, times)
        elif asked in self._waits:
            best = self._best_other(num_emitting, asked)
            wait = self._waits[asked]
            wait.observe(num_emitting, True, tokens, gained, times, best=best)

    def forget_pool(self, pool: int) -> None:
        """Drop what asking the pool has brought, alone or with others."""
        for pools, wait in self._waits.items():
            if pool in pools:
                wait.forget_loads()

    def _pools(self) -> list[int]:
        return [pools[0] for pools in self._waits if len(pools) == 1]

    def _loads(self, num_emitting: int, there: Collection[int]) -> dict[Pools, Load]:
        """What is known of the choices to be compared: each pool alone, the best choice and its neighbours."""
        loads: dict[Pools, Load] = {
            pools: wait.load(num_emitting)
            for pools, wait in self._waits.items()
            if len(pools) == 1 and pools[0] in there
        }
        if not all(load.is_known for load in loads.values()):
            return loads
        tried = {pools: wait.load(num_emitting) for pools, wait in self._waits.items() if set(pools) <= set(there)}
        best = max(tried, key=lambda pools: _value(pools, tried[pools]) if tried[pools].is_known else 0.0)
        for pools in (best, *_neighbours(best, there)):
            loads[pools] = self._wait_of(pools).load(num_emitting)
        return loads

    def _wait_of(self, pools: Pools) -> DraftWait:
        if pools not in self._waits:
            self._waits[pools] = self._first.with_same_overhead()
        return self._waits[pools]

    def _best_other(self, num_emitting: int, asked: Pools) -> float:
        """The greatest known advantage of the other choices; asking nobody has 1."""
        loads = (wait.load(num_emitting) for pools, wait in self._waits.items() if pools != asked)
        return max([1.0, *(load.advantage for load in loads if load.is_known)])


def _neighbours(choice: Pools, there: Collection[int]) -> list[Pools]:
    """The choices with one pool more or one less, but not without any."""
    changed = (set(choice) ^ {pool} for pool in sorted(there))
    return [tuple(sorted(pools)) for pools in changed if pools]


def _value(pools: Pools, load: Load) -> float:
    return load.advantage / _CAUTION ** (len(pools) - 1)


def _best_of(loads: dict[Pools, Load]) -> Pools:
    """The choice with most tokens a second; (): asking nobody."""
    best = max(loads, key=lambda pools: _value(pools, loads[pools]))
    return best if loads[best].has_paid else ()
