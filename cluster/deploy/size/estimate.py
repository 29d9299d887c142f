"""Speed of a deployment: rounds with and without drafts (Leviathan et al. 2023; one round ahead: SSD, arXiv
2603.03251), and how many draft workers pay. Formulas: docs/sizing.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from actors.options import DEFAULT_EAGLE_TOP_K
from cluster.config import SpeculationConfig
from cluster.deploy.size.placed_model import ForwardTime, MemoryFit, PlacedModel

Drafting = Literal["none", "on the CPU", "by the head", "on request", "one round ahead"]
MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens  # tried where the number is left open
FEWEST_HEAD_LEVELS = 2  # target.eagle_depth is at least 1: the root's children, and those of an expanded node
WORTHWHILE_GAIN = 1.01  # a smaller speed-up is not worth a GPU, nor a change


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to serve, with `concurrency` answers under way."""

    drafting: Drafting
    section: str | None  # of the draft model in the configuration; None: there are no draft workers
    draft_workers: int
    draft_gpus: int  # of all workers
    draft_tokens: int  # a sequence and round
    tokens_per_round: float  # per sequence
    round_s: float
    tokens_per_s: float  # all sequences together
    tokens_per_s_stream: float
    ratio: float  # to decoding without drafts
    tokens_per_s_gpu: float  # draft GPUs included
    cost_per_million: float | None  # tokens; None without prices


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPool:
    """A draft model, on workers of its own."""

    section: str  # of the configuration: draft, or more_drafts.NAME
    model: PlacedModel  # on a worker's GPUs
    most_levels: int = MAX_DRAFT_TOKENS  # tried where draft_tokens is None: gamma
    acceptance: float  # probability that a guess is right, in [0, 1]
    outcomes: int  # that a worker drafts for ahead; 0: none
    min_workers: int = 1
    max_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is asked for."""

    target: PlacedModel
    concurrency: int  # sequences in a round
    context: int  # cached tokens of each
    link_s: float  # a message from the router to a worker and back
    pools: tuple[DraftPool, ...] = ()  # a round asks one of them
    head: PlacedModel | None = None  # whole on each of the target's devices
    head_setting: str | None = None  # target.eagle_head; None: no certain head is asked for
    head_acceptance: float = 0.0  # probability that a guess of the head is right, in [0, 1]
    cpu_acceptance: float | None  # of drafters on the router's CPU, which take no time; None: there are none
    assumed: tuple[str, ...] = ()  # figures that nobody has given
    draft_tokens: int | None  # a sequence and round; None: the best number
    most_draft_tokens: int = MAX_DRAFT_TOKENS  # tried where draft_tokens is None
    head_levels: int | None = None  # most forwards of a head, all of which are counted; None: the best number
    hit_rate: float  # share of drafts made ahead that can be used
    gpu_hour: float | None = None  # price of a target GPU; None: all GPUs count alike
    draft_gpu_hour: float | None = None  # None: as gpu_hour
    seconds_of_rows: Callable[[int], float] | None = None  # measured forwards; None: the roofline

    def lengths(self, limit: int = MAX_DRAFT_TOKENS) -> Sequence[int]:
        """Numbers of draft tokens that are tried, at most `limit`."""
        if self.draft_tokens is not None:
            return (self.draft_tokens,)
        return range(1, min(self.most_draft_tokens, limit) + 1)

    def memory(self, **changes: Any) -> MemoryFit:
        """The target's memory, with fields of it changed."""
        rows = self.concurrency * (1 + max(self.lengths(), default=0))
        return replace(self.target, **changes).memory(rows, self.concurrency, self.context, self.head)

    def verify_s(self, drafts: float) -> float:
        """Forward of the target and link, with `drafts` draft tokens a sequence on average."""
        rows = max(1, round(self.concurrency * (1.0 + drafts)))
        if self.seconds_of_rows is not None:
            return self.seconds_of_rows(rows) + self.link_s
        return self.target.forward_time(rows, self.concurrency, self.context).total_s + self.link_s

    def price(self, draft_gpus: int) -> float:
        """The price of an hour; without prices, the number of GPUs."""
        gpu_hour = self.gpu_hour or 1.0
        return self.target.count * gpu_hour + draft_gpus * (self.draft_gpu_hour or gpu_hour)

    def speed(
        self,
        drafting: Drafting,
        workers: int,
        drafts: int,
        *,
        tokens: float,
        round_s: float,
        pool: DraftPool | None = None,
    ) -> Speed:
        """Rounds of `round_s` seconds with `tokens` tokens a sequence."""
        stream = tokens / round_s
        draft_gpus = workers * (0 if pool is None else pool.model.count)
        all_streams = stream * self.concurrency
        return Speed(
            drafting=drafting,
            section=None if pool is None else pool.section,
            draft_workers=workers,
            draft_gpus=draft_gpus,
            draft_tokens=drafts,
            tokens_per_round=tokens,
            round_s=round_s,
            tokens_per_s=all_streams,
            tokens_per_s_stream=stream,
            ratio=stream * self.verify_s(0),
            tokens_per_s_gpu=all_streams / (self.target.count + draft_gpus),
            cost_per_million=self.gpu_hour and self.price(draft_gpus) / (all_streams * 3600.0) * 1e6,
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    deployment: Deployment
    memory: MemoryFit
    forward: ForwardTime  # without drafts
    free_rows: float
    speeds: list[Speed]  # without drafts, from the CPU, by the head, then by draft workers, if they fit on a GPU
    cheapest: Speed
    fastest: Speed  # the first within 1 % of the best


def sizing_of(deployment: Deployment) -> Sizing:
    target, count = deployment.target, deployment.concurrency
    speeds = list(_speeds(deployment))
    best = max(speed.tokens_per_s for speed in speeds)
    return Sizing(
        deployment=deployment,
        memory=deployment.memory(),
        forward=target.forward_time(count, count, deployment.context),
        free_rows=target.free_rows(),
        speeds=speeds,
        cheapest=max(speeds, key=lambda speed: speed.tokens_per_s / deployment.price(speed.draft_gpus)),
        fastest=next(speed for speed in speeds if speed.tokens_per_s * WORTHWHILE_GAIN >= best),
    )


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


def _speeds(deployment: Deployment) -> Iterator[Speed]:
    """The best number of draft tokens for every way to draft and number of workers."""
    yield deployment.speed("none", 0, 0, tokens=1.0, round_s=deployment.verify_s(0))
    if (acceptance := deployment.cpu_acceptance) is not None:
        rounds = partial(_round_of_cpu, acceptance=acceptance)
        yield from _best_lengths(deployment, 0, MAX_DRAFT_TOKENS, rounds)
    if (head := deployment.head) is not None:
        limit = deployment.head_levels or MAX_DRAFT_TOKENS
        yield from _best_lengths(deployment, 0, limit, partial(_round_of_head, head=head))
    for pool in deployment.pools:
        yield from _speeds_of_pool(deployment, pool)


def _speeds_of_pool(deployment: Deployment, pool: DraftPool) -> Iterator[Speed]:
    limit = min(pool.max_workers, deployment.concurrency)
    most = max(deployment.lengths(pool.most_levels), default=0)
    for workers in range(min(pool.min_workers, limit), limit + 1):
        sequences = -(-deployment.concurrency // workers)
        _, rows = _draft_forwards(pool, most, sequences * max(1, pool.outcomes))
        if pool.model.memory(rows, sequences, deployment.context).fits:
            rounds = partial(_rounds_of_workers, pool=pool, sequences=sequences)
            yield from _best_lengths(deployment, workers, pool.most_levels, rounds, pool)


_Rounds = Iterator[tuple[Drafting, float, float]]  # (way, expected tokens of a sequence, seconds) of a round


def _best_lengths(
    deployment: Deployment,
    workers: int,
    limit: int,
    rounds: Callable[[Deployment, int], _Rounds],
    pool: DraftPool | None = None,
) -> list[Speed]:
    """The fastest number of draft tokens, at most `limit`, of each way to draft. rounds: by number of draft tokens."""
    best: dict[Drafting, Speed] = {}
    for drafts in deployment.lengths(limit):
        for drafting, tokens, round_s in rounds(deployment, drafts):
            speed = deployment.speed(drafting, workers, drafts, tokens=tokens, round_s=round_s, pool=pool)
            if drafting not in best or speed.tokens_per_s > best[drafting].tokens_per_s:
                best[drafting] = speed
    return list(best.values())


def _round_of_cpu(deployment: Deployment, drafts: int, acceptance: float) -> _Rounds:
    yield "on the CPU", tokens_per_round(acceptance, drafts), deployment.verify_s(drafts)


def _round_of_head(deployment: Deployment, drafts: int, head: PlacedModel) -> _Rounds:
    """A head drafts on the target's devices, after the target. It expands `top_k` nodes of a level; a one-pass head has
    a row for each token instead."""
    levels = deployment.head_levels or max(FEWEST_HEAD_LEVELS, drafts)
    forwards, rows = (1, levels) if head.shape.is_parallel else (levels, DEFAULT_EAGLE_TOP_K)
    time = head.forward_time(deployment.concurrency * rows, deployment.concurrency, deployment.context)
    tokens = tokens_per_round(deployment.head_acceptance, drafts)
    yield "by the head", tokens, deployment.verify_s(drafts) + forwards * time.total_s


def _draft_forwards(pool: DraftPool, drafts: int, chains: int) -> tuple[int, int]:
    """Forwards that make `drafts` guesses for each of so many chains, and the rows of each."""
    return (1, chains * drafts) if pool.model.shape.is_parallel else (drafts, chains)


def _rounds_of_workers(deployment: Deployment, drafts: int, pool: DraftPool, sequences: int) -> _Rounds:
    """Rounds with a worker for every `sequences`."""

    def draft_s(chains: int) -> float:
        forwards, rows = _draft_forwards(pool, drafts, chains)
        return forwards * pool.model.forward_time(rows, sequences, deployment.context).total_s

    hit_rate, verify_s = deployment.hit_rate, deployment.verify_s(drafts)
    tokens = tokens_per_round(pool.acceptance, drafts)
    yield "on request", tokens, round_on_request(verify_s, draft_s(sequences), deployment.link_s)
    if not pool.outcomes:
        return
    ahead_s = draft_s(sequences * pool.outcomes)
    # If some drafts are for other outcomes, all sequences wait for new ones, or theirs go without in this round.
    all_hit = hit_rate**deployment.concurrency
    yield "one round ahead", tokens, round_ahead(verify_s, ahead_s, deployment.link_s, all_hit)
    yield "one round ahead", 1.0 + hit_rate * (tokens - 1.0), max(deployment.verify_s(drafts * hit_rate), ahead_s)
