"""Chooses who runs: a bounded queue, admission in order of arrival, preemption, and fair shares of prompt rows."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from math import inf
from operator import attrgetter

from actors.errors import Overloaded
from cluster.config import RouterConfig
from cluster.router.finish_rate import FinishRate
from cluster.router.round import RoundEntry
from cluster.router.sequence import Sequence

_PRESSURE_ROUNDS = 64  # rounds with careful admission after the target ran out of blocks
_MOST_SCORED_ROWS = 256  # of prompts, in a round
_LONGEST_RETRY_S = 60.0
SHORTEST_RETRY_S = 1.0


def share_prompt_rows(remaining: SequenceOf[int], budget: int) -> list[int]:
    """Rows for each sequence that still computes its prompt, oldest first; together at most `budget`.

    The oldest is guaranteed half, so it finishes in bounded time whatever comes after it; everyone becomes the oldest
    in turn. The others share the rest evenly, shortest first, so that a short prompt does not wait for a long one. What
    they do not need goes to the oldest.
    """
    if not remaining:
        return []
    rows = [0] * len(remaining)
    rows[0] = min(remaining[0], budget - budget // 2)
    left = budget - rows[0]
    others = sorted(range(1, len(remaining)), key=remaining.__getitem__)
    for position, index in enumerate(others):
        share = -(-left // (len(others) - position))
        rows[index] = min(remaining[index], share)
        left -= rows[index]
    rows[0] += min(left, remaining[0] - rows[0])
    return rows


def plan_entries(
    sequences: SequenceOf[Sequence], max_prefill_rows: int, gives_way: Callable[[Sequence], bool] = lambda _: False
) -> list[RoundEntry]:
    """Every decoding sequence, and as much of the prompts as fits into max_prefill_rows; those that give way have what
    the others leave. Every row of a scored prompt has logits, which take memory: there are few of them in a round."""
    prompts = sorted((sequence for sequence in sequences if sequence.num_uncomputed > 1), key=gives_way)
    scored_rows = min(_MOST_SCORED_ROWS, max_prefill_rows)
    wanted = []
    for sequence in prompts:
        rows = sequence.num_uncomputed
        if sequence.begin.num_prompt_logprobs >= 0:
            rows = min(rows, scored_rows)
            scored_rows -= rows
        wanted.append(rows)
    first = sum(not gives_way(sequence) for sequence in prompts)
    shares = share_prompt_rows(wanted[:first], max_prefill_rows)
    shares += share_prompt_rows(wanted[first:], max_prefill_rows - sum(shares))
    rows_of = dict(zip((sequence.seq_id for sequence in prompts), shares, strict=True))
    return [
        RoundEntry(
            sequence,
            sequence.seq_id,
            sequence.num_tokens,
            rows,
            emits=rows == sequence.num_uncomputed,
            is_coupled=sequence.begin.sampling.acceptance != "rejection",
            target_known=sequence.target.known,
        )
        for sequence in sequences
        if (rows := rows_of.get(sequence.seq_id, 1))
    ]


class Scheduler:
    """The running and the waiting sequences. `running` is sorted by age, oldest first."""

    def __init__(self, config: RouterConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self.running: list[Sequence] = []
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._finish_rate = FinishRate()
        self._pressure = 0  # rounds left with careful admission
        self._credits = 0  # sequences that ended under pressure: each makes room for one

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Raises Overloaded when max_waiting sequences wait beyond those that the next round admits.

        A stream that another router has begun is always accepted, and runs next: its client has been promised the rest.
        There are at most as many as that router had places.
        """
        self._observe_queue(now)
        if sequence.request.num_output_in_prompt > 0:
            self._put_first(sequence)
            return
        self._check_room(sequence, now)
        self._put_last(sequence)

    def _observe_queue(self, now: float) -> None:
        self._finish_rate.observe(self._num_queued > 0, now)

    def _check_room(self, sequence: Sequence, now: float) -> None:
        """Raises Overloaded."""
        if self._num_queued >= self._config.max_waiting:
            refusal = sequence.request.refusal
            raise Overloaded(
                f"{len(self.waiting)} requests wait and {len(self.running)} run; "
                f"the limits are {self._config.max_waiting} and {self._config.max_running}",
                self._retry_after_s() if refusal is None else min(refusal.retry_after_s, self._retry_after_s()),
            )

    @property
    def _num_queued(self) -> int:
        """Sequences that wait beyond those that the next round admits. Negative: places will still be free."""
        return len(self.waiting) - max(0, self._config.max_running - len(self.running))

    def _retry_after_s(self) -> float:
        """Estimated time until half of the queue is served."""
        rate = self._finish_rate.per_second(self._config.max_running)
        if rate is None:
            return SHORTEST_RETRY_S
        ahead = max(1.0, len(self.waiting) / 2)
        return min(_LONGEST_RETRY_S, max(SHORTEST_RETRY_S, round(ahead / rate, 3)))

    def longest_wait_s(self, now: float) -> float:
        """The longest wait of a request that has not run yet."""
        arrivals = (
            sequence.progress.arrived_at for sequence in self.waiting.values() if sequence.progress.started_at is None
        )
        return max(0.0, now - min(arrivals, default=now))

    def admit(self, free_blocks: int, now: float) -> None:
        """Move waiting sequences to the running ones, in order, while there are places.

        free_blocks: as the target last reported. It matters only for a while after the target ran out of blocks: then a
        sequence enters if all of it fits, if it replaces one that ended, or if nothing runs.
        """
        if self._pressure:
            self._pressure -= 1
        else:
            self._credits = 0
        while (head := self._next(now)) is not None:
            if self._pressure and self.running:
                needed = -(-(head.num_tokens + 1) // self._block_size) + len(self.running)
                if free_blocks + self._blocks_at_hand(head) >= needed:
                    free_blocks -= needed
                elif self._credits:
                    self._credits -= 1
                else:
                    return
            self._enter(head)

    def _blocks_at_hand(self, sequence: Sequence) -> int:
        """Blocks beside the free ones that it may have."""
        return 0

    def _next(self, now: float) -> Sequence | None:
        """Who runs next; None: nobody can."""
        return next(iter(self.waiting.values())) if self.may_admit else None

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits for whom there is a place."""
        return bool(self.waiting) and len(self.running) < self._config.max_running

    def _enter(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        insort(self.running, sequence, key=attrgetter("arrival"))

    def round_limit_s(self, now: float) -> float:
        """Seconds that the next round may take."""
        return inf

    def taking_part(self, limit_s: float) -> list[Sequence]:
        """The running sequences that have rows in a round of limit_s."""
        return self.running

    def gives_way(self, sequence: Sequence) -> bool:
        """Whether its prompt has only the rows that other prompts leave."""
        return False

    @property
    def held(self) -> list[Sequence]:
        """The sequences that the target holds."""
        return self.running

    def remove(self, sequence: Sequence, now: float | None) -> None:
        """Remove an ended sequence. now is None when it leaves the queue without a round."""
        if sequence.request_id in self.waiting:
            self._take_out(sequence)
            return
        if now is not None:
            self._observe_queue(now)
            self._rate_of(sequence).ended(now - (sequence.progress.started_at or sequence.progress.arrived_at))
        self._leave(sequence)
        if self._pressure:
            self._credits += 1

    def _rate_of(self, sequence: Sequence) -> FinishRate:
        return self._finish_rate

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)

    def preempt_youngest(self) -> Sequence:
        """Send the youngest running sequence back to the head of the queue, whatever the queue's bound."""
        victim = self.running.pop()
        self._put_first(victim)
        return victim

    def note_memory_pressure(self) -> None:
        """The target ran out of blocks."""
        if not self._pressure:
            self._credits = 0
        self._pressure = _PRESSURE_ROUNDS

    def _put_last(self, sequence: Sequence) -> None:
        self.waiting[sequence.request_id] = sequence

    def _put_first(self, sequence: Sequence) -> None:
        self._put_last(sequence)
        self.waiting.move_to_end(sequence.request_id, last=False)

    def _take_out(self, sequence: Sequence) -> None:
        del self.waiting[sequence.request_id]

    def sequences(self) -> Iterable[Sequence]:
        yield from self.held
        yield from self.waiting.values()
