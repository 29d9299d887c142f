"""A cluster that is stopped and started again drafts from what it generated before, and says the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline_testing.free_ports import free_ports
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"{word} and {word}, then again {word}" for word in ("oak", "elm", "ash")]
NEW_TOKENS = 100
READY_WITHIN_S = 400.0


@contextmanager
def serving(home: Path, model: Path) -> Iterator[httpx.Client]:
    """`paceline serve` until the end of the block, then Ctrl-C; it must end in order."""
    http_port, grpc_port = free_ports(2)
    settings = {
        "target": {
            "model": str(model),
            "device": "cpu",
            "exact": "bitwise",
            "kv_cache_tokens": 8192,
            "health_timeout_s": 60.0,
        },
        "draft": {"model": "none"},
        "speculation": {"drafters": ["cache"]},
        "gateway": {"http_port": http_port, "grpc_port": grpc_port},
    }
    config = home / "cluster.yaml"
    config.write_text(json.dumps(settings))
    command = [str(Path(sys.executable).with_name("paceline")), "serve", str(config)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PACELINE_HOME": str(home)}
    with (
        subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as client,
    ):
        try:
            wait_for(lambda: is_ready(server, client), "readiness")
            yield client
            server.send_signal(signal.SIGINT)
            printed, _ = server.communicate(timeout=90)
            assert server.returncode == 0, printed
            assert f"cache   {home / 'cache'}, a server of its own" in printed
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def is_ready(server: subprocess.Popen[str], client: httpx.Client) -> bool:
    assert server.poll() is None, server.communicate()[0]
    try:
        return client.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {READY_WITHIN_S} s"
        time.sleep(0.1)


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    return value_of(client.get("/metrics").text, name, **labels)


def ask(client: httpx.Client) -> tuple[list[str], int, int]:
    """What is said to PROMPTS, the rounds it took, and the tokens accepted from the cache."""
    texts, rounds, accepted = [], 0, 0
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json={**body, "speculation": {"stats": True}})
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        stats = answer.json()["speculation"]
        rounds += stats["rounds"]
        accepted += stats["accepted_tokens"].get("cache", 0)
    return texts, rounds, accepted


@pytest.mark.timeout(900)  # two starts of Ray, which others on the machine may slow down
def test_what_was_generated_before_a_restart_is_drafted_after_it_and_the_answer_is_the_same(tmp_path):
    model = save_tiny_model(tmp_path / "model", "llama", 5, layers=4, hidden_size=96, heads=6, kv_heads=3)
    home = tmp_path / "home"
    home.mkdir()
    with serving(home, model) as client:
        texts, rounds_before, _ = ask(client)
        wait_for(lambda: metric(client, "paceline_cache_written_tokens_total") >= len(PROMPTS) * NEW_TOKENS, "a write")
    with serving(home, model) as client:
        wait_for(lambda: metric(client, "paceline_cache_index_tokens") >= len(PROMPTS) * NEW_TOKENS, "the index")
        again, rounds_after, accepted = ask(client)
        assert again == texts
        assert accepted > len(PROMPTS) * NEW_TOKENS / 2
        assert rounds_after < rounds_before / 2
        assert metric(client, "paceline_spec_decode_num_accepted_tokens_total", source="cache") == accepted
