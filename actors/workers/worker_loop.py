"""The loop of a worker: receive a message, let the engine answer it, send the answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from actors.engine.ahead_check import is_well_formed
from actors.errors import EngineBroken, LinkError
from actors.links.server import LinkServer, Peer
from actors.messages import (
    DraftBatch,
    DraftResult,
    Failure,
    Hello,
    MasksSource,
    Message,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from actors.round_ahead import is_carried_out, pick, warm_up
from actors.workers.inbox import Inbox
from actors.workers.last_rounds import LastRounds
from actors.workers.overlapped_rounds import Begun, OverlappedRounds

logger = logging.getLogger(__name__)

_POLL_S = 0.2  # delay of a stop while nothing arrives
_IDLE_S = 60.0  # sequences that are not mentioned for so long belong to a dead router
_SWEEP_S = 10.0


class Engine(Protocol):
    """A target engine (alone or rank 0 of a group) or a draft engine."""

    def answer(self, batch: VerifyBatch | DraftBatch, *masks: MasksSource) -> VerifyResult | DraftResult:
        """masks: one, if masks follow the batch. Raises EngineBroken where no later round can be right, which ends the
        worker."""
        ...

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale. Raises errors after which no later round can be
        correct."""
        ...


class IdleSequences:
    """Times of each sequence's last mention, so that sequences of a dead router are freed."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._seen: dict[int, float] = {}
        self._sweep_at = 0.0

    def note(self, seq_ids: Iterable[int], finished: Iterable[int], now: float) -> None:
        for seq_id in finished:
            self._seen.pop(seq_id, None)
        for seq_id in seq_ids:
            self._seen[seq_id] = now

    def due(self, now: float) -> list[int]:
        """Sequences to forget now. Looks only every few seconds."""
        if now < self._sweep_at:
            return []
        self._sweep_at = now + _SWEEP_S
        idle = [seq_id for seq_id, seen in self._seen.items() if now - seen > self._idle_s]
        for seq_id in idle:
            del self._seen[seq_id]
        return idle


class WorkerLoop:
    """Serves one engine on one link, in the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        server: LinkServer,
        info: WorkerInfo,
        on_turn: Callable[[], None] | None = None,
        work_ahead: Callable[[], bool] | None = None,
    ) -> None:
        """on_turn is called before every poll, also while messages keep arriving. work_ahead is called after answers
        while nothing arrives, until it returns False; arriving messages wait for it. Errors of either end the loop."""
        self.num_batches = 0  # the worker's progress, for health checks
        self._engine = engine
        self._server = server
        self._info = info
        self._on_turn = on_turn
        self._work_ahead = work_ahead
        self._idle = IdleSequences()
        self._last_rounds: LastRounds[tuple[VerifyBatch, VerifyResult]] = LastRounds()
        self._stopped = threading.Event()
        self._inbox = Inbox(server.recv, self._stopped.is_set)
        self._overlapped: OverlappedRounds | None = None
        if getattr(engine, "overlaps", False):
            self._overlapped = OverlappedRounds(
                engine,  # type: ignore[arg-type]
                self._inbox,
                self._send_result,
                self._fail,
                self._stopped.is_set,
            )
        if info.role == "target":
            warm_up()
        self._batch_type = VerifyBatch if info.role == "target" else DraftBatch
        self._turned_at: float | None = None
        self._busy_since: float | None = None
        self._busy_before_s = 0.0  # in batches that are done

    @property
    def busy_s(self) -> float:
        """Duration of the current batch; 0 between batches. For any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def turn_s(self) -> float:
        """Duration of the loop's current turn: a poll, a batch or a message to other ranks. 0 if it does not run. For
        any thread."""
        turned_at = self._turned_at
        return 0.0 if turned_at is None else time.monotonic() - turned_at

    @property
    def busy_total_s(self) -> float:
        """Total duration of batches since the start. For any thread."""
        return self._busy_before_s + self.busy_s

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        has_more = False  # work ahead
        while not self._stopped.is_set():
            self._turned_at = time.monotonic()
            if self._on_turn is not None:
                self._on_turn()
            received = self._inbox.next(0.0 if has_more else _POLL_S)
            if received is not None:
                peer, message = received
                if self._overlapped is not None and isinstance(message, VerifyBatch | VerifyAhead):
                    self._run_overlapped(self._overlapped, peer, message)
                elif (answer := self._answer(peer, message)) is not None:
                    self._send(peer, answer)
                has_more = self._work_ahead is not None
            elif has_more and self._work_ahead is not None:
                has_more = self._work_ahead()
            forgotten = self._idle.due(time.monotonic())
            if forgotten:
                logger.info("forgetting %d sequences that no router has mentioned for a while", len(forgotten))
                empty = VerifyBatch(0, [], forgotten) if self._batch_type is VerifyBatch else None
                self._engine.answer(empty or DraftBatch(0, [], forgotten))
        self._turned_at = None

    def _run_overlapped(self, rounds: OverlappedRounds, peer: Peer, message: VerifyBatch | VerifyAhead) -> None:
        def ended(begun: Begun) -> None:
            self._end_batch()
            self._turned_at = self._busy_since = time.monotonic()
            # Noted after the round, so that a long one does not make its own sequences idle.
            self._idle.note(begun.seq_ids, begun.finished, self._turned_at)

        self._busy_since = time.monotonic()
        try:
            rounds.run(peer, message, ended)
        finally:
            self._end_batch()

    def _send_result(self, peer: Peer, result: Message) -> None:
        self.num_batches += isinstance(result, VerifyResult) and not result.is_declined
        self._send(peer, result)

    def _end_batch(self) -> None:
        self._busy_before_s += self.busy_s
        self._busy_since = None

    def _fail(self, peer: Peer, round_id: int, error: Exception) -> None:
        """Answer that a round has failed. The engine may have stopped half-way: drop everything, so that no wrong KV
        survives."""
        logger.error("round %d failed", round_id, exc_info=error)
        self._engine.clear()
        self._last_rounds.clear()
        if self._overlapped is not None:
            self._overlapped.clear()
        self._end_batch()
        self._send(peer, Failure(round_id, type(error).__name__))

    def _answer(self, peer: Peer, message: Message) -> Message | None:
        if isinstance(message, Hello):
            return self._info
        if isinstance(message, VerifyAhead) and self._info.role == "target":
            batch = self._batch_of(peer, message)
            if batch is None:
                return VerifyResult(message.round_id, [], is_declined=True)
            message = batch
        if not isinstance(message, self._batch_type):
            return None
        assert isinstance(message, VerifyBatch | DraftBatch)
        self._busy_since = time.monotonic()
        try:
            masks = self._inbox.masks_of(peer, message) if isinstance(message, VerifyBatch) else None
            answer = self._engine.answer(message) if masks is None else self._engine.answer(message, masks)
        except EngineBroken:
            raise
        except Exception as error:
            self._fail(peer, message.round_id, error)
            return None
        finally:
            self._end_batch()
            # Noted after the round, so that a long one does not make its own sequences idle.
            self._idle.note((item.delta.seq_id for item in message.items), message.finished, time.monotonic())
        self.num_batches += 1
        if isinstance(message, VerifyBatch) and isinstance(answer, VerifyResult):
            self._last_rounds.note(peer, (message, answer))
        return answer

    def _batch_of(self, peer: Peer, ahead: VerifyAhead) -> VerifyBatch | None:
        """The batch that a round sent ahead becomes; None: it is declined, or does not follow this router's last round,
        or is none that a router sends."""
        last = self._last_rounds.get(peer)
        if last is None or not is_well_formed(ahead, self._info.vocab_size):
            return None
        try:
            picked = pick(ahead, *last)
        except Exception:
            logger.exception("round %d, which was sent ahead, could not be picked", ahead.round_id)
            return None
        return picked.batch if picked is not None and is_carried_out(ahead, picked) else None

    def _send(self, peer: bytes, answer: Message) -> None:
        try:
            self._server.send(peer, answer)  # type: ignore[arg-type]
        except LinkError:
            logger.exception("an answer could not be sent")
