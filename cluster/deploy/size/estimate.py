"""Sizing of a deployment: memory, speed with and without drafts (Leviathan et al. 2023; one round ahead: SSD, arXiv
2603.03251), and how many draft workers pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from cluster.config import SpeculationConfig
from cluster.deploy.size.hardware import PRECISIONS, QUANTIZED
from cluster.deploy.size.roofline import ForwardTime, MemoryFit, PlacedModel, free_rows, memory_fit

Drafting = Literal["none", "on the CPU", "on request", "one round ahead"]

MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens  # tried where the number is left open
_WORTHWHILE_GAIN = 1.01  # of speed; a smaller one is not worth a GPU


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How drafts are made."""

    placed: PlacedModel | None  # the draft model on a worker's GPU; None: drafters on the router's CPU, in no time
    acceptance: float  # probability that a guess is right, in [0, 1]
    draft_tokens: int | None  # a sequence and round; None: the best number
    hit_rate: float  # share of drafts made ahead that can be used
    outcomes: int  # that a worker drafts for ahead
    max_workers: int


@dataclass(frozen=True, slots=True)
class Deployment:
    target: PlacedModel
    concurrency: int  # sequences in a round
    context: int  # cached tokens of each
    prefill_rows: int  # prompt rows of a round, for which memory is kept
    link_s: float  # a message from the router to a worker and back
    draft: DraftPlan
    gpu_hour: float | None = None  # price of a target GPU; None: all GPUs count alike
    draft_gpu_hour: float | None = None  # None: as gpu_hour
    seconds_of_rows: Callable[[int], float] | None = None  # measured forwards; None: the roofline

    def memory(self, target: PlacedModel) -> MemoryFit:
        drafts = MAX_DRAFT_TOKENS if self.draft.draft_tokens is None else self.draft.draft_tokens
        rows = self.concurrency * (1 + drafts)
        return memory_fit(target, self.concurrency, self.context, rows=rows, prefill_rows=self.prefill_rows)

    def verify_s(self, drafts: float) -> float:
        """Forward of the target and link, with `drafts` draft tokens a sequence on average."""
        rows = max(1, round(self.concurrency * (1.0 + drafts)))
        if self.seconds_of_rows is not None:
            return self.seconds_of_rows(rows) + self.link_s
        return self.target.forward_time(rows, self.concurrency, self.context).total_s + self.link_s

    def price(self, workers: int) -> float:
        """Of an hour; without prices, the number of GPUs."""
        gpu_hour = 1.0 if self.gpu_hour is None else self.gpu_hour
        draft_gpu_hour = gpu_hour if self.draft_gpu_hour is None else self.draft_gpu_hour
        return self.target.group.count * gpu_hour + workers * draft_gpu_hour


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to serve, with `concurrency` answers under way."""

    drafting: Drafting
    draft_workers: int
    draft_tokens: int  # a sequence and round
    tokens_per_round: float  # of a sequence
    round_s: float
    tokens_per_s: float  # of all sequences
    tokens_per_s_stream: float
    ratio: float  # to decoding without drafts
    tokens_per_s_gpu: float  # draft GPUs included
    cost_per_million: float | None  # tokens; None without prices


@dataclass(frozen=True, slots=True)
class Sizing:
    memory: MemoryFit
    max_sequences: int  # of the given context
    forward: ForwardTime  # without drafts
    free_rows: float
    plain: Speed
    drafted: tuple[Speed, ...]  # by draft workers; empty if the draft model fits on none of its GPUs
    cheapest: Speed
    fastest: Speed  # the first within 1 % of the best


def size(deployment: Deployment) -> Sizing:
    target, count, context = deployment.target, deployment.concurrency, deployment.context
    memory = deployment.memory(target)
    plain = _speed(deployment, "none", (0, 0), tokens=1.0, round_s=deployment.verify_s(0))
    drafted = tuple(_drafted(deployment))
    everything = (plain, *drafted)
    best = max(one.tokens_per_s for one in everything)
    return Sizing(
        memory=memory,
        max_sequences=memory.room_tokens // context,
        forward=target.forward_time(count, count, context),
        free_rows=free_rows(target),
        plain=plain,
        drafted=drafted,
        cheapest=max(everything, key=lambda one: one.tokens_per_s / deployment.price(one.draft_workers)),
        fastest=next(one for one in everything if one.tokens_per_s * _WORTHWHILE_GAIN >= best),
    )


def groups_that_fit(deployment: Deployment) -> list[int]:
    """Numbers of GPUs, ascending, that share the target's heads evenly and hold it with all sequences."""
    placed = deployment.target
    counts = [n for n in range(1, placed.group.gpu.per_node + 1) if placed.shape.num_heads % n == 0]
    groups = {n: replace(placed, group=replace(placed.group, count=n)) for n in counts}
    return [n for n, target in groups.items() if deployment.memory(target).fits]


def precisions_that_fit(deployment: Deployment) -> list[str]:
    """Quantized formats smaller than the target's in which it would fit."""
    placed = deployment.target
    smaller = [name for name in QUANTIZED if PRECISIONS[name].weight_bytes < placed.precision.weight_bytes]
    return [name for name in smaller if deployment.memory(replace(placed, precision=PRECISIONS[name])).fits]


def tokens_per_round(acceptance: float, draft_tokens: int) -> float:
    """Expected tokens of a round with a chain of `draft_tokens` guesses, each right with probability `acceptance`."""
    if acceptance == 1.0:
        return draft_tokens + 1.0
    return (1.0 - acceptance ** (draft_tokens + 1)) / (1.0 - acceptance)


def round_on_request(verify: float, draft: float, network: float) -> float:
    """A round that waits for its draft."""
    return draft + verify + network


def round_ahead(verify: float, draft: float, network: float, hit_rate: float) -> float:
    """A round whose draft was made during the last one; with probability 1 - hit_rate it is asked for again."""
    return hit_rate * max(verify, draft) + (1.0 - hit_rate) * round_on_request(verify, draft, network)


def _drafted(deployment: Deployment) -> Iterable[Speed]:
    draft = deployment.draft
    lengths = range(1, MAX_DRAFT_TOKENS + 1) if draft.draft_tokens is None else (draft.draft_tokens,)
    if draft.placed is None:
        yield max((_on_cpu(deployment, drafts) for drafts in lengths), key=_rate)
        return
    for workers in range(1, min(draft.max_workers, deployment.concurrency) + 1):
        sequences = -(-deployment.concurrency // workers)
        rows = sequences * draft.outcomes
        fit = memory_fit(draft.placed, sequences, deployment.context, rows=rows, prefill_rows=deployment.prefill_rows)
        if fit.fits:
            for way in (_on_request, _one_ahead):
                yield max((way(deployment, draft.placed, workers, drafts) for drafts in lengths), key=_rate)


def _rate(speed: Speed) -> float:
    return speed.tokens_per_s


def _on_cpu(deployment: Deployment, drafts: int) -> Speed:
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    return _speed(deployment, "on the CPU", (0, drafts), tokens=tokens, round_s=deployment.verify_s(drafts))


def _on_request(deployment: Deployment, placed: PlacedModel, workers: int, drafts: int) -> Speed:
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    draft_s = _draft_s(deployment, placed, workers, 1) * drafts
    round_s = round_on_request(deployment.verify_s(drafts), draft_s, deployment.link_s)
    return _speed(deployment, "on request", (workers, drafts), tokens=tokens, round_s=round_s)


def _one_ahead(deployment: Deployment, placed: PlacedModel, workers: int, drafts: int) -> Speed:
    """The faster of two ways to treat sequences whose draft is for another outcome: all wait for them, or they go
    without a draft in this round."""
    hit_rate, how = deployment.draft.hit_rate, (workers, drafts)
    tokens = tokens_per_round(deployment.draft.acceptance, drafts)
    draft_s = _draft_s(deployment, placed, workers, deployment.draft.outcomes) * drafts
    all_hit = hit_rate**deployment.concurrency
    waiting_s = round_ahead(deployment.verify_s(drafts), draft_s, deployment.link_s, all_hit)
    waiting = _speed(deployment, "one round ahead", how, tokens=tokens, round_s=waiting_s)
    going_on_s = max(deployment.verify_s(drafts * hit_rate), draft_s)
    fewer = 1.0 + hit_rate * (tokens - 1.0)
    going_on = _speed(deployment, "one round ahead", how, tokens=fewer, round_s=going_on_s)
    return max((waiting, going_on), key=_rate)


def _draft_s(deployment: Deployment, placed: PlacedModel, workers: int, branches: int) -> float:
    """A forward of the draft model over a worker's share of the sequences, with `branches` rows each."""
    sequences = -(-deployment.concurrency // workers)
    return placed.forward_time(sequences * branches, sequences, deployment.context).total_s


def _speed(deployment: Deployment, drafting: Drafting, how: tuple[int, int], *, tokens: float, round_s: float) -> Speed:
    """how: (draft workers, draft tokens)."""
    workers, drafts = how
    stream = tokens / round_s
    all_streams = stream * deployment.concurrency
    has_prices = deployment.gpu_hour is not None
    return Speed(
        drafting=drafting,
        draft_workers=workers,
        draft_tokens=drafts,
        tokens_per_round=tokens,
        round_s=round_s,
        tokens_per_s=all_streams,
        tokens_per_s_stream=stream,
        ratio=stream * deployment.verify_s(0),
        tokens_per_s_gpu=all_streams / (deployment.target.group.count + workers),
        cost_per_million=deployment.price(workers) / (all_streams * 3600.0) * 1e6 if has_prices else None,
    )
