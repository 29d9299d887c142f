"""Accounting of one answer: metrics, a log line, and its part of the trace."""

from __future__ import annotations

import logging
import time
from collections import Counter

import msgspec

from actors.messages import RequestTimes, SpeculationStats, TokenChunk
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.observability.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


class AnswerAccount:
    """Notes what happens to one answer. now: time.monotonic()."""

    def __init__(self, prepared: PreparedCall, choice: int, metrics: GatewayMetrics) -> None:
        self._arrival = prepared.arrival
        self._choice = choice
        self._request = prepared.requests[choice]
        self._metrics = metrics
        self.stats: SpeculationStats | None = None
        self._times: RequestTimes | None = None
        self._last_chunk_at = 0.0
        self._last_token_at: float | None = None

    def begin(self) -> None:
        self._metrics.requests_waiting.inc()
        self._metrics.prompt_tokens.inc(len(self._request.prompt_token_ids))

    def count_tokens(self, count: int, now: float) -> None:
        metrics, elapsed_s = self._metrics, 0.0
        if self._last_token_at is None:
            metrics.time_to_first_token.observe(now - self._arrival.at)
            metrics.requests_waiting.dec()
            metrics.requests_running.inc()
            count -= 1
        else:
            elapsed_s = now - self._last_token_at
        for _ in range(count):
            metrics.inter_token_latency.observe(elapsed_s / count)
        self._last_token_at = now

    def note_chunk(self, chunk: TokenChunk, num_shown: int, now: float) -> None:
        """num_shown: tokens of the chunk that are part of the answer."""
        self._times, self._last_chunk_at = chunk.times, now
        if chunk.stats is not None:
            self.stats = _without(chunk.stats, chunk.sources[num_shown:])

    def resume(self) -> None:
        self._metrics.request_resumed.inc()
        if self._arrival.trace is not None:
            self._arrival.trace.resumed()

    def succeed(self, finish_reason: str, now: float) -> None:
        self._metrics.request_success.labels(finish_reason).inc()
        self._metrics.request_latency.observe(now - self._arrival.at)

    def end(self, outcome: str, num_tokens: int) -> None:
        """outcome: the finish reason, or the code of what went wrong."""
        metrics = self._metrics
        (metrics.requests_waiting if self._last_token_at is None else metrics.requests_running).dec()
        metrics.generation_tokens.inc(num_tokens)
        self._log_end(outcome, num_tokens)
        if self._arrival.trace is not None:
            self._arrival.trace.answered(
                self._choice,
                outcome,
                num_tokens,
                stats=self.stats,
                times=self._times,
                last_chunk_at=self._last_chunk_at,
            )
        if outcome not in ("stop", "length"):
            metrics.request_failure.labels(outcome).inc()

    def _log_end(self, outcome: str, num_tokens: int) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        answer_id, num_prompt = self._request.request_id, len(self._request.prompt_token_ids)
        elapsed_s = time.monotonic() - self._arrival.at
        logger.info(
            "%s ended: %s, %d tokens after %d in %.3f s", answer_id, outcome, num_tokens, num_prompt, elapsed_s,
            extra={
                "request_id": self._arrival.origin.request_id, "answer_id": answer_id, "outcome": outcome,
                "prompt_tokens": num_prompt, "completion_tokens": num_tokens, "seconds": round(elapsed_s, 6),
            },
        )  # fmt: skip


def _without(stats: SpeculationStats, sources: tuple[str, ...]) -> SpeculationStats:
    """Subtract accepted tokens after a stop string, whose sources these are."""
    dropped = Counter(sources)
    kept = {source: count - dropped[source] for source, count in stats.accepted_tokens.items()}
    return msgspec.structs.replace(stats, accepted_tokens={source: count for source, count in kept.items() if count})
