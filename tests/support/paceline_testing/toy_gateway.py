"""The gateway that most tests of its HTTP API ask: a toy tokenizer and model, and what tests send to it and read."""

import json
from typing import Any

import httpx

from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
END, START = TOKENIZER.convert_tokens_to_ids(["<|end|>", "<|start|>"])
MODEL = ServedModel(
    "toy",
    max_model_len=256,
    vocab_size=len(TOKENIZER),
    eos_token_ids=(END,),
    created=1,
    drafters=("suffix", "draft_model"),
    max_requests=80,
)
CONFIG = GatewayConfig(max_body_bytes=20_000, max_new_tokens=128, default_max_tokens=16, request_timeout_s=5)
FOX = "the quick brown fox"
MESSAGES = [{"role": "user", "content": "hello"}]


def tokens(text: str) -> list[int]:
    return TOKENIZER.backend_tokenizer.encode(text).ids


async def complete(client: httpx.AsyncClient, timeout_s: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if timeout_s is None else {"x-request-timeout-seconds": timeout_s}
    return await client.post("/v1/completions", json={"prompt": FOX, "temperature": 0, **fields}, headers=headers)


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Chunks of a stream that did not fail."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
