"""One streamed request over OpenAI's HTTP API, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from actors.errors import Unavailable
from cluster.cli.answer_stream import message_of, message_of_refusal, read_events_async
from cluster.cli.bench.prompts import BenchPrompt

_MAX_ERROR_CHARS = 200
_MAX_RETRY_AFTER_S = 60.0


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times in seconds; `error` empty: it succeeded."""

    name: str
    started: float = 0.0  # on the clock of its run
    ttft: float = 0.0
    latency: float = 0.0  # to the last chunk
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0  # 0: unknown
    draft_tokens: int = 0
    accepted_tokens: int = 0
    retries: int = 0  # sendings that were refused with 429
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class ServerCard:
    """What a server tells of itself."""

    model: str
    max_requests: int | None  # under way at a time; None: it does not say


async def send_request(
    client: httpx.AsyncClient, prompt: BenchPrompt, fields: dict[str, Any], epoch: float, max_retries: int = 0
) -> RequestRecord:
    """Send a prompt with the given body fields and read its stream to the end. Failures are in the record's `error`,
    never raised. `epoch`: the `time.perf_counter()` at which the run began. `max_retries`: how often it is sent again
    if the server is full; its times count from the first sending."""
    record = RequestRecord(prompt.name)
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    if prompt.messages:
        path, body["messages"] = "/v1/chat/completions", list(prompt.messages)
    else:
        path, body["prompt"] = "/v1/completions", list(prompt.token_ids)
    started = time.perf_counter()
    record.started = started - epoch
    try:
        while (wait_s := await _send(client, path, body, record, started)) is not None:
            if record.retries == max_retries:
                break
            record.retries, record.error = record.retries + 1, ""
            await asyncio.sleep(wait_s)
    except Unavailable as error:
        record.error = str(error)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].rstrip(": ")
    return record


async def _send(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], record: RequestRecord, started: float
) -> float | None:
    """Seconds after which to send it again if the server is full, else None."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code == 200:
            await _read_stream(response, record, started)
            return None
        record.error = f"HTTP {response.status_code}: {message_of_refusal(await response.aread())}"
        return _retry_after_s(response) if response.status_code == 429 else None


def _retry_after_s(response: httpx.Response) -> float:
    """1 where the header is missing or a date."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return 1.0
    return min(max(0.0, seconds), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else 1.0


async def server_card(client: httpx.AsyncClient) -> ServerCard:
    """The first model that the server lists. Raises Unavailable."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        listed = response.json()["data"][0]
        most = listed.get("max_requests")
        return ServerCard(str(listed["id"]), most if isinstance(most, int) and most > 0 else None)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise Unavailable(
            f"{str(client.base_url).rstrip('/')}/v1/models does not list a model: {reason}; is the server running?"
        ) from None


async def _read_stream(response: httpx.Response, record: RequestRecord, started: float) -> None:
    """Raises Unavailable for what is no stream of chunks."""
    has_ended = False
    async with aclosing(read_events_async(response.aiter_bytes())) as events:
        async for event in events:
            now = time.perf_counter() - started
            if event.error is not None:
                record.error = message_of(event.error)
                return
            if event.usage is not None:
                record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            if event.speculation is not None:
                record.rounds, record.draft_tokens = event.speculation.rounds, event.speculation.draft_tokens
                record.accepted_tokens = sum(event.speculation.accepted_tokens.values())
            has_ended = has_ended or any(choice.finish_reason is not None for choice in event.choices)
            has_text = any(choice.new_text for choice in event.choices)
            if has_text and record.ttft:
                record.itls.append(now - record.latency)
            if has_text or (event.choices and has_ended):
                record.ttft = record.ttft or now
                record.latency = now
    if not has_ended:
        record.error = "the stream ended without a finish reason"
    elif not record.prompt_tokens:
        record.error = "the stream ended without usage"
