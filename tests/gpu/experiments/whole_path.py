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
from actors.messages import (
    GenerationRequest,
    Hello,
    SamplingParams,
    TokenChunk,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.worker_loop import WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, run_rounds
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
        for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            plain: dict[str, list[int]] | None = None
            for drafters in ((), ("prompt_lookup", "suffix")):
                for mode in ("off", "auto", "on"):
                    run = asyncio.run(_run(setting, address, info, router_keys, drafters, mode, temperature))
                    texts = run.pop("texts")
                    plain = texts if plain is None else plain
                    both = plain.keys() & texts.keys()  # runs end after a number of rounds
                    same = sum(plain[key] == texts[key] for key in both)
                    yield {
                        "decoding": name, "drafters": " ".join(drafters) or "none", "rounds ahead": mode, **run,
                        "as plain serial rounds": f"{same}/{len(both)}", "equal": same == len(both),
                    }  # fmt: skip
    finally:
        target.terminate()
        target.join(30)


async def _run(
    setting: Setting, address: LinkAddress, info: WorkerInfo, keys: LinkKeys, drafters: tuple[str, ...], mode: str,
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
        info, RouterConfig(max_running=count, send_ahead=mode), SpeculationConfig(drafters=drafters or ("none",)),
        create_drafters(drafters),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    texts: dict[str, list[int]] = {}
    rounds = tokens = 0
    device_s = 0.0

    async def verify(message: VerifyBatch | VerifyAhead) -> VerifyResult | None:
        nonlocal device_s, rounds
        answer = await link.call(message, timeout_s=60.0)
        assert isinstance(answer, VerifyResult), answer
        device_s += answer.elapsed_s
        rounds += bool(answer.verdicts)
        return answer

    def deliver(events: list[Any]) -> None:
        nonlocal tokens
        for event in events:
            assert isinstance(event, TokenChunk), event
            texts[event.request_id] += event.token_ids
            tokens += len(event.token_ids)

    try:
        await link.call(Hello(), timeout_s=60.0)
        started, most = time.perf_counter(), setting.of(_ROUNDS // 12, 20)
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
            await run_rounds(core, NoDraftWorkers(), verify, RoundHooks(deliver=deliver, begin=begin))
        wall = time.perf_counter() - started
    finally:
        link.close()
    finished = {key: text for key, text in texts.items() if len(text) == length}
    return {
        "rounds": rounds, "tokens/s": tokens / wall, "tokens a round": tokens / rounds,
        "ms a round": wall / rounds * 1e3,
        "ahead": f"{core.counters.ahead_used}/{core.counters.ahead_sent}",
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
