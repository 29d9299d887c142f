"""A sizing for programs, and in words and tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from actors.pool_names import FIRST_POOL
from cluster.deploy.size.configured import Configured
from cluster.deploy.size.estimate import FEWEST_HEAD_LEVELS, Deployment, Sizing, Speed
from cluster.deploy.size.options import CPU_DRAFTERS, HEAD
from cluster.deploy.size.placed_model import CPU, NUM_BYTES, QUANTIZED, PlacedModel

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, header, rows

_SPEED_HEADER = (
    *("drafts", "draft GPUs", "drafted", "tokens a round", "round ms", "tokens/s a stream"),
    *("tokens/s in all", "ratio", "tokens/s a GPU", "per 1 M tokens"),
)


def as_json(sizing: Sizing, configured: Configured | None = None) -> dict[str, object]:
    """Sizes in bytes, times in seconds, speeds in tokens a second. configured: what a configuration allows."""
    deployment, memory, fits = sizing.deployment, sizing.memory, sizing.memory.fits
    target, pools = deployment.target, deployment.pools
    rates = target.gpu.model_dump(include={"memory_gib", "bandwidth_tb_s", "tflops"})
    return {
        "target": target.shape.name,
        "gpus": f"{target.device}:{target.count}",
        "cpu": rates if target.device == CPU else None,
        "dtype": target.dtype,
        "concurrency": deployment.concurrency,
        "context": deployment.context,
        "draft": pools[0].model.shape.name if pools else None,
        "draft_gpu": pools[0].model.device if pools else None,
        "drafts": {pool.section: pool.model.shape.name for pool in pools},
        "eagle_head": deployment.head and deployment.head.shape.name,
        "acceptance": _acceptance(deployment),
        "assumed": list(deployment.assumed),
        "fits": fits,
        "fits_on_gpus": _groups_that_fit(deployment),
        "memory_per_gpu": asdict(memory),
        "max_concurrency": memory.room_tokens // deployment.context,
        "round": {**asdict(sizing.forward), "link_s": deployment.link_s, "total_s": sizing.speeds[0].round_s},
        "free_rows": sizing.free_rows,
        "speeds": [asdict(one) for one in sizing.speeds] if fits else [],
        "cheapest": asdict(sizing.cheapest) if fits else None,
        "fastest": asdict(sizing.fastest) if fits else None,
        "settings": settings(sizing) or None,
        "configured": configured and asdict(configured.speed),
        "better": configured and [asdict(one) for one in configured.better],
        "notes": list(_notes(sizing)) if fits else [],
    }


def sections(sizing: Sizing, configured: Configured | None = None) -> Iterator[str | Table]:
    """Paragraphs and tables, in the order in which they are printed. configured: what a configuration allows."""
    deployment, memory, target = sizing.deployment, sizing.memory, sizing.deployment.target
    where, each, reserved = f"{target.count} x {target.device}", "Memory of each GPU", "CUDA"
    if target.device == CPU:
        rates = f"{1000 * target.gpu.bandwidth_tb_s:.1f} GB/s read, {target.gpu.tflops:.3g} TFLOP/s in products"
        where, each, reserved = f"the CPU ({rates})", "Memory of the machine", "system"
    yield (
        f"{target.shape.name}, {target.shape.num_parameters / 1e9:.1f} G parameters in {target.dtype}, on "
        f"{where}: {_count(deployment.concurrency, 'request')} at once of {deployment.context:,} tokens"
    )
    parts = {"weights": memory.weights, "KV cache": memory.kv_cache, "activations and logits": memory.activations}
    parts |= {f"{reserved} and fragmentation": memory.reserve, "needed": memory.needed, "available": memory.available}
    yield each, ("", "GiB"), [(name, _gib(size)) for name, size in parts.items()]
    if not memory.fits:
        yield _remedy(sizing)
        return
    room = f"{_count(memory.room_tokens // deployment.context, 'request')} of {deployment.context:,}"
    yield f"It fits. The KV cache has room for {memory.room_tokens:,} tokens: {room}."
    forward, round_s = sizing.forward, sizing.speeds[0].round_s
    parts = {"reading the weights": forward.weights_s, "reading the KV cache": forward.kv_s}
    parts |= {"products, meanwhile": forward.compute_s, "all-reduces": forward.all_reduce_s}
    if deployment.seconds_of_rows is not None:
        parts = {"forward, as measured": round_s - deployment.link_s}
    parts |= {"link to the router and back": deployment.link_s, "round": round_s}
    yield "A round without drafts", ("", "ms"), [(name, _ms(seconds)) for name, seconds in parts.items()]
    yield _speeds(sizing)
    yield _advice(sizing.cheapest, sizing.fastest)
    if configured is not None:
        yield _judgement(configured)
    yield from _notes(sizing)


def settings(sizing: Sizing) -> dict[str, object]:
    """Configuration keys and values of the cheapest way; empty if it does not fit or Paceline does not serve it."""
    deployment, speed = sizing.deployment, sizing.cheapest
    target, sequences, drafts = deployment.target, deployment.concurrency, speed.draft_tokens
    if not sizing.memory.fits or _unserved(target):
        return {}
    is_quantized = target.dtype in QUANTIZED
    values = {
        "target.tensor_parallel": target.count,
        "target.dtype": "bfloat16" if is_quantized else target.dtype,
        "target.quantization": target.dtype if is_quantized else None,
        "target.kv_cache_tokens": max(256, sequences * deployment.context),
        "router.max_running": sequences,
        "speculation.max_draft_tokens": drafts,
        "speculation.max_rows": min(4096, sequences * drafts) or None,
    }
    if speed.drafting == "by the head":
        depth = max(FEWEST_HEAD_LEVELS, drafts) - 1
        values |= {"target.eagle_head": deployment.head_setting, "target.eagle_depth": depth}
    if speed.draft_workers:
        (pool,) = (pool for pool in deployment.pools if pool.section == speed.section)
        ahead = pool.outcomes if speed.drafting == "one round ahead" else 0
        ranks = pool.model.count if pool.model.count > 1 else None
        own = {"workers": speed.draft_workers, "tensor_parallel": ranks, "gamma": drafts, "ahead": ahead}
        values |= {f"{pool.section}.{key}": value for key, value in own.items()}
    return {key: value for key, value in values.items() if value is not None}


def _notes(sizing: Sizing) -> Iterator[str]:
    """Reservations that apply to these figures."""
    deployment, pools = sizing.deployment, sizing.deployment.pools
    yield "Times are what good kernels can reach at best; reading prompts is not included."
    if deployment.assumed:
        yield f"Assumed, not measured: {'; '.join(deployment.assumed)}."
    if sizing.cheapest.drafting == "by the head" and deployment.head_setting is None:
        yield "Add target.eagle_head, the directory of a head, to the settings."
    if any("--acceptance" in one for one in deployment.assumed):
        yield "`paceline bench local --compare` tells the acceptance of your texts."
    for pool in pools:
        if not any(speed.section == pool.section for speed in sizing.speeds):
            yield f"{pool.model.shape.name} with the caches of its requests fits on no {pool.model.device}."
    if len(pools) > 1:
        models = ", ".join(f"{pool.section} {pool.model.shape.name}" for pool in pools)
        yield (
            f"Draft models are {models}. Each is counted without the workers of the others: several pay where each is "
            "right in texts of its own."
        )
    if pools and deployment.gpu_hour is None:
        yield "Without prices a draft GPU counts as much as one of the target's."
    if deployment.concurrency * (1 + sizing.fastest.draft_tokens) <= sizing.free_rows:
        yield f"Up to {sizing.free_rows:,.0f} rows a round read no more weights and wait for no product."
    else:
        yield f"Beyond {sizing.free_rows:,.0f} rows a round every drafted token costs time."
    if why := _unserved(deployment.target):
        whose = "this CPU" if deployment.target.device == CPU else "GPUs"
        yield f"{why}: this is what {whose} can do, and there are no settings for it."


def _acceptance(deployment: Deployment) -> dict[str, float | None]:
    """The probability that a guess is right, by what drafts."""
    found: dict[str, float | None] = {pool.section: pool.acceptance for pool in deployment.pools}
    if deployment.head is not None:
        found[HEAD] = deployment.head_acceptance
    return found | {CPU_DRAFTERS: deployment.cpu_acceptance}


def _unserved(target: PlacedModel) -> str:
    """Why Paceline's own engine does not serve it; empty if it does."""
    if target.kv_dtype != "auto" and NUM_BYTES[target.kv_dtype] != (4 if target.dtype == "float32" else 2):
        return f"Paceline's engine has no KV cache in {target.kv_dtype} beside weights in {target.dtype}"
    if target.dtype == "fp8" and target.device != CPU and target.gpu.tflops_fp8 is None:
        return f"Paceline's engine computes in fp8 where the GPU does, which {target.device} does not"
    return ""


def _speeds(sizing: Sizing) -> Table:
    columns = len(_SPEED_HEADER) - (sizing.deployment.gpu_hour is None)
    last = max(sizing.cheapest.draft_workers, sizing.fastest.draft_workers) + 1
    rows: list[tuple[str, ...]] = []
    for speed in sizing.speeds:
        if speed.draft_workers <= last:
            row = [_drafting(speed), str(speed.draft_gpus), str(speed.draft_tokens), f"{speed.tokens_per_round:.2f}"]
            row += [_ms(speed.round_s), f"{speed.tokens_per_s_stream:,.0f}", f"{speed.tokens_per_s:,.0f}"]
            row += [f"{speed.ratio:.2f}", f"{speed.tokens_per_s_gpu:,.0f}", f"{speed.cost_per_million or 0:.3f}"]
            rows.append(tuple(row[:columns]))
    return "Speed", _SPEED_HEADER[:columns], rows


def _advice(cheapest: Speed, fastest: Speed) -> str:
    if cheapest.drafting == "none" and fastest.drafting == "none":
        return "Drafts do not pay here: rounds without are the fastest and the cheapest."
    advice = f"Cheapest by the token: {_named(cheapest)}, {cheapest.ratio:.2f} times as fast as without drafts."
    return advice if fastest == cheapest else f"{advice} Fastest: {_named(fastest)}, {fastest.ratio:.2f} times."


def _judgement(configured: Configured) -> str:
    speed = configured.speed
    text = f"As configured: {_named(speed)}, {speed.ratio:.2f} times, {speed.tokens_per_s:,.0f} tokens/s in all."
    if not configured.better:
        return f"{text} Nothing above is better by more than 1 %, by the token or on as many GPUs."
    best = configured.better[0]
    return f"{text} Better: {_named(best)}, {best.ratio:.2f} times, {best.tokens_per_s:,.0f} tokens/s in all."


def _named(speed: Speed) -> str:
    if speed.drafting == "none":
        return "no drafts"
    if not speed.draft_workers:
        whose = "by the head" if speed.drafting == "by the head" else "from the CPU"
        return f"{_count(speed.draft_tokens, 'draft token')} {whose}"
    workers, tokens = _count(speed.draft_workers, "draft worker"), _count(speed.draft_tokens, "draft token")
    return f"{workers}, {_drafting(speed)}, {tokens}"


def _drafting(speed: Speed) -> str:
    return speed.drafting if speed.section in (None, FIRST_POOL) else f"{speed.drafting} ({speed.section})"


def _groups_that_fit(deployment: Deployment) -> list[int]:
    """Numbers of GPUs, ascending, that share the target's heads evenly and hold it with all sequences."""
    target = deployment.target
    counts = [n for n in range(1, target.gpu.per_node + 1) if target.shape.num_heads % n == 0]
    return [n for n in counts if deployment.memory(count=n).fits]


def _remedy(sizing: Sizing) -> str:
    deployment, memory, target = sizing.deployment, sizing.memory, sizing.deployment.target
    ways = [f"{count} GPUs of the kind" for count in _groups_that_fit(deployment)[:1]]
    if sequences := memory.room_tokens // deployment.context:
        ways.append(f"at most {_count(sequences, 'request')} at once of this context")
    if context := memory.room_tokens // deployment.concurrency:
        ways.append(f"a context of at most {context:,}")
    smaller = [
        dtype
        for dtype in QUANTIZED
        if NUM_BYTES[dtype] < target.weight_bytes and not _unserved(replace(target, dtype=dtype))
    ]
    if names := [dtype for dtype in smaller if deployment.memory(dtype=dtype).fits]:
        ways.append(f"fewer bits: --dtype {' or '.join(names)}")
    larger, where = ("more memory", "") if target.device == CPU else ("larger GPUs", " on each GPU")
    lacking = f"{_gib(memory.needed - memory.available)} GiB too much{where}"
    return f"It does not fit: {lacking}. It needs {', or '.join(ways or [larger, 'a smaller model'])}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
