"""Feeds finished answers of a process to the promotion gate, in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cache_service.errors import StoreError
from cache_service.formats.documents import Int32Array
from cache_service.promotion.promotion_gate import MAX_TEXT_TOKENS, PromotionCounters, PromotionGate
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

_REVOKE_PATIENCE_S = 2.0  # then another gate's lease is seized: that gate may have crashed
_PAUSE_S = 0.01  # between texts, for other threads of the process

Look = Callable[[], tuple[PromotionGate, frozenset[str]] | None]
"""Returns the gate and the organisations that may feed the pool now; None: not known yet."""


class PromotionThread:
    """Offers finished answers to the gate and releases batches. No method raises or waits for Redis.

    A full queue drops its oldest texts and counts them. Organisations that may no longer feed the pool are removed from
    it at the next look.
    """

    def __init__(self, look: Look, *, max_queued_texts: int = 1024, poll_s: float = 1.0) -> None:
        """look: called every turn, in the thread; only the thread uses the gate."""
        self.dropped_texts = 0
        self.failures = 0
        self.counters = PromotionCounters()
        """As of the last batch: live counts would reveal when somebody else says a phrase."""
        self._look = look
        self._max_queued = max_queued_texts
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._texts: deque[tuple[str, float, Int32Array]] = deque()  # organisation, when it was said, tokens
        self._is_offering = False  # a text taken from the queue
        self._gate: PromotionGate | None = None
        self._members: frozenset[str] | None = None  # as told to the gate
        self._must_revoke_since: float | None = None
        self._counted_s = -1  # the batch of the counters
        self._breaker = CircuitBreaker()
        self._turns = Turns("cache-promotion")
        self._turns.add("gate", self._turn)

    def submit(self, organisation: str, token_ids: Sequence[int] | Int32Array) -> None:
        """Queue a whole finished answer (ints [n], copied) of an organisation that may feed the pool."""
        try:
            text = np.array(token_ids[: MAX_TEXT_TOKENS + 1], np.int32)  # one more, to tell longer texts
        except (ValueError, TypeError, OverflowError):
            self.dropped_texts += 1
            return
        with self._lock:
            self._texts.append((organisation, time.monotonic(), text))
            while len(self._texts) > self._max_queued:
                self._texts.popleft()
                self.dropped_texts += 1

    @property
    def queued_texts(self) -> int:
        """Texts that the gate has not dealt with, including the one it is working on."""
        with self._lock:
            return len(self._texts) + self._is_offering

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`. What is queued is lost."""
        return self._turns.close(timeout_s)

    def _turn(self) -> float:
        try:
            found = self._look()
            has_more = found is not None and self._work(*found)
        except StoreError as error:
            self.failures += 1
            if not self._breaker.is_open:
                log.warning("phrases cannot be promoted for now: %s", error)
            self._breaker.failed(time.monotonic())
            return max(self._breaker.wait_s(time.monotonic()), self._poll_s)
        self._breaker.succeeded()
        return _PAUSE_S if has_more else self._poll_s

    def _work(self, gate: PromotionGate, members: frozenset[str]) -> bool:
        """Returns whether there is more to do."""
        if gate is not self._gate:
            self._gate, self._members = gate, None
        if members is not self._members and members != self._members:  # the same ones are soon compared
            if gate.admit(members) and self._must_revoke_since is None:
                self._must_revoke_since = time.monotonic()
            self._members = members
        if self._must_revoke_since is not None:
            seizes = time.monotonic() - self._must_revoke_since >= _REVOKE_PATIENCE_S
            if gate.revoke(seizes=seizes) or not gate.public():
                self._must_revoke_since = None
        gate.release()
        if gate.released_s != self._counted_s:
            self.counters, self._counted_s = replace(gate.counters), gate.released_s
        return self._offer_next(gate, members)

    def _offer_next(self, gate: PromotionGate, members: frozenset[str]) -> bool:
        with self._lock:
            if not self._texts:
                return False
            organisation, said, text = self._texts.popleft()
            self._is_offering = True
        try:
            if organisation in members:
                gate.offer_text(organisation, text, time.monotonic() - said)
            else:
                self.dropped_texts += 1  # it has left since
        finally:
            self._is_offering = False
        return bool(self._texts)
