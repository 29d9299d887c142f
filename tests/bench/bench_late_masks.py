"""What grammar masks cost a round in a cluster: a router and a target in two processes, joined by a link.

python tests/bench/bench_late_masks.py MODEL_DIR [--sequences 8] [--tokens 100] [--device-ms 0] [--vocabulary]

Printed are quartiles and the 95th percentile, in milliseconds a round in which all sequences take part: the router's
time for computing masks and for encoding and sending them, and the target's time between the end of its forward and its
having the masks, which is all that is left on the round's critical path; and what it then does with them.

--device-ms: added to every forward without using the processor, as an accelerator does.
--vocabulary: MODEL_DIR is made, with a random model that has 128,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_grammar_masks import make_tokenizer

from actors.engine import host_rounds, target_engine
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.messages import GenerationRequest, RoundMasks
from actors.models.source import ModelSource
from actors.options import TargetGroupOptions
from actors.workers.directory import WorkerEntry
from actors.workers.settings import TargetSettings
from actors.workers.target_worker import TargetWorker
from cluster.cli.bench.tools_task import TOOLS
from cluster.generation import generation_options
from cluster.offline.engine import LocalEngine
from cluster.router.connections import Connections, keep_connected
from cluster.router.driver import RouterDriver
from paceline_testing.tiny_models import save_tiny_model

Times = dict[str, list[float]]
PROMPT = "Call the tool {tool} with arguments of your choice, as JSON."


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        found = call(*given, **named)
        times.append(time.perf_counter() - started)
        return found

    return run


def serve(directory: Path, public_key: bytes, device_ms: float, pipe: Any) -> None:
    """The target, until the pipe says to stop; then it sends its times."""
    times: Times = defaultdict(list)
    torch.set_num_threads(1)
    options = TargetGroupOptions(device="cpu", kv_cache_tokens=16384, threads=1)
    worker = TargetWorker(TargetSettings(ModelSource("bench", "bench", directory), options), 0, 1)
    worker.load(None)
    assert worker._engine is not None
    if device_ms:
        worker._engine.model.register_forward_hook(lambda *_: time.sleep(device_ms / 1e3))
    target_engine.row_masks = timed(target_engine.row_masks, times["target joins masks"])
    host_rounds.sample_tokens = timed(host_rounds.sample_tokens, times["target draws within masks"])
    worker.start("127.0.0.1")
    assert worker.server is not None
    assert worker.loop is not None
    inbox = worker.loop._inbox
    masks_of = inbox.masks_of

    def timed_masks_of(*given: Any) -> Any:
        source = masks_of(*given)
        return None if source is None else timed(source, times["target waits for masks"])

    inbox.masks_of = timed_masks_of  # type: ignore[method-assign]
    worker.server.allow([public_key])
    pipe.send((worker.server.address, worker.loop._info))
    pipe.recv()
    pipe.send(dict(times))
    worker.stop()


async def route(engine: LocalEngine, entry: WorkerEntry, keys: LinkKeys, sequences: int, tokens: int) -> Times:
    """Answers `sequences` requests at a time, each within the schema of a tool."""
    times: Times = defaultdict(list)
    connections = Connections(keys)
    driver = RouterDriver(engine.core, 60.0, draft_deadline_s=0.1, grammars=engine._grammars)

    async def list_workers() -> tuple[list[WorkerEntry], str | None]:
        return [entry], "target"

    following = asyncio.create_task(keep_connected(connections, list_workers, lambda: driver.follow(connections)))
    while not driver.has_target:  # noqa: ASYNC110 (it has no event for it)
        await asyncio.sleep(0.01)
    core_masks, send = engine.core.masks, AsyncLink._send
    compute = timed(core_masks, times["router computes masks"])
    sizes: list[int] = []

    def masks() -> RoundMasks:
        started = time.perf_counter()
        found: RoundMasks = compute()
        times["masks after the batch"].append(time.perf_counter() - started)
        return found

    def timed_send(link: AsyncLink, frame: bytes) -> None:
        sizes.append(len(frame))
        kind = "masks" if frame[6:].startswith(b"\x93\xa5masks") else "another frame"
        timed(send, times[f"router sends {kind}"])(link, frame)

    engine.core.masks = masks  # type: ignore[method-assign]
    AsyncLink._send = timed_send  # type: ignore[method-assign]

    async def answer(request: GenerationRequest) -> int:
        count = 0
        async with aclosing(driver.generate(request)) as chunks:
            async for chunk in chunks:
                count += len(chunk.token_ids)
        return count

    async def stream(index: int) -> int:
        count = 0
        for turn in range(3):
            tool = list(TOOLS)[(index + turn) % len(TOOLS)]
            options = generation_options(
                structured_outputs={"json": TOOLS[tool]}, max_new_tokens=tokens, temperature=1.0, seed=10 * index + turn
            )
            (request,) = engine._requests.make([("prompt", PROMPT.format(tool=tool))], options, ())
            count += await answer(request)
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*[stream(index) for index in range(sequences)])
    seconds = time.perf_counter() - started
    counters = engine.core.counters
    print(f"{sum(counts)} tokens in {seconds:.1f} s, {len(times['router computes masks'])} rounds with masks")
    print(f"{counters.stale_sequences} stale sequences, {counters.abandoned_rounds} abandoned rounds")
    print(f"largest frame: {max(sizes)} bytes")
    following.cancel()
    driver.close()
    connections.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--vocabulary", action="store_true")
    arguments = parser.parse_args()
    if arguments.vocabulary:
        if arguments.directory.exists():
            parser.error(f"MODEL_DIR is {arguments.directory}, which exists; --vocabulary makes a new one")
        tokenizer = make_tokenizer()
        save_tiny_model(arguments.directory, "llama", layers=2, vocab_size=len(tokenizer), hidden_size=32)
        tokenizer.save_pretrained(arguments.directory)
    keys = LinkKeys.generate()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    context = multiprocessing.get_context("spawn")
    target = context.Process(target=serve, args=(arguments.directory, keys.public, arguments.device_ms, theirs))
    target.start()
    torch.set_num_threads(1)
    engine = LocalEngine(str(arguments.directory), device="cpu", drafters=("auto",), kv_cache_tokens=16384)
    address, info = ours.recv()
    entry = WorkerEntry("target", "target", address, info.incarnation)
    times = asyncio.run(route(engine, entry, keys, arguments.sequences, arguments.tokens))
    ours.send("stop")
    for name, seconds in {**times, **ours.recv()}.items():
        quarters = np.quantile(np.array(seconds) * 1e3, (0.25, 0.5, 0.75, 0.95))
        print(f"{name} ({len(seconds)}):", *(f"{value:.3f}" for value in quarters))
    target.join()


if __name__ == "__main__":
    main()
