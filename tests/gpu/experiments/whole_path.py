"""The whole path without Ray: the router's core, links over loopback, and the engine in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from actors.drafters.registry import create_drafters
from actors.links.client import AsyncLink
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import LinkServer
from actors.messages import GenerationRequest, Hello, SamplingParams, TokenChunk, VerifyBatch, VerifyResult, WorkerInfo
from actors.workers.worker_loop import WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, run_round
from tests.gpu.experiments.setting import BLOCK, Setting

_ROUNDS = 3000


class NoDraftWorkers:
    async def ask(self, round: Any) -> None:
        pass

    async def collect(self, round: Any) -> dict[str, Any]:
        return {}


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    router_keys = LinkKeys.generate()
    addresses = context.Queue()
    target = context.Process(target=serve, args=(setting.is_dry, router_keys.public, addresses), daemon=True)
    target.start()
    try:
        address, info = addresses.get(timeout=setting.of(240, 60))
        outputs: dict[tuple[str, bool], dict[str, list[int]]] = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            for drafters in ((), ("prompt_lookup", "suffix")):
                run = asyncio.run(_run(setting, address, info, router_keys, drafters, temperature))
                outputs[name, bool(drafters)] = run.pop("texts")
                yield {"decoding": name, "drafters": " ".join(drafters) or "none", **run}
            plain, drafted = outputs[name, False], outputs[name, True]
            same = sum(plain[key] == drafted[key] for key in plain)
            yield {"decoding": name, "answers as without drafts": f"{same}/{len(plain)}", "equal": same == len(plain)}
    finally:
        target.terminate()
        target.join(30)


async def _run(
    setting: Setting, address: LinkAddress, info: WorkerInfo, keys: LinkKeys, drafters: tuple[str, ...],
    temperature: float,
) -> dict[str, Any]:  # fmt: skip
    link = AsyncLink(address, keys)
    stages: Counter[str] = Counter()
    stage, since = "end", time.perf_counter()

    def begin(name: str) -> None:
        nonlocal stage, since
        now = time.perf_counter()
        stages[stage] += now - since  # type: ignore[assignment]
        stage, since = name, now

    count, length = setting.of((16, 256), (2, 6))
    core = RouterCore(
        info, RouterConfig(max_running=count), SpeculationConfig(drafters=drafters or ("none",)),
        create_drafters(drafters),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    texts: dict[str, list[int]] = {}
    rounds = tokens = 0
    device_s = 0.0

    async def verify(batch: VerifyBatch) -> VerifyResult | None:
        nonlocal device_s
        answer = await link.call(batch, timeout_s=60.0)
        assert isinstance(answer, VerifyResult), answer
        device_s += answer.elapsed_s
        return answer

    def deliver(events: list[Any]) -> None:
        nonlocal tokens
        for event in events:
            assert isinstance(event, TokenChunk), event
            texts[event.request_id] += event.token_ids
            tokens += len(event.token_ids)

    try:
        await link.call(Hello(), timeout_s=60.0)
        started, most = time.perf_counter(), setting.of(_ROUNDS // 4, 20)
        while rounds < most:
            if not core.has_work:
                if len(texts) >= setting.of(64, 2):
                    break
                for index in range(len(texts), len(texts) + count):
                    prompt = np.tile(rng.integers(0, 200, 16), setting.of(8, 2)).astype(np.int32)
                    sampling = SamplingParams(seed=index, temperature=temperature)
                    core.add(
                        GenerationRequest(
                            request_id=f"r{index}", prompt_token_ids=prompt, max_new_tokens=length, sampling=sampling
                        ),
                        time.monotonic(),
                    )
                    texts[f"r{index}"] = []
            begin("plan")
            await run_round(core, NoDraftWorkers(), verify, RoundHooks(deliver=deliver, begin=begin))
            rounds += 1
        wall = time.perf_counter() - started
    finally:
        link.close()
    finished = {key: text for key, text in texts.items() if len(text) == length}
    return {
        "rounds": rounds, "tokens/s": tokens / wall, "tokens a round": tokens / rounds,
        "ms a round": wall / rounds * 1e3,
        "device ms": device_s / rounds * 1e3, "idle": 1 - device_s / wall,
        **{f"{name} ms": stages[name] / rounds * 1e3 for name in ("plan", "draft", "assemble", "verify", "commit")},
        "texts": finished,
    }  # fmt: skip


def serve(is_dry: bool, router_key: bytes, addresses: Any) -> None:
    """The target's process: an engine behind a link."""
    setting = Setting(is_dry)
    model = setting.model("8B")
    engine = setting.engine(model, setting.of(65536, 1024), is_eager=is_dry)
    server = LinkServer(LinkKeys.generate(), [router_key])
    info = WorkerInfo("target", 1, engine.vocab_size, setting.of(4096, 256), BLOCK, engine.options.num_blocks)
    addresses.put((server.address, info))
    WorkerLoop(engine, server, info).run()
