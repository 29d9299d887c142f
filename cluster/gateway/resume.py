"""Asks another router when the first one refuses a request, and continues a stream on another one
when its router is lost.

A token is a function of seed, position and logits, so a router that gets the prompt and the tokens delivered so far
continues exactly where the lost one stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal

import msgspec
import numpy as np

from actors.errors import Overloaded, RouterLost, Unavailable
from actors.messages import GenerationRequest, Refusal, TokenChunk
from cluster.gateway.router_client import RouterClient

logger = logging.getLogger(__name__)

# Before each retry, within the request's deadline. A standby router takes over a target group when the lost router's
# claim expires: see `actors.workers.directory`.
_PAUSES_S = (0.05, 0.5, 1.0, 1.5, 2.0, 2.5)


class UnbrokenStream:
    """One answer over one router after the other: what has been delivered, and what to do about an error. It has
    neither clock nor I/O."""

    def __init__(self, request: GenerationRequest, now: float) -> None:
        self.rest = request  # what to ask the next router for
        self._request = request
        self._started = now
        self._delivered: list[int] = []
        self._index = 0
        self._attempts = 0  # since the last chunk
        self._tries = 0

    def take(self, chunk: TokenChunk) -> TokenChunk:
        """A router's chunk as the client gets it."""
        self._delivered.extend(chunk.token_ids)
        self._attempts = 0
        if self._request.refusal is not None:  # it is of that time; the next router is chosen anew
            self._request = msgspec.structs.replace(self._request, refusal=None)
        if chunk.index != self._index:
            chunk = msgspec.structs.replace(chunk, index=self._index)
        self._index += 1
        return chunk

    @property
    def num_delivered(self) -> int:
        return len(self._delivered)

    def pause_after(self, error: Unavailable | Overloaded) -> float:
        """Seconds until the next router is asked. Raises the error if the client is to have it."""
        if isinstance(error, Overloaded):
            refusal = None
            if error.router_id:
                refusal = Refusal(error.router_id, error.retry_after_s)
            elif not self._delivered:
                raise error
            self._request = msgspec.structs.replace(self._request, refusal=refusal)
            return error.retry_after_s if refusal is None else 0.0
        may_go_on = self._index > 0 or isinstance(error, RouterLost)
        if not may_go_on or self._attempts == len(_PAUSES_S):
            raise error
        self._attempts += 1
        return _PAUSES_S[self._attempts - 1]

    def last_chunk(self) -> TokenChunk | None:
        """The chunk that ends the stream if only its finish reason was lost."""
        reason = _already_over(self._request, self._delivered)
        if reason is None:
            return None
        return TokenChunk(request_id=self._request.request_id, index=self._index, token_ids=(), finish_reason=reason)

    def within_deadline(self, pause_s: float, now: float) -> float:
        """The pause, cut at the request's deadline."""
        timeout_s = self._request.timeout_s
        return pause_s if timeout_s is None else min(pause_s, timeout_s - (now - self._started))

    def ask_again(self, now: float) -> None:
        """Make `rest` what is left now. It has a new id, since the same router may still be busy with the broken
        stream."""
        self._tries += 1
        rest = _rest_of(self._request, self._delivered, now - self._started)
        self.rest = msgspec.structs.replace(rest, request_id=f"{self._request.request_id}+{self._tries}")


async def generate_unbroken(
    router: RouterClient, request: GenerationRequest, on_resume: Callable[[], None]
) -> AsyncGenerator[TokenChunk, None]:
    """Chunks of `request`, numbered from 0, each token once. Statistics cover the last router's part only.

    Retries if the router is lost or on standby, or raises `Unavailable` after its first chunk; an `Unavailable` at the
    start is raised at once. After an `Overloaded` one other router is asked. If that one refuses, too, `Overloaded` is
    raised before the first token, and waited out without limit after it. The caller enforces the deadline; each router
    gets the remaining time.
    """
    stream = UnbrokenStream(request, time.monotonic())
    while True:
        try:
            async with aclosing(router.generate(stream.rest)) as chunks:
                async for chunk in chunks:
                    yield stream.take(chunk)
                    if chunk.finish_reason is not None:
                        return
            raise RouterLost("the router ended a stream without a finish reason")
        except (Unavailable, Overloaded) as error:
            pause_s = stream.pause_after(error)
            if isinstance(error, Unavailable):
                on_resume()
                logger.warning("%s: router lost after %d tokens", request.request_id, stream.num_delivered)
        if (last := stream.last_chunk()) is not None:
            yield last
            return
        await asyncio.sleep(stream.within_deadline(pause_s, time.monotonic()))
        stream.ask_again(time.monotonic())


def _already_over(request: GenerationRequest, delivered: list[int]) -> Literal["stop", "length"] | None:
    if delivered and delivered[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(delivered) >= request.max_new_tokens else None


def _rest_of(request: GenerationRequest, delivered: list[int], elapsed_s: float) -> GenerationRequest:
    if request.timeout_s is not None:
        request = msgspec.structs.replace(request, timeout_s=max(0.001, request.timeout_s - elapsed_s))
    if not delivered:
        return request
    return msgspec.structs.replace(
        request,
        prompt_token_ids=np.concatenate([request.prompt_token_ids, np.asarray(delivered, dtype=np.int32)]),
        num_output_in_prompt=request.num_output_in_prompt + len(delivered),
        max_new_tokens=request.max_new_tokens - len(delivered),
        num_prompt_logprobs=-1,  # they came with the first tokens
    )
