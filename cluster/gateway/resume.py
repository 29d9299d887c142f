"""Continues a stream on another router when its router is lost.

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
from actors.messages import GenerationRequest, TokenChunk
from cluster.gateway.router_client import RouterClient

logger = logging.getLogger(__name__)

# Before each retry, within the request's deadline. A standby router takes over a target group when the lost router's
# claim expires: see `actors.workers.directory`.
_PAUSES_S = (0.05, 0.5, 1.0, 1.5, 2.0, 2.5)


async def generate_unbroken(
    router: RouterClient, request: GenerationRequest, on_resume: Callable[[], None]
) -> AsyncGenerator[TokenChunk, None]:
    """Chunks of `request`, numbered from 0, each token once. Statistics cover the last router's part only.

    Retries if the router is lost or on standby, or raises `Unavailable` after its first chunk; an `Unavailable` at the
    start is raised at once. `Overloaded` is raised before the first token, and waited out without limit after it. The
    caller enforces the deadline; each router is told the time left.
    """
    started = time.monotonic()
    delivered: list[int] = []
    index = 0
    attempts = 0
    rest = request
    tries = 0
    while True:
        try:
            async with aclosing(router.generate(rest)) as chunks:
                async for chunk in chunks:
                    delivered.extend(chunk.token_ids)
                    attempts = 0
                    if chunk.index != index:
                        chunk = msgspec.structs.replace(chunk, index=index)
                    index += 1
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            raise RouterLost("the router ended a stream without a finish reason")
        except Unavailable as error:
            may_go_on = index > 0 or isinstance(error, RouterLost)
            if not may_go_on or attempts == len(_PAUSES_S):
                raise
            pause_s = _PAUSES_S[attempts]
            attempts += 1
            on_resume()
            logger.warning("%s: router lost after %d tokens", request.request_id, len(delivered))
        except Overloaded as error:
            if not delivered:
                raise
            pause_s = error.retry_after_s
        if (reason := _already_over(request, delivered)) is not None:  # only the finish reason was lost
            yield TokenChunk(request_id=request.request_id, index=index, token_ids=(), finish_reason=reason)
            return
        elapsed_s = time.monotonic() - started
        await asyncio.sleep(pause_s if request.timeout_s is None else min(pause_s, request.timeout_s - elapsed_s))
        tries += 1
        # A new id, since the same router may still be busy with the broken stream.
        rest = msgspec.structs.replace(
            _rest_of(request, delivered, time.monotonic() - started), request_id=f"{request.request_id}+{tries}"
        )


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
