"""One streamed request over OpenAI's HTTP API, timed chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

from actors.errors import Unavailable
from cluster.bench.prompts import BenchPrompt
from cluster.bench.serve_metrics import RequestRecord

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
                record.error = f"HTTP {response.status_code}: {_error_message(await response.aread())}"
                return record
            await _read_stream(response, record, started)
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
    last_text = 0.0
    has_ended = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        now = time.perf_counter() - started
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            record.error = "the stream held something that is not JSON"
            return
        if event.get("error"):
            record.error = _message_of(event)
            return
        if event.get("usage"):
            record.prompt_tokens = event["usage"]["prompt_tokens"]
            record.output_tokens = event["usage"]["completion_tokens"]
        if event.get("speculation"):
            _note_speculation(record, event["speculation"])
        for choice in event.get("choices", ()):
            is_last = choice.get("finish_reason") is not None
            has_ended |= is_last
            if choice.get("text") or choice.get("delta", {}).get("content"):
                if last_text:
                    record.itls.append(now - last_text)
                else:
                    record.ttft = now
                last_text = now
                record.latency = now
            elif is_last:
                record.latency = now
                record.ttft = record.ttft or now  # an answer without any text
    if not has_ended:
        record.error = "the stream ended without a finish reason"
    elif not record.prompt_tokens:
        record.error = "the stream ended without usage"


def _note_speculation(record: RequestRecord, speculation: dict[str, Any]) -> None:
    record.rounds = speculation.get("rounds", 0)
    record.draft_tokens = speculation.get("draft_tokens", 0)
    record.accepted_tokens = sum(speculation.get("accepted_tokens", {}).values())


def _error_message(body: bytes) -> str:
    try:
        return _message_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:_MAX_ERROR_CHARS]


def _message_of(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else answer)[:_MAX_ERROR_CHARS]
