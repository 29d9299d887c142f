"""One streamed request over OpenAI's HTTP API, timed chunk by chunk."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from actors.errors import Unavailable
from cluster.cli.answer_stream import message_of, message_of_refusal, read_events_async
from cluster.cli.bench.prompts import BenchPrompt

_MAX_ERROR_CHARS = 200


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
    error: str = ""

    @property
    def tpot(self) -> float | None:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


async def send_request(
    client: httpx.AsyncClient, prompt: BenchPrompt, fields: dict[str, Any], epoch: float
) -> RequestRecord:
    """Send a prompt with the given body fields and read its stream to the end. Failures are in the record's `error`,
    never raised. `epoch`: the `time.perf_counter()` at which the run began."""
    record = RequestRecord(prompt.name)
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    if prompt.messages:
        path, body["messages"] = "/v1/chat/completions", list(prompt.messages)
    else:
        path, body["prompt"] = "/v1/completions", list(prompt.token_ids)
    started = time.perf_counter()
    record.started = started - epoch
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code == 200:
                await _read_stream(response, record, started)
            else:
                record.error = f"HTTP {response.status_code}: {message_of_refusal(await response.aread())}"
    except Unavailable as error:
        record.error = str(error)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].rstrip(": ")
    return record


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists. Raises Unavailable."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
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
