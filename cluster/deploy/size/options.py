"""The deployment that the options of `paceline size` describe."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from actors.errors import InvalidRequest
from cluster.deploy.size.estimate import CPU, EFFICIENCY, Deployment, PlacedModel
from cluster.deploy.size.hardware import GPUS, Gpu, measure_cpu, parse_gpus, read_hardware
from cluster.deploy.size.model_shape import find_model
from cluster.router.step_time import StepTimeCurve

_MODEL_ACCEPTANCE = 0.7  # default with a draft model
_CPU_ACCEPTANCE = 0.5  # default with drafters on the CPU: two tokens a round


def deployment_of(asked: Namespace, measured: tuple[tuple[int, float], ...]) -> Deployment:
    """asked: the command's options; measured: (rows, seconds) of forwards, none for the roofline. Raises
    InvalidRequest, or ModelError for an unusable model."""
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
