"""`paceline size`: memory and speed of a deployment, before anything is bought or started."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import typer

from actors.errors import InvalidRequest
from cluster.cli.output import print_json
from cluster.cli.row_times import parse_row_times
from cluster.cli.table import print_table
from cluster.deploy.size.estimate import CPU, EFFICIENCY, Deployment, Dtype, KvDtype, PlacedModel, Sizing, sizing_of
from cluster.deploy.size.hardware import GPUS, Gpu, measure_cpu, parse_gpus, read_hardware
from cluster.deploy.size.model_shape import find_model
from cluster.deploy.size.report import as_json, sections, settings
from cluster.router.step_time import StepTimeCurve

_MODEL_ACCEPTANCE = 0.7  # default with a draft model
_CPU_ACCEPTANCE = 0.5  # default with drafters on the CPU: two tokens a round
_WIDTH = 120


def size(
    target: str = typer.Option(..., help="A known model, such as llama-70b, or a directory with a config.json."),
    gpus: str = typer.Option(None, metavar="NAME:NUMBER", help="GPUs that share the target, such as h200:8."),
    cpu: bool = typer.Option(False, "--cpu", help="Size this machine's CPU instead; its rates are measured first."),
    memory_gib: float = typer.Option(None, min=0.1, help="With --cpu: of another machine than this one."),
    bandwidth_gb_s: float = typer.Option(None, min=0.1, help="With --cpu: memory bandwidth, instead of measuring it."),
    dtype: Dtype = typer.Option("bfloat16", case_sensitive=False, help="Of the weights."),
    kv_dtype: KvDtype = typer.Option("auto", case_sensitive=False, help="Of the KV cache; auto: as computed."),
    concurrency: int = typer.Option(1, min=1, max=4096, help="Requests at once."),
    context: int = typer.Option(4096, min=1, help="Cached tokens of a request, prompt and answer."),
    draft: str = typer.Option(None, help="A draft model, as --target; by default drafters on the router's CPU."),
    draft_gpu: str = typer.Option(None, metavar="NAME", help="GPU of a draft worker; by default the target's kind."),
    draft_dtype: Dtype = typer.Option("bfloat16", case_sensitive=False, help="Of the draft model's weights."),
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
    output: Literal["text", "json"] = typer.Option("text", "--format"),
) -> None:
    """Whether a target fits, how fast it is with and without drafts, and how many draft workers pay.

    The formulas are in docs/sizing.md. Exit status 1 if it does not fit.
    """
    asked = Namespace(**locals())
    _check(asked)
    sizing = sizing_of(_deployment(asked, parse_row_times(row_times)))
    if output == "json":
        print_json(as_json(sizing))
    else:
        _print(sizing)
    if not sizing.memory.fits:
        sys.exit(1)


def _check(asked: Namespace) -> None:
    """Refuse options that mean nothing beside the others. Raises InvalidRequest."""
    unpriced = asked.price_per_gpu_hour is None
    for applies, limit, names in (
        (asked.cpu, "it has no meaning with --cpu; leave it out", ("draft", "price_per_gpu_hour", "hardware")),
        (not asked.cpu, "it has no meaning with --gpus; leave it out", ("memory_gib", "bandwidth_gb_s")),
        (asked.draft is None, "give --draft, too", ("draft_gpu", "draft_price_per_gpu_hour")),
        (unpriced, "give --price-per-gpu-hour, too", ("draft_price_per_gpu_hour",)),
    ):
        for name in names:
            if applies and (value := getattr(asked, name)) is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')}", str(value), limit)
    if asked.cpu == (asked.gpus is not None):
        raise InvalidRequest("--gpus", asked.gpus, "give either --gpus or --cpu")


def _deployment(asked: Namespace, measured: tuple[tuple[int, float], ...]) -> Deployment:
    """The deployment that the options describe. Raises InvalidRequest, or ModelError for an unusable model."""
    known = {**GPUS, **(read_hardware(asked.hardware) if asked.hardware else {})}
    target = _target(asked, known)
    drafter = None if asked.draft is None else _drafter(asked, known, target)
    assumed = _CPU_ACCEPTANCE if drafter is None else _MODEL_ACCEPTANCE
    return Deployment(
        target=target,
        drafter=drafter,
        concurrency=asked.concurrency,
        context=asked.context,
        link_s=asked.link_ms / 1000,
        acceptance=assumed if asked.acceptance is None else asked.acceptance,
        is_assumed=asked.acceptance is None,
        draft_tokens=asked.draft_tokens,
        hit_rate=asked.hit_rate,
        outcomes=asked.draft_ahead,
        max_workers=asked.max_draft_workers,
        gpu_hour=asked.price_per_gpu_hour,
        draft_gpu_hour=asked.draft_price_per_gpu_hour,
        seconds_of_rows=StepTimeCurve(measured).seconds if measured else None,
    )


def _target(asked: Namespace, known: Mapping[str, Gpu]) -> PlacedModel:
    shape = find_model(asked.target, "--target")
    if asked.context > shape.max_context:
        raise InvalidRequest("--context", asked.context, f"{shape.name} takes {shape.max_context} tokens at most")
    if asked.cpu:
        device, gpu, count = CPU, measure_cpu(asked.dtype, asked.memory_gib, asked.bandwidth_gb_s), 1
    else:
        device, gpu, count = parse_gpus(asked.gpus, "--gpus", known)
    if shape.num_heads % count:
        even = ", ".join(str(n) for n in range(1, gpu.per_node + 1) if shape.num_heads % n == 0)
        limit = f"{shape.name} has {shape.num_heads} attention heads to share out evenly: {even} GPUs"
        raise InvalidRequest("--gpus", asked.gpus, limit)
    return PlacedModel(
        shape=shape,
        device=device,
        gpu=gpu,
        count=count,
        dtype=asked.dtype,
        kv_dtype=asked.kv_dtype,
        efficiency=asked.efficiency or (1.0 if asked.cpu else EFFICIENCY),
    )


def _drafter(asked: Namespace, known: Mapping[str, Gpu], target: PlacedModel) -> PlacedModel:
    """The draft model, by default on one GPU of the target's kind."""
    shape = find_model(asked.draft, "--draft")
    placed = replace(target, shape=shape, count=1, dtype=asked.draft_dtype, kv_dtype="auto")
    if asked.draft_gpu is None:
        return placed
    device, gpu, count = parse_gpus(asked.draft_gpu, "--draft-gpu", known)
    return replace(placed, device=device, gpu=gpu, count=count)


def _print(sizing: Sizing) -> None:
    for number, section in enumerate(sections(sizing)):
        if number:
            print()
        if isinstance(section, str):
            print(textwrap.fill(section, _WIDTH, break_on_hyphens=False), flush=True)
        else:
            print_table(*section, sys.stdout)
    if chosen := settings(sizing):
        print("\nSettings of the cheapest:")
        for key, value in chosen.items():
            print(f"  --set {key}={value}")
