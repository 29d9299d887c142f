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


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: dict[str, Any] | None = None  # of a chat
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Speculation(msgspec.Struct):
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: dict[str, int] = {}


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    speculation: _Speculation | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


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
            event = _decoder.decode(data)
        except msgspec.DecodeError as error:
            record.error = f"the stream held what is not a chunk: {error}"
            return
        if event.error is not None:
            record.error = _message_of(event.error)
            return
        if event.usage is not None:
            record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if event.speculation is not None:
            record.rounds, record.draft_tokens = event.speculation.rounds, event.speculation.draft_tokens
            record.accepted_tokens = sum(event.speculation.accepted_tokens.values())
        for choice in event.choices:
            is_last = choice.finish_reason is not None
            has_ended |= is_last
            if choice.text or (choice.delta or {}).get("content"):
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


def _error_message(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:_MAX_ERROR_CHARS]
    return _message_of(answer["error"] if isinstance(answer, dict) and "error" in answer else answer)


def _message_of(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_ERROR_CHARS]
