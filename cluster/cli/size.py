"""`paceline size`: memory and speed of a deployment, before anything is bought or started."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actors.errors import InvalidRequest
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.deploy.size.estimate import Deployment, Sizing
    from cluster.deploy.size.model_shape import ModelShape
    from cluster.deploy.size.roofline import PlacedModel

_MODEL_ACCEPTANCE = 0.7  # default with a draft model
_CPU_ACCEPTANCE = 0.5  # default with drafters on the CPU: two tokens a round
_WIDTH = 120


class Format(StrEnum):
    text = "text"
    json = "json"


def size(
    target: str = typer.Option(..., help="A known model, such as llama-70b, or a directory with a config.json."),
    gpus: str = typer.Option(None, metavar="NAME:NUMBER", help="GPUs that share the target, such as h200:8."),
    cpu: bool = typer.Option(False, "--cpu", help="Size this machine's CPU instead; its rates are measured first."),
    memory_gib: float = typer.Option(None, min=0.1, help="With --cpu: of another machine than this one."),
    bandwidth_gb_s: float = typer.Option(None, min=0.1, help="With --cpu: memory bandwidth, instead of measuring it."),
    dtype: str = typer.Option("bfloat16", help="Of the weights: float32, bfloat16, float16, fp8, int8, int4."),
    kv_dtype: str = typer.Option("auto", help="Of the KV cache: float32, bfloat16, float16, fp8; auto: as computed."),
    concurrency: int = typer.Option(1, min=1, max=4096, help="Requests at once."),
    context: int = typer.Option(4096, min=1, help="Cached tokens of a request, prompt and answer."),
    draft: str = typer.Option(None, help="A draft model, as --target; by default drafters on the router's CPU."),
    draft_gpu: str = typer.Option(None, metavar="NAME", help="GPU of a draft worker; by default the target's kind."),
    draft_dtype: str = typer.Option("bfloat16", help="Of the draft model's weights."),
    max_draft_workers: int = typer.Option(8, min=1, max=64, help="Most draft workers that are tried."),
    acceptance: float = typer.Option(
        None, min=0.0, max=0.99, help=f"Probability that a guess is right; {_MODEL_ACCEPTANCE}, on the CPU 0.5."
    ),
    draft_tokens: int = typer.Option(None, min=1, max=64, help="A request and round; by default the best number."),
    draft_ahead: int = typer.Option(8, min=1, max=64, help="Outcomes that a worker drafts for ahead: draft.ahead."),
    hit_rate: float = typer.Option(0.9, min=0.0, max=1.0, help="Share of drafts made one round ahead that are used."),
    price_per_gpu_hour: float = typer.Option(None, min=1e-4, max=1e6, help="Of a target GPU, in any currency."),
    draft_price_per_gpu_hour: float = typer.Option(None, min=1e-4, max=1e6, help="Of a draft GPU; default the same."),
    efficiency: float = typer.Option(
        None, min=0.01, max=1.0, help="Share of the rates that is reached: 0.8 of data sheets, 1 of what is measured."
    ),
    link_ms: float = typer.Option(0.2, min=0.0, max=1000.0, help="A message from the router to a worker and back."),
    row_times: str = typer.Option(
        "", metavar="ROWS:MS,...", help="Measured forwards of the target, such as 1:5.2,32:5.9, for the roofline's."
    ),
    hardware: Path = typer.Option(None, metavar="FILE", help="YAML with further GPUs, or others of the same names."),
    output: Format = typer.Option(Format.text, "--format"),
) -> None:
    """Whether a target fits, how fast it is with and without drafts, and how many draft workers pay.

    The formulas are in docs/sizing.md. Exit status 1 if it does not fit.
    """
    if price_per_gpu_hour is None and draft_price_per_gpu_hour is not None and draft is not None:
        limit = "give --price-per-gpu-hour, too"
        raise InvalidRequest("--draft-price-per-gpu-hour", draft_price_per_gpu_hour, limit)
    _refuse("--cpu", cpu, {"--draft": draft, "--price-per-gpu-hour": price_per_gpu_hour, "--hardware": hardware})
    gpu_only = {"--memory-gib": memory_gib, "--bandwidth-gb-s": bandwidth_gb_s}
    _refuse("--gpus", not cpu, gpu_only)
    for name, value in {"--draft-gpu": draft_gpu, "--draft-price-per-gpu-hour": draft_price_per_gpu_hour}.items():
        if draft is None and value is not None:
            raise InvalidRequest(name, value, "give --draft, too")
    if cpu == (gpus is not None):
        raise InvalidRequest("--gpus", gpus, "give either --gpus or --cpu")
    measured = parse_row_times(row_times)
    from cluster.config import RouterConfig
    from cluster.deploy.size import estimate
    from cluster.deploy.size.hardware import (
        CPU,
        GPUS,
        GpuGroup,
        find_gpu,
        find_kv_bytes,
        find_precision,
        measure_cpu,
        parse_gpus,
        read_hardware,
    )
    from cluster.deploy.size.model_shape import find_model
    from cluster.deploy.size.report import as_json
    from cluster.deploy.size.roofline import EFFICIENCY, PlacedModel
    from cluster.router.step_time import StepTimeCurve

    known = {**GPUS, **(read_hardware(hardware) if hardware is not None else {})}
    precision, draft_precision = find_precision(dtype, "--dtype"), find_precision(draft_dtype, "--draft-dtype")
    kv_bytes = find_kv_bytes(kv_dtype, precision)
    group = None if cpu else parse_gpus(gpus, known=known)
    draft_group = (
        None if draft_gpu is None else GpuGroup(draft_gpu.lower(), find_gpu(draft_gpu, "--draft-gpu", known), 1)
    )
    shape = find_model(target, "--target")
    if context > shape.max_context:
        raise InvalidRequest("--context", context, f"{shape.name} takes {shape.max_context} tokens at most")
    if group is None:
        group = GpuGroup(CPU, measure_cpu(precision.name, memory_gib, bandwidth_gb_s), 1)
    reached = efficiency or (1.0 if cpu else EFFICIENCY)
    placed = PlacedModel(shape=shape, group=group, precision=precision, kv_bytes=kv_bytes, efficiency=reached)
    _check_heads(shape, placed, gpus)
    drafter = None
    if draft is not None:
        drafter = PlacedModel(
            shape=find_model(draft, "--draft"),
            group=draft_group or GpuGroup(group.name, group.gpu, 1),
            precision=draft_precision,
            kv_bytes=draft_precision.kv_bytes,
            efficiency=reached,
        )
    default_acceptance = _CPU_ACCEPTANCE if drafter is None else _MODEL_ACCEPTANCE
    deployment = estimate.Deployment(
        target=placed,
        concurrency=concurrency,
        context=context,
        prefill_rows=RouterConfig().max_prefill_rows,
        link_s=link_ms / 1000,
        draft=estimate.DraftPlan(
            placed=drafter,
            acceptance=default_acceptance if acceptance is None else acceptance,
            draft_tokens=draft_tokens,
            hit_rate=hit_rate,
            outcomes=draft_ahead,
            max_workers=max_draft_workers,
        ),
        gpu_hour=price_per_gpu_hour,
        draft_gpu_hour=draft_price_per_gpu_hour,
        seconds_of_rows=StepTimeCurve(measured).seconds if measured else None,
    )
    sizing = estimate.size(deployment)
    notes = _notes(deployment, sizing, is_assumed=acceptance is None)
    if output is Format.json:
        typer.echo(json.dumps(as_json(deployment, sizing, notes), indent=2))
    else:
        _print(deployment, sizing, notes)
    if not sizing.memory.fits:
        sys.exit(1)


def _refuse(mode: str, is_on: bool, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if is_on and value is not None:
            raise InvalidRequest(name, str(value), f"it has no meaning with {mode}; leave it out")


def _check_heads(shape: ModelShape, placed: PlacedModel, gpus: str | None) -> None:
    group = placed.group
    if shape.num_heads % group.count:
        even = ", ".join(str(count) for count in range(1, group.gpu.per_node + 1) if shape.num_heads % count == 0)
        limit = f"{shape.name} has {shape.num_heads} attention heads to share out evenly: {even} GPUs"
        raise InvalidRequest("--gpus", gpus, limit)


def _print(deployment: Deployment, sizing: Sizing, notes: list[str]) -> None:
    from cluster.cli.bench.table import print_table
    from cluster.deploy.size.report import is_served, sections, settings

    for number, section in enumerate(sections(deployment, sizing, notes)):
        if number:
            print()
        if isinstance(section, str):
            print(textwrap.fill(section, _WIDTH, break_on_hyphens=False), flush=True)
        else:
            print_table(*section, sys.stdout)
    if sizing.memory.fits and is_served(deployment.target):
        print("\nSettings of the cheapest:")
        for key, value in settings(deployment, sizing.cheapest).items():
            print(f"  --set {key}={value}")


def _notes(deployment: Deployment, sizing: Sizing, *, is_assumed: bool) -> list[str]:
    """Reservations that apply to these figures."""
    from cluster.deploy.size.report import is_cpu, is_served

    target, draft = deployment.target, deployment.draft
    notes = ["Times are what good kernels can reach at best; reading prompts is not included."]
    if is_assumed:
        what = "`paceline bench local --compare` tells that of your texts."
        notes.append(f"An acceptance of {draft.acceptance} is assumed; {what}")
    if draft.placed is not None and not sizing.drafted:
        notes.append(f"{draft.placed.shape.name} with the caches of its requests fits on no {draft.placed.group.name}.")
    if draft.placed is not None and deployment.gpu_hour is None:
        notes.append("Without prices a draft GPU counts as much as one of the target's.")
    if deployment.concurrency * (1 + sizing.fastest.draft_tokens) <= sizing.free_rows:
        notes.append(f"Up to {sizing.free_rows:,.0f} rows a round read no more weights and wait for no product.")
    else:
        notes.append(f"Beyond {sizing.free_rows:,.0f} rows a round every drafted token costs time.")
    what = ""
    if not target.precision.is_served:
        what = f"Paceline's engine does not compute in {target.precision.name} yet"
    elif not is_served(target):
        what = "Paceline's target.quantization needs target.tensor_parallel 1 so far"
    if what:
        whose = "this CPU" if is_cpu(target) else "GPUs"
        notes.append(f"{what}: this is what {whose} can do, and there are no settings for it.")
    return notes
