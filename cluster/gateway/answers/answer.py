"""One answer to a call: its text from the router's tokens, and its metrics, log lines and trace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from actors.errors import DeadlineExceeded, Unavailable
from actors.messages import TARGET, GenerationRequest, RequestTimes, SpeculationStats, TokenChunk, TokenLogprobs
from cluster.gateway.answers.logprobs import TokenScore, token_scores
from cluster.gateway.answers.piece import FinishReason, Piece, TokenSource, joined
from cluster.gateway.answers.streams import StreamShape
from cluster.gateway.answers.token_sources import TextSources
from cluster.gateway.errors import status_of, unwrap
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.requests.call import CallOrigin, GenerationCall
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient
from cluster.tenants.gatekeeper import Tenant
from cluster.tenants.scope import Scope
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStrings
from cluster.text.text_codec import TextCodec

if TYPE_CHECKING:
    from cluster.gateway.observability.tracing import CallTrace  # which brings OpenTelemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that can be served: one request per answer, in order of choice."""

    call_id: str
    origin: CallOrigin
    arrived: float  # time.monotonic()
    call: GenerationCall
    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # sum over all prompts
    num_prediction_tokens: int  # 0 too if what is said of them would tell what others have said
    starts_inside_thought: bool  # the chat template has begun a thought for the model
    deadline: float  # time.monotonic()
    scope: Scope
    stream_shape: StreamShape
    tenant: Tenant | None = None  # None without tenants
    trace: CallTrace | None = None  # None: not traced


class Answer:
    """One answer in progress. Runs once."""

    def __init__(
        self,
        prepared: PreparedCall,
        choice: int,
        text: AnswerText,
        metrics: GatewayMetrics,
        echoed: str | None = None,
    ) -> None:
        """echoed: the prompt, where the answer begins with it."""
        self._prepared = prepared
        self._choice = choice
        self._request = prepared.requests[choice]
        self._text = text
        self._echoed = echoed
        self._metrics = metrics
        self._num_cached = 0
        self._stats: SpeculationStats | None = None
        self._times: RequestTimes | None = None
        self._last_chunk_at = 0.0
        self._last_token_at: float | None = None

    async def pieces(self, router: RouterClient, by_token: bool) -> AsyncGenerator[Piece, None]:
        """Pieces of text, the last one with finish reason and counts. by_token: one piece a token, even if empty.

        Raises DeadlineExceeded, Unavailable, and what the router raises.
        """
        self._metrics.requests_waiting.inc()
        self._metrics.prompt_tokens.inc(len(self._request.prompt_token_ids))
        outcome = "cancelled"
        try:
            chunks = generate_unbroken(router, self._request, self._on_resume)
            async with aclosing(chunks):
                while True:
                    pieces = self._take(await self._next(chunks), by_token)
                    if pieces and (finish_reason := pieces[-1].finish_reason) is not None:
                        outcome = finish_reason
                        break
                    for piece in pieces:
                        yield piece
            # The router's stream is closed here, so that nothing is generated after a stop string.
            for piece in pieces:
                yield piece
        except Exception as error:
            status = status_of(error)
            outcome = status.code
            if status.http == 500:
                logger.error("%s failed", self._request.request_id, exc_info=unwrap(error))
            raise
        finally:
            self._end(outcome)

    async def _next(self, chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
        try:
            async with asyncio.timeout(self._prepared.deadline - time.monotonic()):
                chunk = await anext(chunks)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the time limit of {self._request.timeout_s:.3g} s passed after {self._text.num_tokens} tokens"
            ) from None
        if chunk.finish_reason == "cancelled":
            raise Unavailable("the router gave the request up")
        return chunk

    def _take(self, chunk: TokenChunk, by_token: bool) -> list[Piece]:
        """New pieces of text of a chunk. If the answer ends, there is at least one, and the last has a finish
        reason."""
        prepared, text = self._prepared, self._text
        now = time.monotonic()
        if chunk.token_ids:
            self._count_tokens(len(chunk.token_ids), now)
        if not prepared.scope.has_company:
            self._num_cached = max(self._num_cached, chunk.num_cached_tokens)
        num_before = text.num_tokens
        pieces = self._pieces_of(chunk, by_token)
        num_new = text.num_tokens - num_before
        if prepared.tenant is not None:
            prepared.tenant.limiter.spend(num_new)
        self._times, self._last_chunk_at = chunk.times, now
        if chunk.stats is not None:
            self._stats = _without(chunk.stats, chunk.sources[num_new:])
        if pieces and (finish_reason := pieces[-1].finish_reason) is not None:
            pieces[-1] = replace(pieces[-1], num_cached_tokens=self._num_cached, stats=self._stats)
            self._metrics.request_success.labels(finish_reason).inc()
            self._metrics.request_latency.observe(now - prepared.arrived)
        return pieces

    def _pieces_of(self, chunk: TokenChunk, by_token: bool) -> list[Piece]:
        call, text = self._prepared.call, self._text
        pieces: list[Piece] = []
        scores = [] if chunk.logprobs is None else token_scores(chunk.token_ids, chunk.logprobs)
        for part in _by_token(chunk) if by_token or call.wants_token_sources else (chunk,):
            num_sent = text.num_tokens
            new_text, finish_reason = text.push(part)
            num_new = text.num_tokens - num_sent
            if new_text or by_token or call.wants_token_ids or scores or finish_reason is not None:
                pieces.append(
                    Piece(
                        self._choice,
                        new_text,
                        finish_reason,
                        text.num_tokens,
                        stop_string=text.stop_string,
                        token_sources=text.sources_of(new_text),
                        token_ids=part.token_ids[:num_new] if call.wants_token_ids else (),
                        scores=tuple(scores[:num_new]),
                    )
                )
            del scores[: len(part.token_ids)]
            if finish_reason is not None:
                break
        if self._echoed is not None:
            pieces.insert(0, self._echo(self._echoed, chunk.prompt_logprobs))
            self._echoed = None
        if call.hides_answer:
            pieces = [replace(pieces[0], finish_reason="length")]
        return [joined(pieces)] if pieces and not by_token else pieces

    def _echo(self, prompt: str, logprobs: TokenLogprobs | None) -> Piece:
        scores: tuple[TokenScore, ...] = ()
        if logprobs is not None:
            first, *others = self._request.prompt_token_ids.tolist()
            scores = (TokenScore(first, None), *token_scores(others, logprobs))
        return Piece(self._choice, prompt, scores=scores)

    def _count_tokens(self, count: int, now: float) -> None:
        metrics, elapsed_s = self._metrics, 0.0
        if self._last_token_at is None:
            metrics.time_to_first_token.observe(now - self._prepared.arrived)
            metrics.requests_waiting.dec()
            metrics.requests_running.inc()
            count -= 1
        else:
            elapsed_s = now - self._last_token_at
        for _ in range(count):
            metrics.inter_token_latency.observe(elapsed_s / count)
        self._last_token_at = now

    def _on_resume(self) -> None:
        self._metrics.request_resumed.inc()
        if self._prepared.trace is not None:
            self._prepared.trace.resumed()

    def _end(self, outcome: str) -> None:
        metrics, num_tokens = self._metrics, self._text.num_tokens
        (metrics.requests_waiting if self._last_token_at is None else metrics.requests_running).dec()
        metrics.generation_tokens.inc(num_tokens)
        _log_end(self._prepared, self._request, outcome, num_tokens)
        if self._prepared.trace is not None:
            self._prepared.trace.answered(
                self._choice,
                outcome,
                num_tokens,
                stats=self._stats,
                times=self._times,
                last_chunk_at=self._last_chunk_at,
            )
        if outcome not in ("stop", "length"):
            metrics.request_failure.labels(outcome).inc()


class AnswerText:
    """Text of one answer, detokenised and cut at stop strings. Routers emit no stop tokens."""

    def __init__(
        self,
        codec: TextCodec,
        call: GenerationCall,
        context: Sequence[int],
        sources: TextSources | None = None,
    ) -> None:
        """context: the last tokens before the answer's text. sources: where to note who proposed each token; then at
        most one token is pushed at a time."""
        self._detokenizer = Detokenizer(partial(codec.decode, skip_special_tokens=call.skip_special_tokens), context)
        self._stops = StopStrings(call.stop, shows_match=call.shows_stop)
        self._has_stops = bool(call.stop)
        self._sources = sources
        self.num_tokens = 0  # up to the last token of a stop string

    @property
    def stop_string(self) -> str | None:
        """That ended the answer."""
        return self._stops.matched

    def push(self, chunk: TokenChunk) -> tuple[str, FinishReason | None]:
        """New text to show, and the finish reason if the answer ends."""
        token_ids = chunk.token_ids
        if self._has_stops:
            before = self._detokenizer.copy(), self._stops.copy()
        num_before = self.num_tokens
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids) if token_ids else ""
        if chunk.finish_reason is not None:
            text += self._detokenizer.flush()
        if self._sources is not None:
            self._sources.add(len(text), chunk.sources[0] if chunk.sources else TARGET)
        shown, matched = self._stops.push(text)
        if matched:
            self.num_tokens = num_before + _tokens_to_match(*before, token_ids)
            return shown, "stop"
        if chunk.finish_reason is None:
            return shown, None
        return shown + self._stops.flush(), "length" if chunk.finish_reason == "length" else "stop"

    def sources_of(self, shown: str) -> tuple[TokenSource, ...]:
        """Who proposed the tokens of text that `push` has just returned; empty if nobody wants to know."""
        return () if self._sources is None else self._sources.take(shown)


def _tokens_to_match(detokenizer: Detokenizer, stops: StopStrings, token_ids: tuple[int, ...]) -> int:
    """Number of tokens up to the end of the stop string, independent of the size of chunks."""
    for count, token in enumerate(token_ids, 1):
        if stops.push(detokenizer.push((token,)))[1]:
            return count
    return len(token_ids)


def _log_end(prepared: PreparedCall, request: GenerationRequest, outcome: str, num_tokens: int) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    num_prompt, elapsed_s = len(request.prompt_token_ids), time.monotonic() - prepared.arrived
    logger.info(
        "%s ended: %s, %d tokens after %d in %.3f s", request.request_id, outcome, num_tokens, num_prompt, elapsed_s,
        extra={
            "request_id": prepared.origin.request_id, "answer_id": request.request_id, "outcome": outcome,
            "prompt_tokens": num_prompt, "completion_tokens": num_tokens, "seconds": round(elapsed_s, 6),
        },
    )  # fmt: skip


def _by_token(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Split a chunk into one for each token; the last has the finish reason."""
    last = len(chunk.token_ids) - 1
    for index, token in enumerate(chunk.token_ids[:-1]):
        source = chunk.sources[index : index + 1]
        yield msgspec.structs.replace(chunk, token_ids=(token,), sources=source, finish_reason=None)
    if chunk.token_ids or chunk.finish_reason is not None:
        yield msgspec.structs.replace(chunk, token_ids=chunk.token_ids[-1:], sources=chunk.sources[max(0, last) :])


def _without(stats: SpeculationStats, sources: tuple[str, ...]) -> SpeculationStats:
    """Subtract accepted tokens after a stop string, whose sources these are."""
    dropped = Counter(sources)
    kept = {source: count - dropped[source] for source, count in stats.accepted_tokens.items()}
    return msgspec.structs.replace(stats, accepted_tokens={source: count for source, count in kept.items() if count})
