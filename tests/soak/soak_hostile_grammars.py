"""Constraints that try to stall, crash or fool a server, one after the other, while another stream runs.

    python tests/soak/soak_hostile_grammars.py [--seconds 15] [--runs 3]

A tiny model is served as in a cluster: the target is a process of its own; gateway and router share another. A client
in a third one reads a plain stream, and hostile requests come in portions with pauses between. Printed are the gaps
between the stream's chunks in pauses and beside hostile requests, how long these take, and the server's memory. Each of
them must be answered with 200 or with an error that names a field.
"""

from __future__ import annotations

import argparse
import asyncio
import io
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
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
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
from cluster.routing.router_status import RouterStatus
from paceline_testing.hostile_constraints import hostile_requests
from paceline_testing.tiny_models import save_tiny_model

MESSAGES = [{"role": "user", "content": "hi"}]
MOST_S = 5.0  # of a constraint, which is tried where nothing else runs
MOST_MEMORY_MB = 250  # 64 grammars are kept
PORTIONS = 5  # of the hostile requests
ORDINARY = 60  # requests with a small new schema before each portion: they have masks and rows, too


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


def run_target(directory: str, router_public: bytes, told: Connection) -> None:
    """Tells its address and what it serves. Ends with the process that reads that."""
    torch.set_num_threads(1)
    engine = LocalEngine(directory, device="cpu", drafters=(), kv_cache_tokens=16384)
    server, info = LinkServer(LinkKeys.generate(), [router_public]), engine._target_info(None)
    told.send((server.address, info))
    threading.Thread(target=WorkerLoop(Target(engine), server, info).run, daemon=True).start()
    with suppress(EOFError):
        told.recv()


async def serve(directory: str) -> None:
    """Prints its port."""
    context, router_keys = get_context("spawn"), LinkKeys.generate()
    mine, theirs = context.Pipe()
    context.Process(target=run_target, args=(directory, router_keys.public, theirs), daemon=True).start()
    engine = LocalEngine(directory, device="cpu", drafters=("auto",), kv_cache_tokens=16384)
    config = GatewayConfig(max_new_tokens=4000)
    address, info = mine.recv()
    connections = Connections(router_keys)
    driver = RouterDriver(engine.core, 30.0, draft_deadline_s=0.1, grammars=engine._grammars)
    entry = WorkerEntry("target", "target", address, info.incarnation)

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


def listen(url: str) -> None:
    """Reads plain streams, one after the other, until standard input ends. Then it writes when each chunk came, as
    `time.perf_counter` has it, and the time since the one before: float64 [n, 2]."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    fields = {"messages": MESSAGES, "max_tokens": 3000, "temperature": 1.0, "ignore_eos": True, "stream": True}
    fields["speculation"] = {"enabled": False}
    found: list[tuple[float, float]] = []
    with httpx.Client(timeout=60) as client:
        for seed in itertools.count():
            with client.stream("POST", url, json={**fields, "seed": seed}) as answer:
                last = None
                for line in answer.iter_lines():
                    if over.is_set():
                        np.save(sys.stdout.buffer, np.array(found))
                        return
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            found.append((now, now - last))
                        last = now


@dataclass
class Timeline:
    """When which hostile request was open, and when none was."""

    pauses: list[tuple[float, float]] = field(default_factory=list)
    requests: list[tuple[float, float, str]] = field(default_factory=list)

    def pause(self, seconds: float) -> None:
        started = time.perf_counter()
        time.sleep(seconds)
        self.pauses.append((started, time.perf_counter()))

    def gaps(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Milliseconds in pauses, and beside requests, with the names of these."""
        came, gap = chunks.T
        quiet = [1e3 * gap[(came - gap > start) & (came < end)] for start, end in self.pauses]
        starts, ends = np.array([request[:2] for request in self.requests]).T
        first = np.searchsorted(ends, came - gap)  # request that ended behind the gap's beginning
        is_beside = (first < len(ends)) & (starts[np.minimum(first, len(ends) - 1)] < came)
        names = [self.requests[index][2] for index in first[is_beside]]
        return np.concatenate(quiet), 1e3 * gap[is_beside], names


def megabytes(process: subprocess.Popen[str]) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def told(name: str, gaps: np.ndarray) -> str:
    marks = "  ".join(f"p{mark:g} {np.percentile(gaps, mark):.1f}" for mark in (50, 99, 99.9))
    return f"{name}: {len(gaps)} gaps, {marks}  max {gaps.max():.1f} ms"


def send_all(url: str, portions: int, pause_s: float) -> tuple[list[str], Timeline]:
    """What went wrong, and when each was open."""
    wrong, timeline, codes = [], Timeline(), Counter[int]()
    bodies = [(name, body_of(body)) for name, body in hostile_requests()]
    starts = {len(bodies) * portion // portions for portion in range(portions)}
    with httpx.Client(timeout=60, headers={"content-type": "application/json"}) as client:
        for index, (name, data) in enumerate(bodies):
            if index in starts and pause_s:
                timeline.pause(pause_s)
                for number in range(index, index + ORDINARY):
                    started = time.perf_counter()
                    assert client.post(url, content=body_of(ordinary(number))).status_code == 200
                    timeline.requests.append((started, time.perf_counter(), "ordinary"))
            started = time.perf_counter()
            answer = client.post(url, content=data)
            timeline.requests.append((started, time.perf_counter(), name))
            took_s = timeline.requests[-1][1] - started
            codes[answer.status_code] += 1
            error: dict[str, Any] = {} if answer.status_code == 200 else answer.json()["error"]
            is_too_busy = (
                answer.status_code == 429 and "could not be tried" in answer.text
            )  # the machine, with other work
            is_named = answer.status_code in (200, 400, 413) and not (error and not error.get("param"))
            if not is_named and not is_too_busy:
                wrong.append(f"{name}: {answer.status_code} {answer.text[:300]}")
            elif took_s > MOST_S:
                wrong.append(f"{name}: it took {took_s:.1f} s; {answer.status_code} {answer.text[:200]}")
            print(f"  {took_s:6.2f} s  {answer.status_code}  {name}: {str(error.get('message', ''))[:150]!r}")
    print(f"answers: {dict(codes)}")
    return wrong, timeline


def ordinary(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{number}": {"enum": ["a", "b"]}}, "required": [f"p{number}"]}
    return {"structured_outputs": {"json": schema}}


def body_of(fields: str | dict[str, Any]) -> bytes:
    common = {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0, "seed": 1}
    if isinstance(fields, str):
        return (json.dumps(common)[:-1] + ", " + fields.lstrip()[1:]).encode()
    return json.dumps({**common, **fields}).encode()


def run_once(directory: str, seconds: float) -> tuple[list[str], float, float]:
    """What went wrong, by how much the 99th percentile rises in milliseconds, and by how much the memory in MB."""
    command = [sys.executable, __file__, "--serve", directory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/chat/completions"
            httpx.post(url, json={"messages": MESSAGES, "guided_regex": "a", "max_tokens": 3}, timeout=60)
            command = [sys.executable, __file__, "--listen", url]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
                time.sleep(3.0)
                before = megabytes(process)
                wrong, timeline = send_all(url, PORTIONS, seconds / PORTIONS)
                after = megabytes(process)
                chunks = np.load(io.BytesIO(listener.communicate()[0]))
            send_all(url, 1, 0.0)
            again = megabytes(process)
        finally:
            process.terminate()
    alone, beside_any, kinds = timeline.gaps(chunks)
    is_ordinary = np.array([kind == "ordinary" for kind in kinds])
    beside, names = beside_any[~is_ordinary], [kind for kind in kinds if kind != "ordinary"]
    print(told("alone", alone), told("beside ordinary requests", beside_any[is_ordinary]), sep="\n")
    print(told("beside hostile requests", beside))
    longest = sorted(zip(beside, names, strict=True))[-12:]
    print("longest gaps: " + ", ".join(f"{name} {gap:.0f} ms" for gap, name in longest))
    print(f"memory {before:.0f} -> {after:.0f} -> {again:.0f} MB after a second time")
    took = sorted((end - start, name) for start, end, name in timeline.requests if name != "ordinary")
    print(f"{len(took)} requests, the longest: " + ", ".join(f"{name} {s:.1f} s" for s, name in took[-4:]))
    return wrong, float(np.percentile(beside, 99) - np.percentile(alone, 99)), after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of the plain stream alone, in each run")
    parser.add_argument("--runs", type=int, default=3, help="each with a new server")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve is not None:
        asyncio.run(serve(given.serve))
        return
    if given.listen is not None:
        listen(given.listen)
        return
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama", 5, layers=2, hidden_size=48, heads=4, kv_heads=2, max_positions=4096)
        runs = [run_once(directory, given.seconds) for _ in range(given.runs)]
    rises = [rise for _, rise, _ in runs]
    print(f"p99 rises by {np.median(rises):.1f} ms (median of {', '.join(f'{rise:.1f}' for rise in rises)})")
    wrong = [line for lines, _, _ in runs for line in lines]
    print(*(f"WRONG {line}" for line in wrong), sep="\n")
    sys.exit(bool(wrong) or max(memory for _, _, memory in runs) > MOST_MEMORY_MB)


if __name__ == "__main__":
    main()
