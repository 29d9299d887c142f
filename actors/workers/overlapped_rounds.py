"""Rounds of an engine whose device computes while the host works: a round that is sent ahead is received and prepared
while the device computes. It is launched as soon as the outcome is known, before the result is sent to the router.

Tokens are the same as with serial rounds: the same batch only begins sooner. A round that cannot be prepared, or
arrives too late, begins when its message is handled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from actors.links.server import Peer
from actors.messages import MasksSource, Message, VerifyAhead, VerifyBatch, VerifyResult
from actors.workers.inbox import Inbox
from actors.workers.last_rounds import LastRounds

logger = logging.getLogger(__name__)

LISTEN_SHARE = 0.8  # of the time of the round before, in which the next may arrive; then its outcome is waited for
_SLICE_S = 1e-3  # the most that a round that was shorter is waited for too long
_MOST_IN_A_ROW = 64  # rounds; then the loop looks after other things


class Begun(Protocol):
    @property
    def round_id(self) -> int: ...
    @property
    def seq_ids(self) -> list[int]: ...
    @property
    def finished(self) -> list[int]: ...


class OverlappingEngine(Protocol):
    """As `TargetEngine`. A round begins, is settled and gives a result; a prepared one follows a settled one."""

    overlaps: bool

    def begin(self, batch: VerifyBatch, masks: MasksSource | None) -> Any: ...
    def prepare(self, ahead: VerifyAhead, begun: Any) -> Any | None: ...
    def is_computing(self, begun: Any) -> bool: ...
    def settle(self, begun: Any) -> None: ...
    def follow(self, prepared: Any, settled: Any) -> Any | None: ...
    def result(self, begun: Any) -> VerifyResult: ...


class OverlappedRounds:
    """`run` answers a message with rounds until none follows at once."""

    def __init__(
        self,
        engine: OverlappingEngine,
        inbox: Inbox,
        answer: Callable[[Peer, Message], None],
        fail: Callable[[Peer, int, Exception], None],
        has_stopped: Callable[[], bool],
    ) -> None:
        """inbox: where messages wait that arrive while a round is computed; one at most, and those that arrive before
        a round's masks. fail: answers that a round has failed; the engine has no sequences then. All are called in the
        thread of `run`."""
        self._engine = engine
        self._inbox, self._answer, self._fail, self._has_stopped = inbox, answer, fail, has_stopped
        self._last: LastRounds[Begun] = LastRounds()  # settled
        self._last_round_s = 0.0
        self._expected_from: set[Peer] = set()  # routers whose last message was a round sent ahead

    def clear(self) -> None:
        """The engine has dropped its sequences."""
        self._last.clear()

    def run(self, peer: Peer, message: VerifyBatch | VerifyAhead, ended: Callable[[Begun], None]) -> None:
        """ended: called with each round that has ended; then the next one is the loop's batch."""
        begun = self._begin(peer, message)
        for index in range(_MOST_IN_A_ROW):
            if begun is None:
                return
            ahead = self._listen(peer, begun) if index < _MOST_IN_A_ROW - 1 else None
            following = self._finish(peer, begun, ahead)
            ended(begun)
            begun = following

    def _begin(self, peer: Peer, message: VerifyBatch | VerifyAhead) -> Begun | None:
        begun: Begun | None
        try:
            if isinstance(message, VerifyBatch):
                begun = self._engine.begin(message, self._inbox.masks_of(peer, message))
                return begun
            self._expected_from.add(peer)
            last = self._last.get(peer)
            prepared = None if last is None else self._prepare(message, last)
            begun = None if prepared is None else self._engine.follow(prepared, last)
        except Exception as error:
            self._fail(peer, message.round_id, error)
            return None
        if begun is None:
            self._decline(peer, message)
        return begun

    def _listen(self, peer: Peer, begun: Begun) -> VerifyAhead | None:
        """The round that follows, if it arrives in time. Not waited for where the last one did not come: a round that
        is shorter than the one before would be noticed late for nothing."""
        if peer not in self._expected_from or self._inbox.waiting:
            return None
        self._expected_from.discard(peer)
        until = time.monotonic() + LISTEN_SHARE * self._last_round_s
        while self._engine.is_computing(begun) and (left := until - time.monotonic()) > 0 and not self._has_stopped():
            received = self._inbox.receive(min(left, _SLICE_S))
            if received is None:
                continue
            sender, message = received
            if sender == peer and isinstance(message, VerifyAhead) and message.after == begun.round_id:
                self._expected_from.add(peer)
                return message
            self._inbox.waiting.append(received)
            break
        return None

    def _finish(self, peer: Peer, begun: Begun, ahead: VerifyAhead | None) -> Begun | None:
        """Give the result of a round, after the next one has begun, which is returned."""
        prepared = None if ahead is None else self._prepare(ahead, begun)
        try:
            self._engine.settle(begun)
            following, failure = self._follow(prepared, begun)
            result = self._engine.result(begun)
        except Exception as error:
            # A round that follows may have begun: its sequences are dropped, too.
            self._fail(peer, begun.round_id, error)
            if ahead is not None:
                self._decline(peer, ahead)
            return None
        self._last_round_s = result.elapsed_s
        self._remember(peer, begun)
        self._answer(peer, result)
        if ahead is not None and failure is not None:
            self._fail(peer, ahead.round_id, failure)
        elif ahead is not None and following is None:
            self._decline(peer, ahead)
        return following

    def _prepare(self, ahead: VerifyAhead, begun: Begun) -> Any | None:
        """None: the round is declined. Preparing changes nothing, so the round before it goes on if it fails."""
        try:
            return self._engine.prepare(ahead, begun)
        except Exception:
            logger.exception("round %d, which was sent ahead, could not be prepared", ahead.round_id)
            return None

    def _follow(self, prepared: Any | None, settled: Begun) -> tuple[Begun | None, Exception | None]:
        """The next round, or why it failed; neither: it is declined."""
        try:
            return None if prepared is None else self._engine.follow(prepared, settled), None
        except Exception as error:
            return None, error

    def _decline(self, peer: Peer, ahead: VerifyAhead) -> None:
        self._answer(peer, VerifyResult(ahead.round_id, [], is_declined=True))

    def _remember(self, peer: Peer, settled: Begun) -> None:
        gone = self._last.note(peer, settled)
        if gone is not None:
            self._expected_from.discard(gone)
