"""One streamed request over OpenAI's HTTP API, timed chunk by chunk."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import httpx

from actors.errors import Unavailable
from cluster.cli.answer_stream import message_of, message_of_refusal, read_events_async
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.serve_metrics import RequestRecord

_MAX_ERROR_CHARS = 200


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
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {message_of_refusal(await response.aread())}"
                return record
            await _read_stream(response, record, started)
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
        raise Unavailable(f"{client.base_url}v1/models does not list a model: {reason}") from None


async def _read_stream(response: httpx.Response, record: RequestRecord, started: float) -> None:
    """Raises Unavailable for what is no stream of chunks."""
    last_text = 0.0
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
            for choice in event.choices:
                is_last = choice.finish_reason is not None
                has_ended |= is_last
                if choice.new_text:
                    if last_text:
                        record.itls.append(now - last_text)
                    else:
                        record.ttft = now
                    record.latency = last_text = now
                elif is_last:
                    record.latency = now
                    record.ttft = record.ttft or now  # an answer without any text
    if not has_ended:
        record.error = "the stream ended without a finish reason"
    elif not record.prompt_tokens:
        record.error = "the stream ended without usage"
