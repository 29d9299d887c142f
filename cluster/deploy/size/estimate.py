"""Memory and speed of a deployment: the roofline (Williams et al. 2009), rounds with and without drafts (Leviathan et
al. 2023; one round ahead: SSD, arXiv 2603.03251), and how many draft workers pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cluster.config import SpeculationConfig
from cluster.deploy.size.hardware import QUANTIZED, WEIGHT_BYTES, GpuGroup
from cluster.deploy.size.model_shape import ModelShape

Drafting = Literal["none", "on the CPU", "on request", "one round ahead"]

EFFICIENCY = 0.8  # share of a data sheet's rates that good kernels reach
MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens  # tried where the number is left open
_RESERVE_BYTES = 2.0 * 2**30  # CUDA context, communicators, captured graphs, fragmentation
_ALL_REDUCE_US_PER_GPU = 0.5  # on top of the link's own latency
_ACTIVATION_BYTES = 2  # a number that ranks add up
_LIVE_WIDTHS = 16  # hidden sizes of activations that a row holds at once: residual, MLP, queries
_WORTHWHILE_GAIN = 1.01  # a smaller speed-up is not worth a GPU


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Parts of a forward, seconds."""

    weights_s: float  # reading weights
    kv_s: float  # reading the KV cache of all sequences
    compute_s: float  # products, overlapped with reading
    all_reduce_s: float  # two a layer, not overlapped

    @property
    def total_s(self) -> float:
        return max(self.weights_s + self.kv_s, self.compute_s) + self.all_reduce_s


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on devices, with the formats of its weights and KV cache."""

    shape: ModelShape
    group: GpuGroup
    dtype: str  # weights
    kv_bytes: float  # a number in the KV cache
    efficiency: float = EFFICIENCY  # in (0, 1]

    @property
    def weight_bytes(self) -> float:
        return WEIGHT_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """On each device. With more devices than KV heads, heads are replicated."""
        heads_of_rank = -(-self.shape.num_kv_heads // self.group.count)
        return self.shape.kv_bytes_per_token(self.kv_bytes) * heads_of_rank / self.shape.num_kv_heads

    def forward_time(self, rows: int, sequences: int, context: int) -> ForwardTime:
        """A pass over `rows` tokens of `sequences` that have `context` cached tokens each. A sequence's cache is read
        once, however many of its rows are verified."""
        shape, gpu, count = self.shape, self.group.gpu, self.group.count
        bandwidth = gpu.bandwidth_tb_s * 1e12 * self.efficiency
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
        all_reduce_s = 0.0
        if count > 1:
            ring_bytes = 2 * (count - 1) / count * rows * shape.hidden_size * _ACTIVATION_BYTES
            latency_s = (gpu.link_latency_us + _ALL_REDUCE_US_PER_GPU * count) * 1e-6
            all_reduce_s = 2 * shape.num_layers * (latency_s + ring_bytes / (gpu.link_gb_s * 1e9))
        return ForwardTime(
            weights_s=shape.read_parameters(rows) * self.weight_bytes / (bandwidth * count),
            kv_s=sequences * context * self.kv_bytes_per_token / bandwidth,
            compute_s=rows
            * (2.0 * shape.active_parameters + attended)
            / (gpu.flops(self.dtype) * count * self.efficiency),
            all_reduce_s=all_reduce_s,
        )


def free_rows(placed: PlacedModel) -> float:
    """Rows of all sequences together up to which products take no longer than reading the weights."""
    shape, gpu = placed.shape, placed.group.gpu
    per_row = 2.0 * shape.active_parameters / gpu.flops(placed.dtype)
    rows = 1.0
    for _ in range(32):  # with experts, more rows read more weights
        read = shape.read_parameters(max(1, int(rows))) * placed.weight_bytes
        rows = read / (gpu.bandwidth_tb_s * 1e12) / per_row
    return rows


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Bytes on each device of a group."""

    weights: float
    kv_cache: float  # at the given concurrency and context
    activations: float
    reserve: float
    available: float
    room_tokens: int  # capacity of the KV cache; 0 if the weights do not fit

    @property
    def needed(self) -> float:
        return self.weights + self.kv_cache + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def memory_fit(placed: PlacedModel, sequences: int, context: int, *, rows: int, prefill_rows: int) -> MemoryFit:
    """rows: verified in one forward, with logits; prefill_rows: prompt rows beside them."""
    shape = placed.shape
    weights = shape.num_parameters * placed.weight_bytes / placed.group.count
    logits = 2 * 4 * shape.vocab_size * rows  # float32, raw and processed
    activations = 2 * _LIVE_WIDTHS * shape.hidden_size * (rows + prefill_rows) + logits
    available = placed.group.gpu.memory_gib * 2**30
    left = available - weights - activations - _RESERVE_BYTES
    return MemoryFit(
        weights=weights,
        kv_cache=sequences * context * placed.kv_bytes_per_token,
        activations=activations,
        reserve=_RESERVE_BYTES,
        available=available,
        room_tokens=max(0, math.floor(left / placed.kv_bytes_per_token)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    target: PlacedModel
    concurrency: int  # sequences in a round
    context: int  # cached tokens of each
    prefill_rows: int  # prompt rows of a round, for which memory is kept
    link_s: float  # a message from the router to a worker and back
    drafter: PlacedModel | None  # on a worker's GPU; None: drafters on the router's CPU, in no time
    acceptance: float  # probability that a guess is right, in [0, 1]
    draft_tokens: int | None  # a sequence and round; None: the best number
    hit_rate: float  # share of drafts made ahead that can be used
    outcomes: int  # that a worker drafts for ahead
    max_workers: int
    gpu_hour: float | None = None  # price of a target GPU; None: all GPUs count alike
    draft_gpu_hour: float | None = None  # None: as gpu_hour
    seconds_of_rows: Callable[[int], float] | None = None  # measured forwards; None: the roofline

    def memory(self, target: PlacedModel) -> MemoryFit:
        drafts = MAX_DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens
        rows = self.concurrency * (1 + drafts)
        return memory_fit(target, self.concurrency, self.context, rows=rows, prefill_rows=self.prefill_rows)

    def verify_s(self, drafts: float) -> float:
        """Forward of the target and link, with `drafts` draft tokens a sequence on average."""
        rows = max(1, round(self.concurrency * (1.0 + drafts)))
        if self.seconds_of_rows is not None:
            return self.seconds_of_rows(rows) + self.link_s
        return self.target.forward_time(rows, self.concurrency, self.context).total_s + self.link_s

    def price(self, workers: int) -> float:
        """The price of an hour; without prices, the number of GPUs."""
        gpu_hour = 1.0 if self.gpu_hour is None else self.gpu_hour
        draft_gpu_hour = gpu_hour if self.draft_gpu_hour is None else self.draft_gpu_hour
        return self.target.group.count * gpu_hour + workers * draft_gpu_hour


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to serve, with `concurrency` answers under way."""

    drafting: Drafting
    draft_workers: int
    draft_tokens: int  # a sequence and round
    tokens_per_round: float  # per sequence
    round_s: float
    tokens_per_s: float  # all sequences together
    tokens_per_s_stream: float
    ratio: float  # to decoding without drafts
    tokens_per_s_gpu: float  # draft GPUs included
    cost_per_million: float | None  # tokens; None without prices


@dataclass(frozen=True, slots=True)
class Sizing:
    deployment: Deployment
    memory: MemoryFit
    max_sequences: int  # that fit with the given context
    forward: ForwardTime  # without drafts
    free_rows: float
    plain: Speed
    drafted: tuple[Speed, ...]  # by draft workers; empty if the draft model fits on none of its GPUs
    cheapest: Speed
    fastest: Speed  # the first within 1 % of the best


def size(deployment: Deployment) -> Sizing:
    target, count, context = deployment.target, deployment.concurrency, deployment.context
    memory = deployment.memory(target)
    plain = _speed(deployment, "none", tokens=1.0, round_s=deployment.verify_s(0))
    drafted = tuple(_drafted(deployment))
    everything = (plain, *drafted)
    best = max(one.tokens_per_s for one in everything)
    return Sizing(
        deployment=deployment,
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
    return [n for n in counts if deployment.memory(replace(placed, group=replace(placed.group, count=n))).fits]


def dtypes_that_fit(deployment: Deployment) -> list[str]:
    """Quantized formats smaller than the target's in which it would fit."""
    placed = deployment.target
    smaller = [dtype for dtype in QUANTIZED if WEIGHT_BYTES[dtype] < placed.weight_bytes]
    return [dtype for dtype in smaller if deployment.memory(replace(placed, dtype=dtype)).fits]


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


def _drafted(deployment: Deployment) -> Iterator[Speed]:
    """The best number of draft tokens for every way to draft and number of workers."""
    draft_tokens, context = deployment.draft_tokens, deployment.context
    lengths = range(1, MAX_DRAFT_TOKENS + 1) if draft_tokens is None else (draft_tokens,)
    if (drafter := deployment.drafter) is None:
        tokens = {drafts: tokens_per_round(deployment.acceptance, drafts) for drafts in lengths}
        yield _fastest(
            _speed(deployment, "on the CPU", drafts=drafts, tokens=tokens[drafts], round_s=deployment.verify_s(drafts))
            for drafts in lengths
        )
        return
    for workers in range(1, min(deployment.max_workers, deployment.concurrency) + 1):
        sequences = -(-deployment.concurrency // workers)
        rows = sequences * deployment.outcomes
        if not memory_fit(drafter, sequences, context, rows=rows, prefill_rows=deployment.prefill_rows).fits:
            continue
        speeds = [
            _speed(deployment, drafting, workers=workers, drafts=drafts, tokens=tokens, round_s=round_s)
            for drafts in lengths
            for drafting, tokens, round_s in _rounds(deployment, drafter, sequences, drafts)
        ]
        for way in ("on request", "one round ahead"):
            yield _fastest(speed for speed in speeds if speed.drafting == way)


def _fastest(speeds: Iterator[Speed]) -> Speed:
    return max(speeds, key=lambda speed: speed.tokens_per_s)


def _rounds(
    deployment: Deployment, drafter: PlacedModel, sequences: int, drafts: int
) -> Iterator[tuple[Drafting, float, float]]:
    """Ways to draft with a worker for every `sequences`: (way, expected tokens of a sequence, seconds) of a round."""
    hit_rate, verify_s = deployment.hit_rate, deployment.verify_s(drafts)
    tokens = tokens_per_round(deployment.acceptance, drafts)
    request_s, ahead_s = (
        drafts * drafter.forward_time(sequences * branches, sequences, deployment.context).total_s
        for branches in (1, deployment.outcomes)
    )
    yield "on request", tokens, round_on_request(verify_s, request_s, deployment.link_s)
    # If some drafts are for other outcomes, all sequences wait for new ones, or theirs go without in this round.
    all_hit = hit_rate**deployment.concurrency
    yield "one round ahead", tokens, round_ahead(verify_s, ahead_s, deployment.link_s, all_hit)
    yield "one round ahead", 1.0 + hit_rate * (tokens - 1.0), max(deployment.verify_s(drafts * hit_rate), ahead_s)


def _speed(
    deployment: Deployment, drafting: Drafting, *, tokens: float, round_s: float, workers: int = 0, drafts: int = 0
) -> Speed:
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
