"""Open requests: how each begins, and the one event that ends it."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, MutableMapping

from actors.errors import DeadlineExceeded, InvalidRequest, PacelineError
from actors.messages import GenerationRequest, TokenChunk
from cluster.router.counters import RouterCounters
from cluster.router.round import RequestFailed, RouterEvent
from cluster.router.scheduler import Scheduler
from cluster.router.sequence import Sequence
from cluster.validation import counted

_MIN_COMPACTED = 64  # deadlines kept before those of ended requests are removed


class OpenRequests:
    """Waiting and running requests by request id; `sequences` are the same by sequence id.

    Every request ends exactly once: with a chunk that has a finish reason, or with a `RequestFailed`. `forget` is
    called for every sequence that ends or is renamed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        counters: RouterCounters,
        sequences: MutableMapping[int, Sequence],
        forget: Callable[[Sequence], None],
        seq_id_base: int | None = None,
    ) -> None:
        """seq_id_base: ids of sequences follow it; None: drawn at random."""
        self.by_id: dict[str, Sequence] = {}
        self.to_free: list[int] = []  # ended or renamed sequences that the target still holds
        self.num_arrived = 0
        self._scheduler = scheduler
        self._counters = counters
        self._sequences = sequences
        self._forget_drafts = forget
        self._events: list[RouterEvent] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap; may hold ended sequences
        self._cancelled: list[Sequence] = []  # running ones, ended between rounds
        # Random high bits: a restarted router never names a sequence like one its workers still hold.
        self._seq_id_base = secrets.randbits(31) << 32 if seq_id_base is None else seq_id_base
        self._num_named = 0

    @property
    def has_work(self) -> bool:
        """Whether there are requests, events to deliver, or sequences to free."""
        return bool(self.by_id or self._events or self.to_free)

    def new_seq_id(self) -> int:
        self._num_named += 1
        return self._seq_id_base + self._num_named

    def check(self, request: GenerationRequest, max_model_len: int) -> None:
        """Raises InvalidRequest if the request's id is in use or its prompt leaves no room for a token."""
        if request.request_id in self.by_id:
            raise InvalidRequest("request_id", request.request_id, "a request with this id is still running")
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < max_model_len:
            limit = f"it must have at least 1 and at most {max_model_len - 1} tokens"
            raise InvalidRequest("prompt", counted(num_prompt, "token"), limit, code="context_length_exceeded")
        if request.max_new_tokens < 1:
            raise InvalidRequest("max_tokens", request.max_new_tokens, "it must be at least 1")

    def open(self, sequence: Sequence) -> None:
        """Take in a request that the scheduler has enqueued."""
        self.num_arrived += 1
        self.by_id[sequence.request_id] = sequence
        self._sequences[sequence.seq_id] = sequence
        if sequence.deadline is None:
            return
        if len(self._deadlines) > _MIN_COMPACTED + 2 * len(self.by_id):
            self._deadlines = [item for item in self._deadlines if not item[2].progress.is_ended]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (sequence.deadline, sequence.arrival, sequence))

    def cancel(self, request_id: str) -> bool:
        """End a waiting request now, a running one in the next `end_overdue`. False if there is no such request."""
        sequence = self.by_id.get(request_id)
        if sequence is None:
            return False
        if not sequence.progress.is_cancelled:
            sequence.progress.is_cancelled = True
            if request_id in self._scheduler.waiting:
                self._end_cancelled(sequence, None)
            else:
                self._cancelled.append(sequence)
        return True

    def end_overdue(self, now: float) -> None:
        """End requests that are cancelled or past their deadline."""
        for sequence in self._cancelled:
            if not sequence.progress.is_ended:
                self._end_cancelled(sequence, now)
        self._cancelled = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].progress.is_ended):
            sequence = heapq.heappop(self._deadlines)[2]
            if not sequence.progress.is_ended:
                timeout_s = sequence.request.timeout_s
                self.fail(sequence, DeadlineExceeded(f"the request's {timeout_s:g} s passed before it finished"), now)

    def emit(self, chunk: TokenChunk) -> None:
        self._events.append(chunk)

    def fail(self, sequence: Sequence, error: PacelineError, now: float) -> None:
        self._events.append(RequestFailed(sequence.request_id, error))
        self.release(sequence, now)

    def preempt_youngest(self) -> None:
        """Move the youngest running sequence to the queue under a new id; its KV blocks are freed."""
        victim = self._scheduler.preempt_youngest()
        self._counters.preempted += 1
        self._forget(victim)
        victim.rename(self.new_seq_id())
        self._sequences[victim.seq_id] = victim

    def take_events(self) -> list[RouterEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_to_free(self) -> list[int]:
        to_free, self.to_free = self.to_free, []
        return to_free

    def _end_cancelled(self, sequence: Sequence, now: float | None) -> None:
        progress = sequence.progress
        self._events.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=progress.chunk_index,
                token_ids=(),
                finish_reason="cancelled",
                stats=progress.stats,
            )
        )
        self.release(sequence, now)

    def release(self, sequence: Sequence, now: float | None) -> None:
        """End a request whose last event has been queued. now: None if it ends without a round."""
        sequence.progress.is_ended = True
        del self.by_id[sequence.request_id]
        self._scheduler.remove(sequence, now)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._sequences.pop(sequence.seq_id, None)
        if sequence.target.is_held:
            self.to_free.append(sequence.seq_id)
            sequence.target.is_held = False
        self._forget_drafts(sequence)
