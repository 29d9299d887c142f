"""One answer to a call: pieces of text from the router's tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

import msgspec

from actors.errors import DeadlineExceeded, Unavailable
from actors.messages import TokenChunk, TokenLogprobs
from cluster.gateway.answers.account import AnswerAccount
from cluster.gateway.answers.logprobs import TokenScore, token_scores
from cluster.gateway.answers.piece import Piece, joined
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.text import AnswerText
from cluster.gateway.errors import status_of, unwrap
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient

logger = logging.getLogger(__name__)


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
        self._account = AnswerAccount(prepared, choice, metrics)
        self._num_cached = 0
        self._prompt_scores: tuple[TokenScore, ...] = ()  # that no piece has yet

    async def pieces(self, router: RouterClient, by_token: bool) -> AsyncGenerator[Piece, None]:
        """Pieces of text, the last one with finish reason and counts. by_token: one piece a token, even if empty.

        Raises DeadlineExceeded, Unavailable, and what the router raises.
        """
        self._account.begin()
        outcome = "cancelled"
        try:
            chunks = generate_unbroken(router, self._request, self._account.resume)
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
            self._account.end(outcome, self._text.num_tokens)

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
            self._account.count_tokens(len(chunk.token_ids), now)
        if not prepared.scope.has_company:
            self._num_cached = max(self._num_cached, chunk.num_cached_tokens)
        num_before = text.num_tokens
        pieces = self._pieces_of(chunk, by_token)
        num_new = text.num_tokens - num_before
        if prepared.arrival.tenant is not None:
            prepared.arrival.tenant.limiter.spend(num_new)
        self._account.note_chunk(chunk, num_new, now)
        if pieces and (finish_reason := pieces[-1].finish_reason) is not None:
            pieces[-1] = replace(pieces[-1], num_cached_tokens=self._num_cached, stats=self._account.stats)
            self._account.succeed(finish_reason, now)
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
            scores_shown = call.options.logprobs is not None
            prompt_scores = self._scores_of_prompt(chunk.prompt_logprobs, call.options.num_logprobs)
            pieces.insert(0, Piece(self._choice, self._echoed, scores=prompt_scores if scores_shown else ()))
            self._echoed = None
        if call.prompt_logprobs is not None:
            self._prompt_scores = (
                self._scores_of_prompt(chunk.prompt_logprobs, call.prompt_logprobs) or self._prompt_scores
            )
            if pieces:
                pieces[0] = replace(pieces[0], prompt_scores=self._prompt_scores)
                self._prompt_scores = ()
        if call.hides_answer:
            pieces = [replace(pieces[0], finish_reason="length")]
        return [joined(pieces)] if pieces and not by_token else pieces

    def _scores_of_prompt(self, logprobs: TokenLogprobs | None, num_top: int) -> tuple[TokenScore, ...]:
        """logprobs: of all tokens but the first. None: they are not in this chunk."""
        if logprobs is None:
            return ()
        first, *others = self._request.prompt_token_ids.tolist()
        scores = (replace(score, top=score.top[:num_top]) for score in token_scores(others, logprobs))
        return (TokenScore(first, None), *scores)


def _by_token(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Split a chunk into one for each token; the last has the finish reason."""
    last = len(chunk.token_ids) - 1
    for index, token in enumerate(chunk.token_ids[:-1]):
        source = chunk.sources[index : index + 1]
        yield msgspec.structs.replace(chunk, token_ids=(token,), sources=source, finish_reason=None)
    if chunk.token_ids or chunk.finish_reason is not None:
        yield msgspec.structs.replace(chunk, token_ids=chunk.token_ids[-1:], sources=chunk.sources[max(0, last) :])
