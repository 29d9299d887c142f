"""Memory and speed of a deployment: the roofline (Williams et al. 2009), rounds with and without drafts (Leviathan et
al. 2023; one round ahead: SSD, arXiv 2603.03251), and how many draft workers pay. Formulas: docs/sizing.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.config import MOST_PREFILL_ROWS, SpeculationConfig
from cluster.deploy.size.hardware import Gpu
from cluster.deploy.size.model_shape import ModelShape

Drafting = Literal["none", "on the CPU", "on request", "one round ahead"]
CPU = "cpu"  # the name of this machine's CPU among devices
EFFICIENCY = 0.8  # share of a data sheet's rates that good kernels reach
MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens  # tried where the number is left open
# Bytes of a weight or number. int4: 4 bits, and a scale with an offset, in float16, for each group of 32.
NUM_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "int4": 0.625}
QUANTIZED = ("fp8", "int8", "int4")  # target.quantization
_PREFILL_ROWS = MOST_PREFILL_ROWS
_RESERVE_BYTES = 2.0 * 2**30  # CUDA context, communicators, captured graphs, fragmentation
_ALL_REDUCE_US_PER_GPU = 0.5  # on top of the link's own latency
_ACTIVATION_BYTES = 2
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
class MemoryFit:
    """Bytes on each device of a group."""

    weights: float
    kv_cache: float  # at the given concurrency and context
    activations: float
    reserve: float
    available: float
    room_tokens: int  # capacity of the KV cache; 0 if the weights do not fit
    needed: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model on devices of one node, which share it by tensor parallelism."""

    shape: ModelShape
    device: str  # its name
    gpu: Gpu
    count: int
    dtype: str  # weights
    kv_dtype: str = "auto"  # auto: float32 with weights in float32, otherwise two bytes a number
    efficiency: float = EFFICIENCY  # in (0, 1]

    @property
    def weight_bytes(self) -> float:
        return NUM_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """On each device. With more devices than KV heads, heads are replicated."""
        auto = "float32" if self.dtype == "float32" else "bfloat16"
        number_bytes = NUM_BYTES[auto if self.kv_dtype == "auto" else self.kv_dtype]
        heads_of_rank = -(-self.shape.num_kv_heads // self.count)
        return self.shape.kv_bytes_per_token(number_bytes) * heads_of_rank / self.shape.num_kv_heads

    def forward_time(self, rows: int, sequences: int, context: int) -> ForwardTime:
        """A pass over `rows` tokens of `sequences` that have `context` cached tokens each. A sequence's cache is read
        once, however many of its rows are verified."""
        shape, gpu, count = self.shape, self.gpu, self.count
        bandwidth = gpu.bandwidth_tb_s * 1e12 * self.efficiency
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
        operations = rows * (2.0 * shape.active_parameters + attended)
        all_reduce_s = 0.0
        if count > 1:
            ring_bytes = 2 * (count - 1) / count * rows * shape.hidden_size * _ACTIVATION_BYTES
            latency_s = (gpu.link_latency_us + _ALL_REDUCE_US_PER_GPU * count) * 1e-6
            all_reduce_s = 2 * shape.num_layers * (latency_s + ring_bytes / (gpu.link_gb_s * 1e9))
        return ForwardTime(
            weights_s=shape.read_parameters(rows) * self.weight_bytes / (bandwidth * count),
            kv_s=sequences * context * self.kv_bytes_per_token / bandwidth,
            compute_s=operations / (gpu.flops(self.dtype) * count * self.efficiency),
            all_reduce_s=all_reduce_s,
        )

    def free_rows(self) -> float:
        """Rows of all sequences together up to which products take no longer than reading the weights."""
        per_row = 2.0 * self.shape.active_parameters / self.gpu.flops(self.dtype)
        rows = 1.0
        for _ in range(32):  # with experts, more rows read more weights
            read = self.shape.read_parameters(max(1, int(rows))) * self.weight_bytes
            rows = read / (self.gpu.bandwidth_tb_s * 1e12) / per_row
        return rows

    def memory(self, rows: int, sequences: int, context: int) -> MemoryFit:
        """rows: verified in one forward, with logits, beside the prompt rows of a round."""
        weights = self.shape.num_parameters * self.weight_bytes / self.count
        logits = 2 * 4 * self.shape.vocab_size * rows  # float32, raw and processed
        hidden = self.shape.hidden_size * (rows + _PREFILL_ROWS)
        activations = _ACTIVATION_BYTES * _LIVE_WIDTHS * hidden + logits
        kv_cache = sequences * context * self.kv_bytes_per_token
        available = self.gpu.memory_gib * 2**30
        left = available - weights - activations - _RESERVE_BYTES
        return MemoryFit(
            weights=weights,
            kv_cache=kv_cache,
            activations=activations,
            reserve=_RESERVE_BYTES,
            available=available,
            room_tokens=max(0, math.floor(left / self.kv_bytes_per_token)),
            needed=weights + kv_cache + activations + _RESERVE_BYTES,
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is asked for."""

    target: PlacedModel
    concurrency: int  # sequences in a round
    context: int  # cached tokens of each
    link_s: float  # a message from the router to a worker and back
    drafter: PlacedModel | None  # on a worker's GPU; None: drafters on the router's CPU, in no time
    acceptance: float  # probability that a guess is right, in [0, 1]
    is_assumed: bool = False  # the acceptance is a default
    draft_tokens: int | None  # a sequence and round; None: the best number
    hit_rate: float  # share of drafts made ahead that can be used
    outcomes: int  # that a worker drafts for ahead
    max_workers: int
    gpu_hour: float | None = None  # price of a target GPU; None: all GPUs count alike
    draft_gpu_hour: float | None = None  # None: as gpu_hour
    seconds_of_rows: Callable[[int], float] | None = None  # measured forwards; None: the roofline

    def memory(self, **changes: Any) -> MemoryFit:
        """The target's memory, with fields of it changed."""
        drafts = MAX_DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens
        rows = self.concurrency * (1 + drafts)
        return replace(self.target, **changes).memory(rows, self.concurrency, self.context)

    def verify_s(self, drafts: float) -> float:
        """Forward of the target and link, with `drafts` draft tokens a sequence on average."""
        rows = max(1, round(self.concurrency * (1.0 + drafts)))
        if self.seconds_of_rows is not None:
            return self.seconds_of_rows(rows) + self.link_s
        return self.target.forward_time(rows, self.concurrency, self.context).total_s + self.link_s

    def price(self, workers: int) -> float:
        """The price of an hour; without prices, the number of GPUs."""
        gpu_hour = self.gpu_hour or 1.0
        return self.target.count * gpu_hour + workers * (self.draft_gpu_hour or gpu_hour)

    def speed(self, drafting: Drafting, workers: int, drafts: int, tokens: float, round_s: float) -> Speed:
        """Rounds of `round_s` seconds with `tokens` tokens a sequence."""
        stream = tokens / round_s
        all_streams = stream * self.concurrency
        return Speed(
            drafting=drafting,
            draft_workers=workers,
            draft_tokens=drafts,
            tokens_per_round=tokens,
            round_s=round_s,
            tokens_per_s=all_streams,
            tokens_per_s_stream=stream,
            ratio=stream * self.verify_s(0),
            tokens_per_s_gpu=all_streams / (self.target.count + workers),
            cost_per_million=self.gpu_hour and self.price(workers) / (all_streams * 3600.0) * 1e6,
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    deployment: Deployment
    memory: MemoryFit
    forward: ForwardTime  # without drafts
    free_rows: float
    speeds: list[Speed]  # without drafts, then by draft workers; the first alone if the draft model fits on no GPU
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
        cheapest=max(speeds, key=lambda speed: speed.tokens_per_s / deployment.price(speed.draft_workers)),
        fastest=next(speed for speed in speeds if speed.tokens_per_s * _WORTHWHILE_GAIN >= best),
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
    drafter, limit = deployment.drafter, min(deployment.max_workers, deployment.concurrency)
    lengths = range(1, MAX_DRAFT_TOKENS + 1) if deployment.draft_tokens is None else (deployment.draft_tokens,)
    for workers in range(1, limit + 1) if drafter else (0,):
        sequences = -(-deployment.concurrency // max(1, workers))
        rows = sequences * deployment.outcomes
        if drafter is not None and not drafter.memory(rows, sequences, deployment.context).fits:
            continue
        best: dict[Drafting, Speed] = {}
        for drafts in lengths:
            for drafting, tokens, round_s in _rounds(deployment, sequences, drafts):
                speed = deployment.speed(drafting, workers, drafts, tokens=tokens, round_s=round_s)
                if drafting not in best or speed.tokens_per_s > best[drafting].tokens_per_s:
                    best[drafting] = speed
        yield from best.values()


def _rounds(deployment: Deployment, sequences: int, drafts: int) -> Iterator[tuple[Drafting, float, float]]:
    """Ways to draft with a worker for every `sequences`: (way, expected tokens of a sequence, seconds) of a round."""
    drafter, hit_rate, verify_s = deployment.drafter, deployment.hit_rate, deployment.verify_s(drafts)
    tokens = tokens_per_round(deployment.acceptance, drafts)
    if drafter is None:
        yield "on the CPU", tokens, verify_s
        return
    request_s, ahead_s = (
        drafts * drafter.forward_time(sequences * branches, sequences, deployment.context).total_s
        for branches in (1, deployment.outcomes)
    )
    yield "on request", tokens, round_on_request(verify_s, request_s, deployment.link_s)
    # If some drafts are for other outcomes, all sequences wait for new ones, or theirs go without in this round.
    all_hit = hit_rate**deployment.concurrency
    yield "one round ahead", tokens, round_ahead(verify_s, ahead_s, deployment.link_s, all_hit)
    yield "one round ahead", 1.0 + hit_rate * (tokens - 1.0), max(deployment.verify_s(drafts * hit_rate), ahead_s)
