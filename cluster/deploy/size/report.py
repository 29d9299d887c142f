"""A sizing for people and for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TextIO

from cluster.cli.bench.table import print_table
from cluster.deploy.size.estimate import Deployment, Sizing, Speed, groups_that_fit, precisions_that_fit
from cluster.deploy.size.precision import QUANTIZED
from cluster.deploy.size.roofline import PlacedModel

_WIDTH = 120


def as_json(deployment: Deployment, sizing: Sizing, notes: list[str]) -> dict[str, object]:
    """Sizes in bytes, times in seconds, speeds in tokens a second."""
    target, draft = deployment.target, deployment.draft
    memory, forward = sizing.memory, sizing.forward
    speeds = (sizing.plain, *sizing.drafted) if memory.fits else ()
    return {
        "target": target.shape.name,
        "gpus": f"{target.group.name}:{target.group.count}",
        "dtype": target.precision.name,
        "concurrency": deployment.concurrency,
        "context": deployment.context,
        "draft": None if draft.placed is None else draft.placed.shape.name,
        "draft_gpu": None if draft.placed is None else draft.placed.group.name,
        "acceptance": draft.acceptance,
        "fits": memory.fits,
        "fits_on_gpus": groups_that_fit(deployment),
        "memory_per_gpu": {**asdict(memory), "needed": memory.needed},
        "max_concurrency": sizing.max_sequences,
        "round": {**asdict(forward), "link_s": deployment.link_s, "total_s": sizing.plain.round_s},
        "free_rows": sizing.free_rows,
        "speeds": [asdict(one) for one in speeds],
        "cheapest": asdict(sizing.cheapest) if memory.fits else None,
        "fastest": asdict(sizing.fastest) if memory.fits else None,
        "settings": settings(deployment, sizing.cheapest) if memory.fits and is_served(target) else None,
        "notes": notes if memory.fits else [],
    }


def print_sizing(deployment: Deployment, sizing: Sizing, notes: list[str], out: TextIO) -> None:
    _print_memory(deployment, sizing, out)
    if not sizing.memory.fits:
        _print_paragraphs([_remedy(deployment, sizing)], out)
        return
    _print_round(deployment, sizing, out)
    _print_speeds(sizing, out)
    _print_paragraphs([_advice(sizing), *notes], out)
    if not is_served(deployment.target):
        return
    out.write("\nSettings of the cheapest:\n")
    for key, value in settings(deployment, sizing.cheapest).items():
        out.write(f"  --set {key}={value}\n")


def is_served(target: PlacedModel) -> bool:
    """Whether Paceline's own engine can do it."""
    return target.precision.is_served and (target.precision.name not in QUANTIZED or target.group.count == 1)


def settings(deployment: Deployment, speed: Speed) -> dict[str, object]:
    """What of the configuration follows, by its keys, where the engine can do it."""
    target = deployment.target
    chosen: dict[str, object] = {"target.tensor_parallel": target.group.count}
    if target.precision.name in QUANTIZED:
        chosen |= {"target.dtype": "bfloat16", "target.quantization": target.precision.name}
    else:
        chosen["target.dtype"] = target.precision.name
    chosen["target.kv_cache_tokens"] = max(256, deployment.concurrency * deployment.context)
    chosen["router.max_running"] = deployment.concurrency
    chosen["speculation.max_draft_tokens"] = speed.draft_tokens
    if speed.draft_tokens:
        chosen["speculation.max_rows"] = min(4096, deployment.concurrency * speed.draft_tokens)
    if speed.draft_workers:
        chosen |= {"draft.workers": speed.draft_workers, "draft.gamma": speed.draft_tokens}
        ahead = deployment.draft.outcomes if speed.drafting == "one round ahead" else 0
        chosen["draft.ahead"] = ahead
    return chosen


def _print_memory(deployment: Deployment, sizing: Sizing, out: TextIO) -> None:
    target, memory = deployment.target, sizing.memory
    title = (
        f"{target.shape.name}, {target.shape.num_parameters / 1e9:.1f} G parameters in {target.precision.name}, on "
        f"{target.group.count} x {target.group.name}: {_requests(deployment.concurrency)} at once of "
        f"{deployment.context:,} tokens\n\nMemory of each GPU"
    )
    rows = [
        ("weights", _gib(memory.weights)),
        ("KV cache", _gib(memory.kv_cache)),
        ("activations and logits", _gib(memory.activations)),
        ("CUDA and what fragments", _gib(memory.reserve)),
        ("needed", _gib(memory.needed)),
        ("there", _gib(memory.available)),
    ]
    print_table(title, ("", "GiB"), rows, out)
    if memory.fits:
        _print_paragraphs(
            [
                f"It fits. The KV cache has room for {memory.room_tokens:,} tokens: "
                f"{_requests(sizing.max_sequences)} of {deployment.context:,}."
            ],
            out,
        )


def _print_round(deployment: Deployment, sizing: Sizing, out: TextIO) -> None:
    forward = sizing.forward
    rows = [
        ("reading the weights", _ms(forward.weights_s)),
        ("reading the KV cache", _ms(forward.kv_s)),
        ("products, meanwhile", _ms(forward.compute_s)),
        ("all-reduces", _ms(forward.all_reduce_s)),
        ("link to the router and back", _ms(deployment.link_s)),
        ("round", _ms(sizing.plain.round_s)),
    ]
    if deployment.seconds_of_rows is not None:
        rows = [("forward, as measured", _ms(sizing.plain.round_s - deployment.link_s)), *rows[-2:]]
    out.write("\n")
    print_table("A round without drafts", ("", "ms"), rows, out)


def _print_speeds(sizing: Sizing, out: TextIO) -> None:
    has_cost = sizing.plain.cost_per_million is not None
    header = ["drafts", "draft GPUs", "drafted", "tokens a round", "round ms"]
    header += [
        "tokens/s a stream",
        "tokens/s in all",
        "ratio",
        "tokens/s a GPU",
        *(["per 1 M tokens"] if has_cost else []),
    ]
    last = max(sizing.cheapest.draft_workers, sizing.fastest.draft_workers) + 1
    rows = []
    for speed in (sizing.plain, *(one for one in sizing.drafted if one.draft_workers <= last)):
        row = [
            speed.drafting,
            str(speed.draft_workers),
            str(speed.draft_tokens),
            f"{speed.tokens_per_round:.2f}",
            _ms(speed.round_s),
            f"{speed.tokens_per_s_stream:,.0f}",
            f"{speed.tokens_per_s:,.0f}",
            f"{speed.ratio:.2f}",
            f"{speed.tokens_per_s_gpu:,.0f}",
        ]
        if speed.cost_per_million is not None:
            row.append(f"{speed.cost_per_million:.3f}")
        rows.append(row)
    out.write("\n")
    print_table("Speed", header, rows, out)


def _advice(sizing: Sizing) -> str:
    cheapest, fastest = sizing.cheapest, sizing.fastest
    if cheapest.drafting == "none" and fastest.drafting == "none":
        return "Drafts do not pay here: rounds without are the fastest and the cheapest."
    parts = [f"Cheapest by the token: {_named(cheapest)}, {cheapest.ratio:.2f} times as fast as without drafts."]
    if fastest != cheapest:
        parts.append(f"Fastest: {_named(fastest)}, {fastest.ratio:.2f} times.")
    return " ".join(parts)


def _named(speed: Speed) -> str:
    if speed.drafting == "none":
        return "no drafts"
    if not speed.draft_workers:
        return f"{speed.draft_tokens} draft tokens from the CPU"
    workers = "1 draft worker" if speed.draft_workers == 1 else f"{speed.draft_workers} draft workers"
    return f"{workers}, {speed.drafting}, {speed.draft_tokens} draft tokens"


def _remedy(deployment: Deployment, sizing: Sizing) -> str:
    memory = sizing.memory
    ways = []
    counts = groups_that_fit(deployment)
    if counts:
        ways.append(f"{counts[0]} GPUs of the kind")
    if sizing.max_sequences:
        ways.append(f"at most {_requests(sizing.max_sequences)} at once of this context")
    context = memory.room_tokens // deployment.concurrency
    if context:
        ways.append(f"a context of at most {context:,}")
    if names := precisions_that_fit(deployment):
        ways.append(f"fewer bits: --dtype {' or '.join(names)}")
    ways = ways or ["larger GPUs, or a smaller model"]
    lacking = _gib(memory.needed - memory.available)
    return f"It does not fit: {lacking} GiB too much on each GPU. It needs " + ", or ".join(ways) + "."


def _print_paragraphs(paragraphs: list[str], out: TextIO) -> None:
    for paragraph in paragraphs:
        out.write("\n" + textwrap.fill(paragraph, _WIDTH, break_on_hyphens=False) + "\n")


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number:,} requests"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
