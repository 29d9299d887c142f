"""A sizing for programs, and in words and tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from cluster.deploy.size.estimate import PlacedModel, Sizing, Speed, dtypes_that_fit, groups_that_fit
from cluster.deploy.size.hardware import CPU, QUANTIZED

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, header, rows


def as_json(sizing: Sizing, notes: list[str]) -> dict[str, object]:
    """Sizes in bytes, times in seconds, speeds in tokens a second."""
    deployment, memory = sizing.deployment, sizing.memory
    target, drafter, fits = deployment.target, deployment.drafter, memory.fits
    rates = target.group.gpu.model_dump(include={"memory_gib", "bandwidth_tb_s", "tflops"})
    return {
        "target": target.shape.name,
        "gpus": f"{target.group.name}:{target.group.count}",
        "cpu": rates if is_cpu(target) else None,
        "dtype": target.dtype,
        "concurrency": deployment.concurrency,
        "context": deployment.context,
        "draft": None if drafter is None else drafter.shape.name,
        "draft_gpu": None if drafter is None else drafter.group.name,
        "acceptance": deployment.acceptance,
        "fits": fits,
        "fits_on_gpus": groups_that_fit(deployment),
        "memory_per_gpu": {**asdict(memory), "needed": memory.needed},
        "max_concurrency": sizing.max_sequences,
        "round": {**asdict(sizing.forward), "link_s": deployment.link_s, "total_s": sizing.plain.round_s},
        "free_rows": sizing.free_rows,
        "speeds": [asdict(one) for one in (sizing.plain, *sizing.drafted)] if fits else [],
        "cheapest": asdict(sizing.cheapest) if fits else None,
        "fastest": asdict(sizing.fastest) if fits else None,
        "settings": settings(sizing) or None,
        "notes": notes if fits else [],
    }


def sections(sizing: Sizing, notes: list[str]) -> Iterator[str | Table]:
    """Paragraphs and tables, in the order in which they are printed."""
    yield from _memory(sizing)
    if not sizing.memory.fits:
        yield _remedy(sizing)
        return
    yield _round(sizing)
    yield _speeds(sizing)
    yield _advice(sizing)
    yield from notes


def notes_of(sizing: Sizing, *, is_assumed: bool) -> list[str]:
    """Reservations that apply to these figures. is_assumed: the acceptance is a default."""
    deployment, drafter = sizing.deployment, sizing.deployment.drafter
    notes = ["Times are what good kernels can reach at best; reading prompts is not included."]
    if is_assumed:
        what = "`paceline bench local --compare` tells that of your texts."
        notes.append(f"An acceptance of {deployment.acceptance} is assumed; {what}")
    if drafter is not None and not sizing.drafted:
        notes.append(f"{drafter.shape.name} with the caches of its requests fits on no {drafter.group.name}.")
    if drafter is not None and deployment.gpu_hour is None:
        notes.append("Without prices a draft GPU counts as much as one of the target's.")
    if deployment.concurrency * (1 + sizing.fastest.draft_tokens) <= sizing.free_rows:
        notes.append(f"Up to {sizing.free_rows:,.0f} rows a round read no more weights and wait for no product.")
    else:
        notes.append(f"Beyond {sizing.free_rows:,.0f} rows a round every drafted token costs time.")
    if why := _unserved(deployment.target):
        whose = "this CPU" if is_cpu(deployment.target) else "GPUs"
        notes.append(f"{why}: this is what {whose} can do, and there are no settings for it.")
    return notes


def settings(sizing: Sizing) -> dict[str, object]:
    """Configuration keys and values of the cheapest way; empty if it does not fit or Paceline does not serve it."""
    deployment, speed = sizing.deployment, sizing.cheapest
    target, sequences, drafts = deployment.target, deployment.concurrency, speed.draft_tokens
    if not sizing.memory.fits or _unserved(target):
        return {}
    is_quantized = target.dtype in QUANTIZED
    return {
        "target.tensor_parallel": target.group.count,
        "target.dtype": "bfloat16" if is_quantized else target.dtype,
        **({"target.quantization": target.dtype} if is_quantized else {}),
        "target.kv_cache_tokens": max(256, sequences * deployment.context),
        "router.max_running": sequences,
        "speculation.max_draft_tokens": drafts,
        **({"speculation.max_rows": min(4096, sequences * drafts)} if drafts else {}),
        **({"draft.workers": speed.draft_workers, "draft.gamma": drafts} if speed.draft_workers else {}),
        **({"draft.ahead": deployment.outcomes * (speed.drafting == "one round ahead")} if speed.draft_workers else {}),
    }


def is_cpu(placed: PlacedModel) -> bool:
    return placed.group.name == CPU


def _unserved(target: PlacedModel) -> str:
    """Why Paceline's own engine does not serve it; empty if it does."""
    if target.dtype == "fp8":
        return "Paceline's engine does not compute in fp8 yet"
    if target.dtype in QUANTIZED and target.group.count > 1:
        return "Paceline's target.quantization needs target.tensor_parallel 1 so far"
    return ""


def _memory(sizing: Sizing) -> Iterator[str | Table]:
    deployment, memory = sizing.deployment, sizing.memory
    target, group = deployment.target, deployment.target.group
    where, each = f"{group.count} x {group.name}", "Memory of each GPU"
    if is_cpu(target):
        rates = f"{1000 * group.gpu.bandwidth_tb_s:.1f} GB/s read, {group.gpu.tflops:.3g} TFLOP/s in products"
        where, each = f"the CPU ({rates})", "Memory of the machine"
    yield (
        f"{target.shape.name}, {target.shape.num_parameters / 1e9:.1f} G parameters in {target.dtype}, on "
        f"{where}: {_requests(deployment.concurrency)} at once of {deployment.context:,} tokens"
    )
    parts = {"weights": memory.weights, "KV cache": memory.kv_cache, "activations and logits": memory.activations}
    parts["system and fragmentation" if is_cpu(target) else "CUDA and fragmentation"] = memory.reserve
    parts |= {"needed": memory.needed, "available": memory.available}
    yield each, ("", "GiB"), [(name, _gib(size)) for name, size in parts.items()]
    if memory.fits:
        room = f"{_requests(sizing.max_sequences)} of {deployment.context:,}"
        yield f"It fits. The KV cache has room for {memory.room_tokens:,} tokens: {room}."


def _round(sizing: Sizing) -> Table:
    forward, deployment = sizing.forward, sizing.deployment
    parts = {"reading the weights": forward.weights_s, "reading the KV cache": forward.kv_s}
    parts |= {"products, meanwhile": forward.compute_s, "all-reduces": forward.all_reduce_s}
    if deployment.seconds_of_rows is not None:
        parts = {"forward, as measured": sizing.plain.round_s - deployment.link_s}
    parts |= {"link to the router and back": deployment.link_s, "round": sizing.plain.round_s}
    return "A round without drafts", ("", "ms"), [(name, _ms(seconds)) for name, seconds in parts.items()]


def _speeds(sizing: Sizing) -> Table:
    last = max(sizing.cheapest.draft_workers, sizing.fastest.draft_workers) + 1
    header: tuple[str, ...] = ("drafts", "draft GPUs", "drafted", "tokens a round", "round ms", "tokens/s a stream")
    header += ("tokens/s in all", "ratio", "tokens/s a GPU")
    if sizing.plain.cost_per_million is not None:
        header += ("per 1 M tokens",)
    rows: list[tuple[str, ...]] = []
    for speed in (sizing.plain, *(one for one in sizing.drafted if one.draft_workers <= last)):
        row = [speed.drafting, str(speed.draft_workers), str(speed.draft_tokens), f"{speed.tokens_per_round:.2f}"]
        row += [_ms(speed.round_s), f"{speed.tokens_per_s_stream:,.0f}", f"{speed.tokens_per_s:,.0f}"]
        row += [f"{speed.ratio:.2f}", f"{speed.tokens_per_s_gpu:,.0f}"]
        rows.append(tuple(row if speed.cost_per_million is None else [*row, f"{speed.cost_per_million:.3f}"]))
    return "Speed", header, rows


def _advice(sizing: Sizing) -> str:
    cheapest, fastest = sizing.cheapest, sizing.fastest
    if cheapest.drafting == "none" and fastest.drafting == "none":
        return "Drafts do not pay here: rounds without are the fastest and the cheapest."
    advice = f"Cheapest by the token: {_named(cheapest)}, {cheapest.ratio:.2f} times as fast as without drafts."
    return advice if fastest == cheapest else f"{advice} Fastest: {_named(fastest)}, {fastest.ratio:.2f} times."


def _named(speed: Speed) -> str:
    if speed.drafting == "none":
        return "no drafts"
    if not speed.draft_workers:
        return f"{speed.draft_tokens} draft tokens from the CPU"
    workers = "1 draft worker" if speed.draft_workers == 1 else f"{speed.draft_workers} draft workers"
    return f"{workers}, {speed.drafting}, {speed.draft_tokens} draft tokens"


def _remedy(sizing: Sizing) -> str:
    deployment, memory = sizing.deployment, sizing.memory
    context = memory.room_tokens // deployment.concurrency
    ways = [f"{count} GPUs of the kind" for count in groups_that_fit(deployment)[:1]]
    if sizing.max_sequences:
        ways.append(f"at most {_requests(sizing.max_sequences)} at once of this context")
    if context:
        ways.append(f"a context of at most {context:,}")
    if names := dtypes_that_fit(deployment):
        ways.append(f"fewer bits: --dtype {' or '.join(names)}")
    larger, where = ("more memory", "") if is_cpu(deployment.target) else ("larger GPUs", " on each GPU")
    lacking = f"{_gib(memory.needed - memory.available)} GiB too much{where}"
    return f"It does not fit: {lacking}. It needs {', or '.join(ways or [f'{larger}, or a smaller model'])}."


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number:,} requests"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
