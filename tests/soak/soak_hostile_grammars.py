"""Constraints that try to stall, crash or fool a server, one after the other, while another stream runs.

    python tests/soak/soak_hostile_grammars.py [--seconds 15]

The server is a process of its own: gateway, router and target with a tiny model, which share one interpreter (in a
cluster they do not). Printed are the gaps between the tokens of a plain stream without and with hostile requests, how
long these take, and the server's memory. Each of them must be answered with 200 or with an error that names a field.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn

from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import GenerationRequest, MasksSource, TokenChunk, VerifyBatch, VerifyResult
from actors.workers.directory import WorkerEntry
from actors.workers.worker_loop import WorkerLoop
from cluster.gateway.http_app import create_app
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.interpreter import put_event_loop_first
from cluster.offline.engine import LocalEngine
from cluster.router.connections import Connections, keep_connected
from cluster.router.driver import RouterDriver
from cluster.router.status import RouterStatus
from paceline_testing.hostile_constraints import hostile_requests
from paceline_testing.tiny_models import save_tiny_model

MESSAGES = [{"role": "user", "content": "hi"}]
MOST_S = 3.0
MOST_MEMORY_MB = 100


class Target:
    """A local engine's target as a worker."""

    def __init__(self, engine: LocalEngine) -> None:
        self._target = engine.target

    def answer(self, batch: VerifyBatch, masks: MasksSource | None = None) -> VerifyResult:
        return self._target.verify(batch, masks)

    def clear(self) -> None:
        raise AssertionError("no router leaves here")


class DriverRouter:
    """A `RouterClient` of a router in this process."""

    def __init__(self, driver: RouterDriver) -> None:
        self._driver = driver

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._driver.generate(request)

    async def status(self) -> RouterStatus:
        return RouterStatus(ready=True, live=True, detail="driver", max_model_len=None)

    async def metrics_text(self) -> str:
        return ""


async def serve(directory: Path) -> None:
    """Prints its port."""
    engine = LocalEngine(str(directory), device="cpu", drafters=("auto",), kv_cache_tokens=16384)
    config = GatewayConfig(max_new_tokens=4000)
    router_keys, info = LinkKeys.generate(), engine._target_info(None)
    server = LinkServer(LinkKeys.generate(), [router_keys.public])
    loop = WorkerLoop(Target(engine), server, info)
    threading.Thread(target=loop.run, daemon=True).start()
    connections = Connections(router_keys)
    driver = RouterDriver(engine.core, 30.0, draft_deadline_s=0.1, grammars=engine._grammars)
    entry = WorkerEntry("target", "target", server.address, info.incarnation)

    async def list_workers() -> tuple[list[WorkerEntry], str | None]:
        return [entry], "target"

    following = asyncio.create_task(keep_connected(connections, list_workers, lambda: driver.follow(connections)))
    model = ServedModel(
        engine.info.name, engine.core.max_model_len, engine.target.vocab_size, engine.info.eos_token_ids,
        drafters=engine.core.source_names,
    )  # fmt: skip
    service = GenerationService(DriverRouter(driver), engine.tokenizer, model, config)  # type: ignore[arg-type]
    web = uvicorn.Server(uvicorn.Config(create_app(service, config), port=0, log_level="error", lifespan="off"))
    running = asyncio.create_task(web.serve())
    while not web.started or not driver.has_target:  # noqa: ASYNC110 (neither has an event for it)
        await asyncio.sleep(0.01)
    put_event_loop_first()
    print(web.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.gather(running, following)


class Gaps:
    """Times between the chunks of plain streams, one after the other, until stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.seconds: list[float] = []
        self.during: list[str] = []  # the hostile request of that time
        self.name = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        fields = {"messages": MESSAGES, "max_tokens": 3000, "temperature": 1.0, "ignore_eos": True, "stream": True}
        fields["speculation"] = {"enabled": False}
        with httpx.Client(timeout=60) as client:
            for seed in itertools.count():
                with client.stream("POST", self._url, json={**fields, "seed": seed}) as answer:
                    last = None
                    for line in answer.iter_lines():
                        if self._is_over.is_set():
                            return
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                self.seconds.append(now - last)
                                self.during.append(self.name)
                            last = now

    def stop(self) -> np.ndarray:
        """Milliseconds."""
        self._is_over.set()
        self._thread.join()
        return 1e3 * np.array(self.seconds)


def megabytes(process: subprocess.Popen[str]) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def told(name: str, gaps: np.ndarray) -> str:
    marks = "  ".join(f"p{mark:g} {np.percentile(gaps, mark):.1f}" for mark in (50, 99, 99.9))
    return f"{name}: {len(gaps)} gaps, {marks}  max {gaps.max():.1f} ms"


def send_all(url: str, gaps: Gaps) -> tuple[list[str], list[tuple[float, str]]]:
    """What went wrong, and how long each took."""
    wrong, took, codes = [], [], Counter[int]()
    with httpx.Client(timeout=60, headers={"content-type": "application/json"}) as client:
        for name, body in hostile_requests():
            common = {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0, "seed": 1}
            if isinstance(body, str):
                data = json.dumps(common)[:-1] + ", " + body.lstrip()[1:]
            else:
                data = json.dumps({**common, **body})
            started, gaps.name = time.perf_counter(), name
            answer = client.post(url, content=data.encode())
            took.append((time.perf_counter() - started, name))
            codes[answer.status_code] += 1
            error: dict[str, Any] = {} if answer.status_code == 200 else answer.json()["error"]
            is_too_busy = (
                answer.status_code == 429 and "could not be tried" in answer.text
            )  # the machine, with other work
            is_named = answer.status_code in (200, 400, 413) and not (error and not error.get("param"))
            if not is_named and not is_too_busy:
                wrong.append(f"{name}: {answer.status_code} {answer.text[:300]}")
            elif took[-1][0] > MOST_S:
                wrong.append(f"{name}: it took {took[-1][0]:.1f} s; {answer.status_code} {answer.text[:200]}")
            print(f"  {took[-1][0]:6.2f} s  {answer.status_code}  {name}: {str(error.get('message', ''))[:150]!r}")
    print(f"answers: {dict(codes)}")
    return wrong, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of the plain stream alone")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve is not None:
        asyncio.run(serve(given.serve))
        return
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama", 5, layers=2, hidden_size=48, heads=4, kv_heads=2, max_positions=4096)
        command = [sys.executable, __file__, "--serve", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/chat/completions"
                httpx.post(url, json={"messages": MESSAGES, "guided_regex": "a", "max_tokens": 3}, timeout=60)
                gaps = Gaps(url)
                time.sleep(given.seconds)
                alone, before = gaps.stop(), megabytes(process)
                gaps = Gaps(url)
                wrong, took = send_all(url, gaps)
                beside, after = gaps.stop(), megabytes(process)
                send_all(url, gaps)
                again = megabytes(process)
            finally:
                process.terminate()
    print(told("alone", alone), told("beside hostile requests", beside), sep="\n")
    longest = sorted(zip(beside, gaps.during, strict=True))[-8:]
    print("longest gaps: " + ", ".join(f"{name} {gap:.0f} ms" for gap, name in longest))
    print(f"p99 rises by {np.percentile(beside, 99) - np.percentile(alone, 99):.1f} ms")
    print(f"memory {before:.0f} -> {after:.0f} -> {again:.0f} MB after a second time")
    print(f"{len(took)} requests, the longest: " + ", ".join(f"{name} {s:.1f} s" for s, name in sorted(took)[-4:]))
    print(*(f"WRONG {line}" for line in wrong), sep="\n")
    sys.exit(bool(wrong) or after - before > MOST_MEMORY_MB)


if __name__ == "__main__":
    main()
