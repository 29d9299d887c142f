"""The deployment that the options of `paceline size` describe."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from actors.errors import InvalidRequest
from actors.options import MTP_HEAD
from actors.pool_names import FIRST_POOL
from cluster.deploy.size.estimate import Deployment, DraftPool
from cluster.deploy.size.hardware import GPUS, Gpu, measure_cpu, parse_gpus, read_hardware
from cluster.deploy.size.head_shape import ASSUMED, find_head
from cluster.deploy.size.model_shape import find_model
from cluster.deploy.size.placed_model import CPU, EFFICIENCY, PlacedModel
from cluster.router.step_time import StepTimeCurve

_MODEL_ACCEPTANCE = 0.7  # default with a draft model or a head
_CPU_ACCEPTANCE = 0.5  # default with drafters on the CPU: two tokens a round
_MOST_ACCEPTANCE = 0.99
HEAD, CPU_DRAFTERS = "head", "cpu"  # what drafts beside draft models, which go by their sections
_DTYPE, _LINK_MS, _HIT_RATE, _AHEAD = "bfloat16", 0.2, 0.9, 8
_CONTEXT = 4096


def deployment_of(asked: Namespace, measured: tuple[tuple[int, float], ...]) -> Deployment:
    """asked: the command's options; measured: (rows, seconds) of forwards, none for the roofline. Raises
    InvalidRequest, or ModelError for an unusable model."""
    known = {**GPUS, **(read_hardware(asked.hardware) if asked.hardware else {})}
    target = _target(asked, known)
    sections = [*([] if asked.draft is None else [FIRST_POOL]), *asked.more_drafts]
    drafting = [*sections, *([] if asked.eagle_head is None else [HEAD])]
    given = parse_acceptance(asked.acceptance, drafting)
    acceptance = dict.fromkeys(drafting, _MODEL_ACCEPTANCE) | {CPU_DRAFTERS: _CPU_ACCEPTANCE} | given
    pools = tuple(_pools(asked, known, target, acceptance))
    head = None if asked.eagle_head is None else _head(asked, target)
    return Deployment(
        target=target,
        pools=pools,
        head=head,
        head_setting=None if asked.eagle_head == ASSUMED else asked.eagle_head,
        concurrency=asked.concurrency,
        context=asked.context or _CONTEXT,
        link_s=(_LINK_MS if asked.link_ms is None else asked.link_ms) / 1000,
        head_acceptance=acceptance.get(HEAD, 0.0),
        cpu_acceptance=acceptance[CPU_DRAFTERS],
        assumed=tuple(_assumed(asked, drafting, given, is_measured=bool(measured))),
        draft_tokens=asked.draft_tokens,
        hit_rate=_HIT_RATE if asked.hit_rate is None else asked.hit_rate,
        gpu_hour=asked.price_per_gpu_hour,
        draft_gpu_hour=asked.draft_price_per_gpu_hour,
        seconds_of_rows=StepTimeCurve(measured).seconds if measured else None,
    )


def parse_acceptance(text: str, drafting: Sequence[str]) -> dict[str, float]:
    """`0.8` or `0.8,head=0.7` -> probabilities by what drafts. drafting: sections of draft models, and the head. A
    number without a name is for all others of them, or for the CPU's drafters where there are none. Raises
    InvalidRequest."""
    given: dict[str, float] = {}
    names = (*drafting, CPU_DRAFTERS)
    for part in text.split(",") if text else ():
        name, sign, number = (piece.strip() for piece in part.rpartition("="))
        share = _number(number)
        is_known = name in names if sign else True
        if not is_known or name in given or not 0.0 <= share <= _MOST_ACCEPTANCE:
            limit = f"write a number from 0 to {_MOST_ACCEPTANCE}, or NAME=NUMBER, comma-separated, where NAME is "
            raise InvalidRequest("--acceptance", text, f"{limit}{' or '.join(names)}, each once")
        given[name] = share
    of_all = dict.fromkeys(drafting or [CPU_DRAFTERS], given.pop("")) if "" in given else {}
    return of_all | given


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _assumed(asked: Namespace, drafting: Sequence[str], given: Mapping[str, float], is_measured: bool) -> Iterator[str]:
    """Figures that were not given, with the options that give them. drafting, given: as of `parse_acceptance`."""
    if asked.context is None:
        yield f"{_CONTEXT:,} cached tokens of a request (--context)"
    guessing = [name for name in drafting if name not in given]
    if guessing:
        whose = " or ".join("the head" if name == HEAD else f"the draft model {name}" for name in guessing)
        yield f"a guess of {whose} is right with probability {_MODEL_ACCEPTANCE} (--acceptance)"
    if CPU_DRAFTERS not in given:
        option = f"(--acceptance {CPU_DRAFTERS}=...)"
        yield f"a guess of the CPU's drafters is right with probability {_CPU_ACCEPTANCE} {option}"
    if set(drafting) - {HEAD} and asked.hit_rate is None:
        yield f"{_HIT_RATE:.0%} of drafts made ahead can be used (--hit-rate)"
    if asked.eagle_head == MTP_HEAD:
        yield "the size of the MTP head, one layer of the target's"
    if asked.eagle_head == ASSUMED:
        yield "the size of the head, one layer like the target's with 32,000 outputs (--eagle-head DIRECTORY)"
    if asked.link_ms is None:
        yield f"{_LINK_MS} ms from the router to a worker and back (--link-ms)"
    if asked.efficiency is None and not asked.cpu and not is_measured:
        yield f"{EFFICIENCY:.0%} of the rates of data sheets are reached (--efficiency)"


def _target(asked: Namespace, known: Mapping[str, Gpu]) -> PlacedModel:
    shape = find_model(asked.target, "--target")
    context = asked.context or _CONTEXT
    if context > shape.max_context:
        raise InvalidRequest("--context", context, f"{shape.name} takes {shape.max_context} tokens at most")
    if asked.cpu:
        device, gpu, count = CPU, measure_cpu(asked.dtype or _DTYPE, asked.memory_gib, asked.bandwidth_gb_s), 1
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
        dtype=asked.dtype or _DTYPE,
        kv_dtype=asked.kv_dtype,
        efficiency=asked.efficiency or (1.0 if asked.cpu else EFFICIENCY),
    )


def _pools(
    asked: Namespace, known: Mapping[str, Gpu], target: PlacedModel, acceptance: Mapping[str, float]
) -> Iterator[DraftPool]:
    """The draft models, by default each on one GPU of the target's kind, or on as many as it has ranks. acceptance: by
    section."""
    placed, is_counted = replace(target, count=1, kv_dtype="auto"), False
    if asked.draft_gpu is not None:
        device, gpu, count = parse_gpus(asked.draft_gpu, "--draft-gpu", known)
        placed, is_counted = replace(placed, device=device, gpu=gpu, count=count), ":" in asked.draft_gpu
    first = {} if asked.draft is None else {FIRST_POOL: (asked.draft, asked.draft_dtype)}
    for section, (spec, dtype) in {**first, **asked.more_drafts}.items():
        shape = find_model(spec, "--draft" if section == FIRST_POOL else f"{section}.model")
        count = placed.count if is_counted else asked.draft_ranks.get(section, 1)
        if shape.num_heads % count:
            limit = f"{shape.name} has {shape.num_heads} attention heads, which {count} GPUs cannot share evenly"
            raise InvalidRequest("--draft-gpu", asked.draft_gpu or count, limit)
        yield DraftPool(
            section=section,
            model=replace(placed, shape=shape, count=count, dtype=dtype or _DTYPE),
            acceptance=acceptance[section],
            outcomes=_AHEAD if asked.draft_ahead is None else asked.draft_ahead,
            max_workers=asked.max_draft_workers,
        )


def _head(asked: Namespace, target: PlacedModel) -> PlacedModel:
    """The head: each of the target's devices has all of it, in 16 bits where the target is quantized."""
    dtype = target.dtype if target.dtype in ("float32", "float16") else _DTYPE
    shape = find_head(asked.eagle_head, target.shape, "--eagle-head")
    return replace(target, shape=shape, count=1, dtype=dtype, kv_dtype="auto")
