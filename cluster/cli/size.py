"""`paceline size`: memory and speed of a deployment, before anything is bought or started."""

from __future__ import annotations

import json
import sys
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actors.errors import InvalidRequest
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.deploy.size.estimate import Deployment, PlacedModel, Sizing

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
    options = dict(locals())
    _check_options(options)
    options["measured"] = parse_row_times(row_times)
    from cluster.deploy.size import estimate
    from cluster.deploy.size.report import as_json, notes_of

    sizing = estimate.size(_deployment(options))
    notes = notes_of(sizing, is_assumed=acceptance is None)
    if output is Format.json:
        typer.echo(json.dumps(as_json(sizing, notes), indent=2))
    else:
        _print(sizing, notes)
    if not sizing.memory.fits:
        sys.exit(1)


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that mean nothing beside the others, before anything slow is imported. Raises InvalidRequest."""
    refused: dict[str, list[str]] = {}
    if options["cpu"]:
        refused["it has no meaning with --cpu; leave it out"] = ["draft", "price_per_gpu_hour", "hardware"]
    else:
        refused["it has no meaning with --gpus; leave it out"] = ["memory_gib", "bandwidth_gb_s"]
    if options["draft"] is None:
        refused["give --draft, too"] = ["draft_gpu", "draft_price_per_gpu_hour"]
    if options["price_per_gpu_hour"] is None:
        refused["give --price-per-gpu-hour, too"] = ["draft_price_per_gpu_hour"]
    for limit, names in refused.items():
        for name in names:
            if options[name] is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')}", str(options[name]), limit)
    if options["cpu"] == (options["gpus"] is not None):
        raise InvalidRequest("--gpus", options["gpus"], "give either --gpus or --cpu")


def _deployment(options: dict[str, Any]) -> Deployment:
    """The deployment that the options describe. Raises InvalidRequest, or ModelError for an unusable model."""
    from cluster.config import RouterConfig
    from cluster.deploy.size.estimate import Deployment
    from cluster.router.step_time import StepTimeCurve

    target, drafter = _placed_models(options)
    acceptance, measured = options["acceptance"], options["measured"]
    if acceptance is None:
        acceptance = _CPU_ACCEPTANCE if drafter is None else _MODEL_ACCEPTANCE
    return Deployment(
        target=target,
        concurrency=options["concurrency"],
        context=options["context"],
        prefill_rows=RouterConfig().max_prefill_rows,
        link_s=options["link_ms"] / 1000,
        drafter=drafter,
        acceptance=acceptance,
        draft_tokens=options["draft_tokens"],
        hit_rate=options["hit_rate"],
        outcomes=options["draft_ahead"],
        max_workers=options["max_draft_workers"],
        gpu_hour=options["price_per_gpu_hour"],
        draft_gpu_hour=options["draft_price_per_gpu_hour"],
        seconds_of_rows=StepTimeCurve(measured).seconds if measured else None,
    )


def _placed_models(options: dict[str, Any]) -> tuple[PlacedModel, PlacedModel | None]:
    """Target and draft model on their devices."""
    from cluster.deploy.size import hardware as hw
    from cluster.deploy.size.estimate import EFFICIENCY, PlacedModel
    from cluster.deploy.size.model_shape import find_model

    gpus, cpu, draft, context = (options[name] for name in ("gpus", "cpu", "draft", "context"))
    known = {**hw.GPUS, **(hw.read_hardware(options["hardware"]) if options["hardware"] is not None else {})}
    dtype = hw.find_dtype(options["dtype"], "--dtype")
    draft_dtype = hw.find_dtype(options["draft_dtype"], "--draft-dtype")
    kv_bytes = hw.find_kv_bytes(options["kv_dtype"], dtype)
    group = None if cpu else hw.parse_gpus(gpus, known=known)
    draft_gpu = options["draft_gpu"] and hw.parse_gpus(options["draft_gpu"], "--draft-gpu", known)
    shape = find_model(options["target"], "--target")
    if context > shape.max_context:
        raise InvalidRequest("--context", context, f"{shape.name} takes {shape.max_context} tokens at most")
    if group is None:
        group = hw.GpuGroup(hw.CPU, hw.measure_cpu(dtype, options["memory_gib"], options["bandwidth_gb_s"]), 1)
    if shape.num_heads % group.count:
        even = ", ".join(str(count) for count in range(1, group.gpu.per_node + 1) if shape.num_heads % count == 0)
        limit = f"{shape.name} has {shape.num_heads} attention heads to share out evenly: {even} GPUs"
        raise InvalidRequest("--gpus", gpus, limit)
    efficiency = options["efficiency"] or (1.0 if cpu else EFFICIENCY)
    target = PlacedModel(shape=shape, group=group, dtype=dtype, kv_bytes=kv_bytes, efficiency=efficiency)
    if draft is None:
        return target, None
    return target, PlacedModel(
        shape=find_model(draft, "--draft"),
        group=draft_gpu or hw.GpuGroup(group.name, group.gpu, 1),
        dtype=draft_dtype,
        kv_bytes=hw.find_kv_bytes("auto", draft_dtype),
        efficiency=efficiency,
    )


def _print(sizing: Sizing, notes: list[str]) -> None:
    from cluster.cli.table import print_table
    from cluster.deploy.size.report import sections, settings

    for number, section in enumerate(sections(sizing, notes)):
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
