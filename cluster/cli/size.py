"""`paceline size`: what a deployment will hold and how fast it can be, before anything is bought or started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actors.errors import InvalidRequest
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.deploy.size.estimate import Deployment, Sizing

_MODEL_ACCEPTANCE = 0.7  # of a guess by a draft model, where none is given
_CPU_ACCEPTANCE = 0.5  # of drafters on the CPU: two tokens a round


class Format(StrEnum):
    text = "text"
    json = "json"


def size(
    target: str = typer.Option(..., help="A known model, such as llama-70b, or a directory with a config.json."),
    gpus: str = typer.Option(..., metavar="NAME:NUMBER", help="That share the target, such as h200:8."),
    dtype: str = typer.Option("bfloat16", help="Of the weights: float32, bfloat16, float16, fp8, int8, int4."),
    kv_dtype: str = typer.Option(
        "auto", help="Of the KV cache: float32, bfloat16, float16, fp8; auto: as computed in."
    ),
    concurrency: int = typer.Option(1, min=1, max=4096, help="Requests at once."),
    context: int = typer.Option(4096, min=1, help="Tokens of prompt and answer that each has in the cache."),
    draft: str = typer.Option(
        None, help="A draft model, as --target; without one, drafters on the router's CPU draft."
    ),
    draft_gpu: str = typer.Option(None, metavar="NAME", help="That a draft worker has; by default the target's kind."),
    draft_dtype: str = typer.Option("bfloat16", help="Of the draft model's weights."),
    max_draft_workers: int = typer.Option(8, min=1, max=64, help="Most that are tried."),
    acceptance: float = typer.Option(
        None,
        min=0.0,
        max=0.99,
        help=f"How often a guess is right: {_MODEL_ACCEPTANCE}, or {_CPU_ACCEPTANCE} on the CPU.",
    ),
    draft_tokens: int = typer.Option(None, min=1, max=64, help="A request and round; by default as many as are best."),
    draft_ahead: int = typer.Option(8, min=1, max=64, help="Outcomes that a worker drafts for ahead, as draft.ahead."),
    hit_rate: float = typer.Option(0.9, min=0.0, max=1.0, help="How often a draft made one round ahead can be used."),
    price_per_gpu_hour: float = typer.Option(
        None, min=1e-4, max=1e6, help="Of one of the target's GPUs, in any currency."
    ),
    draft_price_per_gpu_hour: float = typer.Option(
        None, min=1e-4, max=1e6, help="Of a draft GPU; by default the same."
    ),
    efficiency: float = typer.Option(0.8, min=0.01, max=1.0, help="Share of the data sheet's rates that is reached."),
    link_ms: float = typer.Option(0.2, min=0.0, max=1000.0, help="A message from the router to a worker and back."),
    row_times: str = typer.Option(
        "", metavar="ROWS:MS,...", help="Forwards of the target as measured, such as 1:5.2,32:5.9, for the roofline's."
    ),
    hardware: Path = typer.Option(None, metavar="FILE", help="YAML with further GPUs, or others of the same names."),
    output: Format = typer.Option(Format.text, "--format"),
) -> None:
    """Whether a target fits on GPUs, how fast it is with and without drafts, and how many draft workers pay.

    The formulas are in docs/sizing.md. Exit status 1 if it does not fit.
    """
    from cluster.config import RouterConfig
    from cluster.deploy.size.estimate import Deployment, DraftPlan
    from cluster.deploy.size.estimate import size as size_deployment
    from cluster.deploy.size.hardware import GPUS, GpuGroup, find_gpu, parse_gpus, read_hardware
    from cluster.deploy.size.model_shape import find_model
    from cluster.deploy.size.precision import find_kv_bytes, find_precision
    from cluster.deploy.size.report import as_json, print_sizing
    from cluster.deploy.size.roofline import PlacedModel

    known = {**GPUS, **(read_hardware(hardware) if hardware is not None else {})}
    group = parse_gpus(gpus, known=known)
    precision = find_precision(dtype, "--dtype")
    kv_bytes = find_kv_bytes(kv_dtype, precision)
    if draft is None:
        _refuse_without_draft(("--draft-gpu", draft_gpu), ("--draft-price-per-gpu-hour", draft_price_per_gpu_hour))
    if price_per_gpu_hour is None and draft_price_per_gpu_hour is not None:
        limit = "give --price-per-gpu-hour, too"
        raise InvalidRequest("--draft-price-per-gpu-hour", draft_price_per_gpu_hour, limit)
    drafter_gpu = GpuGroup(group.name, group.gpu, 1)
    if draft_gpu is not None:
        drafter_gpu = GpuGroup(draft_gpu.lower(), find_gpu(draft_gpu, "--draft-gpu", known), 1)
    draft_precision = find_precision(draft_dtype, "--draft-dtype")
    measured = parse_row_times(row_times)
    shape = find_model(target, "--target")
    if shape.num_heads % group.count:
        even = ", ".join(str(count) for count in range(1, group.gpu.per_node + 1) if shape.num_heads % count == 0)
        limit = f"{shape.name} has {shape.num_heads} attention heads to share out evenly: {even} GPUs"
        raise InvalidRequest("--gpus", gpus, limit)
    if context > shape.max_context:
        raise InvalidRequest("--context", context, f"{shape.name} takes {shape.max_context} tokens at most")
    drafter = None
    if draft is not None:
        draft_shape = find_model(draft, "--draft")
        drafter = PlacedModel(draft_shape, drafter_gpu, draft_precision, draft_precision.kv_bytes, efficiency)
    assumed = _CPU_ACCEPTANCE if drafter is None else _MODEL_ACCEPTANCE
    deployment = Deployment(
        target=PlacedModel(shape, group, precision, kv_bytes, efficiency),
        concurrency=concurrency,
        context=context,
        prefill_rows=RouterConfig().max_prefill_rows,
        link_s=link_ms / 1000,
        draft=DraftPlan(
            placed=drafter,
            acceptance=assumed if acceptance is None else acceptance,
            draft_tokens=draft_tokens,
            hit_rate=hit_rate,
            outcomes=draft_ahead,
            max_workers=max_draft_workers,
        ),
        gpu_hour=price_per_gpu_hour,
        draft_gpu_hour=draft_price_per_gpu_hour,
        seconds_of_rows=_curve(measured),
    )
    sizing = size_deployment(deployment)
    notes = _notes(deployment, sizing, is_assumed=acceptance is None)
    if output is Format.json:
        typer.echo(json.dumps(as_json(deployment, sizing, notes), indent=2))
    else:
        print_sizing(deployment, sizing, notes, sys.stdout)
    if not sizing.memory.fits:
        sys.exit(1)


def _refuse_without_draft(*options: tuple[str, object]) -> None:
    for name, value in options:
        if value is not None:
            raise InvalidRequest(name, value, "give --draft, too")


def _curve(points: tuple[tuple[int, float], ...]) -> Callable[[int], float] | None:
    if not points:
        return None
    from cluster.router.step_time import StepTimeCurve

    return StepTimeCurve(points).seconds


def _notes(deployment: Deployment, sizing: Sizing, *, is_assumed: bool) -> list[str]:
    """What the reader should know of these figures."""
    from cluster.deploy.size.report import is_served

    target, draft = deployment.target, deployment.draft
    notes = ["Times are what good kernels can reach at best; reading prompts is not included."]
    if is_assumed:
        notes.append(f"An acceptance of {draft.acceptance} is assumed; `paceline compare` tells that of your texts.")
    if draft.placed is not None and not sizing.drafted:
        notes.append(f"{draft.placed.shape.name} with the caches of its requests fits on no {draft.placed.group.name}.")
    if draft.placed is not None and deployment.gpu_hour is None:
        notes.append("Without prices a draft GPU counts as much as one of the target's.")
    fastest_rows = deployment.concurrency * (1 + sizing.fastest.draft_tokens)
    if fastest_rows <= sizing.free_rows:
        notes.append(f"Up to {sizing.free_rows:,.0f} rows a round read no more weights and wait for no product.")
    else:
        notes.append(f"Beyond {sizing.free_rows:,.0f} rows a round every drafted token costs time.")
    if not target.precision.is_served:
        what = f"Paceline's engine does not compute in {target.precision.name} yet"
        notes.append(f"{what}: this is what GPUs can do, and there are no settings for it.")
    elif not is_served(target):
        what = "Paceline's target.quantization needs target.tensor_parallel 1 so far"
        notes.append(f"{what}: this is what GPUs can do, and there are no settings for it.")
    return notes
