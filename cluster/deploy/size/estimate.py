"""Sizing of one deployment: does it fit, how fast is it with and without drafts, how many draft workers pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from cluster.config import SpeculationConfig
from cluster.deploy.size.hardware import GpuGroup
from cluster.deploy.size.memory import MemoryFit, memory_fit
from cluster.deploy.size.precision import PRECISIONS, QUANTIZED
from cluster.deploy.size.roofline import ForwardTime, PlacedModel, free_rows
from cluster.deploy.size.speculation import round_ahead, round_on_request, tokens_per_round

Drafting = Literal["none", "on the CPU", "on request", "one round ahead"]

MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens  # that are tried where the number is left open
_A_GAIN = 1.01  # of speed; what gains less is not worth a GPU


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How drafts are made. `placed` None: on the router's CPU, in no time to speak of."""

    placed: PlacedModel | None  # the draft model on one GPU, which a worker has
    acceptance: float  # of a guess, in [0, 1]
    draft_tokens: int | None  # a sequence and round; None: as many as are best
    hit_rate: float  # how often a draft that was made ahead is for what happened
    outcomes: int  # of a draft that a worker drafts for ahead
    max_workers: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to be sized."""

    target: PlacedModel
    concurrency: int  # sequences in a round
    context: int  # tokens in the cache of each
    prefill_rows: int  # rows of prompts in a round beside them, for which memory is kept
    link_s: float  # a message from the router to a worker and back
    draft: DraftPlan
    gpu_hour: float | None = None  # price of a target GPU; None: all GPUs count alike
    draft_gpu_hour: float | None = None
    seconds_of_rows: Callable[[int], float] | None = None  # measured; None: the roofline


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to serve it, in the steady state of `concurrency` answers under way."""

    drafting: Drafting
    draft_workers: int
    draft_tokens: int  # a sequence and round
    tokens_per_round: float  # of a sequence
    round_s: float
    tokens_per_s: float  # all sequences
    tokens_per_s_stream: float
    ratio: float  # to decoding without drafts
    tokens_per_s_gpu: float  # draft GPUs included
    cost_per_million: float | None  # tokens; None without prices


@dataclass(frozen=True, slots=True)
class Sizing:
    memory: MemoryFit
    max_sequences: int  # of the context asked for
    forward: ForwardTime  # of a round without drafts
    free_rows: float
    plain: Speed
    drafted: tuple[Speed, ...]  # by draft workers; empty where the draft model fits on none of its GPUs
    cheapest: Speed  # of all
    fastest: Speed  # the first of those that are within 1 % of the best


def size(deployment: Deployment) -> Sizing:
    target, context = deployment.target, deployment.context
    memory = _memory(deployment, target)
    plain = _speed(deployment, "none", 0, 0, 1.0, _verify_s(deployment, 0) + deployment.link_s)
    drafted = tuple(_drafted(deployment))
    everything = (plain, *drafted)
    best = max(one.tokens_per_s for one in everything)
    return Sizing(
        memory=memory,
        max_sequences=memory.room_tokens // context,
        forward=target.forward_time(deployment.concurrency, deployment.concurrency, context),
        free_rows=free_rows(target),
        plain=plain,
        drafted=drafted,
        cheapest=max(everything, key=lambda one: one.tokens_per_s / _price(deployment, one.draft_workers)),
        fastest=next(one for one in everything if one.tokens_per_s * _A_GAIN >= best),
    )


def groups_that_fit(deployment: Deployment) -> list[int]:
    """Numbers of GPUs of the target's kind, ascending, that hold it with all its sequences and share its heads."""
    placed, found = deployment.target, []
    for count in range(1, placed.group.gpu.per_node + 1):
        if placed.shape.num_heads % count:
            continue
        group = GpuGroup(placed.group.name, placed.group.gpu, count)
        other = PlacedModel(placed.shape, group, placed.precision, placed.kv_bytes, placed.efficiency)
        if _memory(deployment, other).fits:
            found.append(count)
    return found


def precisions_that_fit(deployment: Deployment) -> list[str]:
    """Those of fewer bits a weight than the target's, in which it would fit where it is."""
    placed = deployment.target
    return [
        name
        for name in QUANTIZED
        if PRECISIONS[name].weight_bytes < placed.precision.weight_bytes
        and _memory(deployment, replace(placed, precision=PRECISIONS[name])).fits
    ]


def _memory(deployment: Deployment, target: PlacedModel) -> MemoryFit:
    drafts = deployment.draft.draft_tokens
    rows = deployment.concurrency * (1 + (MAX_DRAFT_TOKENS if drafts is None else drafts))
    return memory_fit(target, deployment.concurrency, deployment.context, rows, deployment.prefill_rows)


def _drafted(deployment: Deployment) -> Iterable[Speed]:
    if deployment.draft.placed is None:
        yield _best(_on_cpu(deployment, drafts) for drafts in _lengths(deployment))
        return
    for workers in range(1, min(deployment.draft.max_workers, deployment.concurrency) + 1):
        if not _drafter_fits(deployment, workers):
            continue
        yield _best(_on_request(deployment, workers, drafts) for drafts in _lengths(deployment))
        yield _best(_one_ahead(deployment, workers, drafts) for drafts in _lengths(deployment))


def _lengths(deployment: Deployment) -> Iterable[int]:
    given = deployment.draft.draft_tokens
    return (given,) if given is not None else range(1, MAX_DRAFT_TOKENS + 1)


def _best(speeds: Iterable[Speed]) -> Speed:
    return max(speeds, key=lambda one: one.tokens_per_s)


def _on_cpu(deployment: Deployment, drafts: int) -> Speed:
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    round_s = _verify_s(deployment, drafts) + deployment.link_s
    return _speed(deployment, "on the CPU", 0, drafts, tokens, round_s)


def _on_request(deployment: Deployment, workers: int, drafts: int) -> Speed:
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    draft_s = _draft_s(deployment, workers, drafts, 1)
    round_s = round_on_request(_verify_s(deployment, drafts) + deployment.link_s, draft_s, deployment.link_s)
    return _speed(deployment, "on request", workers, drafts, tokens, round_s)


def _one_ahead(deployment: Deployment, workers: int, drafts: int) -> Speed:
    """The better of two ways to treat sequences whose draft is for another outcome: all wait for theirs, or they go
    without in this round."""
    hit_rate = deployment.draft.hit_rate
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    draft_s = _draft_s(deployment, workers, drafts, deployment.draft.outcomes)
    verify_s = _verify_s(deployment, drafts) + deployment.link_s
    all_hit = hit_rate**deployment.concurrency
    waiting_s = round_ahead(verify_s, draft_s, deployment.link_s, all_hit)
    waiting = _speed(deployment, "one round ahead", workers, drafts, tokens, waiting_s)
    fewer_s = max(_verify_s(deployment, drafts * hit_rate) + deployment.link_s, draft_s)
    going_on = _speed(deployment, "one round ahead", workers, drafts, 1.0 + hit_rate * (tokens - 1.0), fewer_s)
    return _best((waiting, going_on))


def _verify_s(deployment: Deployment, drafts: float) -> float:
    """A forward of the target over all sequences with so many drafted tokens each, on average."""
    rows = max(1, round(deployment.concurrency * (1.0 + drafts)))
    if deployment.seconds_of_rows is not None:
        return deployment.seconds_of_rows(rows)
    return deployment.target.forward_time(rows, deployment.concurrency, deployment.context).total_s


def _draft_s(deployment: Deployment, workers: int, drafts: int, branches: int) -> float:
    """A draft of all sequences, shared out evenly: as many forwards as tokens, of so many branches a sequence."""
    placed = deployment.draft.placed
    assert placed is not None
    sequences = -(-deployment.concurrency // workers)
    return drafts * placed.forward_time(sequences * branches, sequences, deployment.context).total_s


def _drafter_fits(deployment: Deployment, workers: int) -> bool:
    draft = deployment.draft
    assert draft.placed is not None
    sequences = -(-deployment.concurrency // workers)
    rows = sequences * draft.outcomes
    return memory_fit(draft.placed, sequences, deployment.context, rows, deployment.prefill_rows).fits


def _speed(
    deployment: Deployment, drafting: Drafting, workers: int, drafts: int, tokens: float, round_s: float
) -> Speed:
    stream = tokens / round_s
    all_streams = stream * deployment.concurrency
    plain_s = _verify_s(deployment, 0) + deployment.link_s
    cost = None
    if deployment.gpu_hour is not None:
        cost = _price(deployment, workers) / (all_streams * 3600.0) * 1e6
    return Speed(
        drafting=drafting,
        draft_workers=workers,
        draft_tokens=drafts,
        tokens_per_round=tokens,
        round_s=round_s,
        tokens_per_s=all_streams,
        tokens_per_s_stream=stream,
        ratio=stream * plain_s,
        tokens_per_s_gpu=all_streams / (deployment.target.group.count + workers),
        cost_per_million=cost,
    )


def _price(deployment: Deployment, workers: int) -> float:
    """Of an hour, in the unit of the prices given; without any, the number of GPUs."""
    gpu_hour = 1.0 if deployment.gpu_hour is None else deployment.gpu_hour
    draft_gpu_hour = gpu_hour if deployment.draft_gpu_hour is None else deployment.draft_gpu_hour
    return deployment.target.group.count * gpu_hour + workers * draft_gpu_hour
