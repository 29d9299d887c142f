"""The whole path without Ray: the router's core, links over loopback, and the engine in a process of its own.

The target has the size of an 8B and says what can be predicted: see `predictable`. So drafters of the router are right
with a probability that the temperature decides, and what a round costs is that of random weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.drafters.registry import create_drafters
from actors.engine.warm_up import record_rounds, warm_up
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
from cluster.router.prefill_budget import round_limits
from cluster.router.run_round import RoundHooks, run_rounds
from tests.gpu.experiments.lossless import common
from tests.gpu.experiments.setting import BLOCK, Setting

_CYCLE = 64  # tokens
_SHARES = (1.0, 0.9, 0.8)  # of tokens that follow the cycle; 1: greedy
_COUNTS = (1, 8, 32)  # sequences
_DRAFTERS = ("prompt_lookup", "suffix")


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
        address, info, cycle, temperatures = addresses.get(timeout=setting.of(240, 60))
        yield {"step ms": " ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in info.step_times)}
        for share, temperature in list(zip(_SHARES, temperatures, strict=True))[: setting.of(3, 2)]:
            for count in setting.of(_COUNTS, (2,)):
                plain: dict[str, list[int]] = {}
                speed = 0.0
                modes = ("off", "auto", "on") if count == 8 and share == 0.9 else ("auto",)
                for drafters in ((), _DRAFTERS):
                    for mode in modes:
                        run = asyncio.run(
                            _run(setting, address, info, router_keys, drafters, mode, count, cycle, temperature)
                        )
                        texts = run.pop("texts")
                        plain, speed = plain or texts, speed or run["tokens/s"]
                        same = sum(common(texts[key], plain[key]) for key in plain) / sum(map(len, plain.values()))
                        yield {
                            "predictable": share, "sequences": count, "drafters": " ".join(drafters) or "none",
                            "ahead": mode, "x": run["tokens/s"] / speed, **run, "as first": same,
                        }  # fmt: skip
    finally:
        target.terminate()
        target.join(30)


async def _run(
    setting: Setting, address: LinkAddress, info: WorkerInfo, keys: LinkKeys, drafters: tuple[str, ...], mode: str,
    count: int, cycle: list[int], temperature: float,
) -> dict[str, Any]:  # fmt: skip
    link = AsyncLink(address, keys)
    stages: Counter[str] = Counter()
    stage, since = "end", time.perf_counter()

    def begin(name: str) -> None:
        nonlocal stage, since
        now = time.perf_counter()
        stages[stage] += now - since  # type: ignore[assignment]
        stage, since = name, now

    length = setting.of(256, 6)
    core = RouterCore(
        info, RouterConfig(max_running=count, send_ahead=mode), SpeculationConfig(drafters=drafters or ("none",)),
        create_drafters(drafters),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    texts: dict[str, list[int]] = {}
    rounds = tokens = new_shapes = 0
    device_s = new_s = 0.0

    async def verify(message: VerifyBatch | VerifyAhead) -> VerifyResult | None:
        nonlocal device_s, rounds, new_s, new_shapes
        answer = await link.call(message, timeout_s=60.0)
        assert isinstance(answer, VerifyResult), answer
        device_s += answer.elapsed_s
        rounds += bool(answer.verdicts)
        new_shapes += answer.is_new_shape
        new_s += answer.elapsed_s * answer.is_new_shape
        return answer

    def deliver(events: list[Any]) -> None:
        nonlocal tokens
        for event in events:
            assert isinstance(event, TokenChunk), event
            texts[event.request_id] += event.token_ids
            tokens += len(event.token_ids)

    try:
        await link.call(Hello(), timeout_s=60.0)
        started = time.perf_counter()
        for index in range(2 * count):
            prompt = np.roll(cycle, -int(rng.integers(len(cycle)))).astype(np.int32)
            request = GenerationRequest(
                request_id=f"r{index}", prompt_token_ids=np.concatenate([prompt, prompt]), max_new_tokens=length,
                sampling=SamplingParams(seed=index, temperature=temperature),
            )  # fmt: skip
            core.add(request, time.monotonic())
            texts[request.request_id] = []
        while core.has_work:
            begin("plan")
            await run_rounds(core, NoDraftWorkers(), verify, RoundHooks(deliver=deliver, begin=begin))
        wall = time.perf_counter() - started
    finally:
        link.close()
    return {
        "rounds": rounds, "tokens/s": tokens / wall, "tokens a round": tokens / rounds / count,
        "ms a round": wall / rounds * 1e3,
        "sent ahead": f"{core.counters.ahead_used}/{core.counters.ahead_sent}",
        "device ms": device_s / rounds * 1e3, "idle": 1 - device_s / wall,
        "new shapes": new_shapes, "device ms of others": (device_s - new_s) / max(1, rounds - new_shapes) * 1e3,
        **{f"{name} ms": stages[name] / rounds * 1e3 for name in ("plan", "draft", "assemble", "verify", "commit")},
        "texts": texts,
    }  # fmt: skip


def predictable(setting: Setting, model: PreTrainedModel) -> tuple[list[int], list[float]]:
    """Let a model's next token depend on its last alone: a cycle of tokens, or at some temperature any token. Layers
    compute what they did, but change little of what they are given. Returns the cycle and a temperature for each of
    `_SHARES`, found with the logits that the whole model gives: what little 32 layers change takes 0.9 to 0.67."""
    generator = torch.Generator(setting.device).manual_seed(7)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(1e-3)
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    cycle = torch.randperm(vocab, generator=generator, device=setting.device)[:_CYCLE]
    kinds = torch.randn(_CYCLE, hidden, generator=generator, device=setting.device)
    of_token = torch.arange(vocab, device=setting.device) % _CYCLE
    of_token[cycle] = torch.arange(_CYCLE, device=setting.device)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for first in range(0, vocab, 8192):
        embeddings[first : first + 8192] = (
            embeddings[first : first + 8192] + 0.02 * kinds[of_token[first : first + 8192]]
        )
    head[cycle.roll(-1)] = (kinds / 16).to(head.dtype)
    with torch.inference_mode():
        logits = model(torch.cat([cycle, cycle])[None]).logits[0, -_CYCLE:].float()
        rows = torch.arange(_CYCLE, device=setting.device)
        temperatures = []
        for share in _SHARES:
            low, high = 0.01, 100.0
            for _ in range(60):
                middle = (low * high) ** 0.5
                found = (logits / middle).softmax(1)[rows, cycle.roll(-1)].mean()
                low, high = (middle, high) if found > share else (low, middle)
            temperatures.append(0.0 if share == 1.0 else low)
    return cycle.tolist(), temperatures


def serve(is_dry: bool, router_key: bytes, addresses: Any) -> None:
    """The target's process: an engine behind a link."""
    setting = Setting(is_dry)
    model = setting.model("8B")
    cycle, temperatures = predictable(setting, model)
    engine = setting.engine(model, setting.of(65536, 2048), is_eager=is_dry)
    server = LinkServer(LinkKeys.generate(), [router_key])
    info = WorkerInfo(
        "target", 1, engine.vocab_size, setting.of(4096, 256), BLOCK, engine.options.num_blocks, warm_up(engine),
        row_steps=engine.row_steps,
    )  # fmt: skip
    largest = RouterConfig(max_running=setting.of(max(_COUNTS), 2))
    record_rounds(engine, round_limits(largest, SpeculationConfig()))
    addresses.put((server.address, info, cycle, temperatures))
    WorkerLoop(engine, server, info).run()
