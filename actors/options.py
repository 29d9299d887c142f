"""Options of the engines that run models, one record a component, with defaults and limits.

`cluster.config` nests these records. This module imports neither torch nor ray, so the command line can use it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cache_service.options import Options

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8", "int8", "int4"]
Exactness = Literal["default", "bitwise"]
AttentionBackend = Literal["padded", "triton_tree", "flashinfer"]

EagleDepth = Annotated[int, Field(ge=1, le=32)]
EagleTopK = Annotated[int, Field(ge=1, le=64)]
DEFAULT_EAGLE_DEPTH, DEFAULT_EAGLE_TOP_K = 7, 10  # as in the published code
MTP_HEAD = "mtp"  # in place of the directory of an EAGLE head


# A GPU that a process without Ray may be given by its number. The JSON schema is that of a cluster, which refuses it.
NUMBERED_GPU = r"^cuda:([^0]|0.)"


class ModelOptions(Options):
    """How a model, target or draft, is loaded and how large its KV cache is."""

    dtype: Dtype = "auto"
    """auto: on a GPU the checkpoint's if it has 16 bits, else bfloat16; on a CPU float32, or bfloat16 for a checkpoint
    that has it where this processor is faster so by a tenth, which is measured at the first start."""
    quantization: Quantization = "none"
    """Weights of linear layers, which are quantized while they are read. fp8 rounds activations as well, and needs a
    GPU from Hopper on; a CPU computes it slowly. A checkpoint that is quantized itself needs none."""
    device: Annotated[str, Field(json_schema_extra={"not": {"pattern": NUMBERED_GPU}})] = "auto"
    """auto, cpu or cuda."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Torch threads of one rank or draft worker, on CPU."""
    kv_cache_tokens: Annotated[int, Field(ge=256)] | None = None
    """Tokens of the KV cache. null: as many as the device's memory has room for."""
    enforce_eager: bool = False
    """Run layers as they are: not compiled or in CUDA graphs on a GPU, not fused on a CPU."""
    attention: AttentionBackend | None = None
    """Kernels of attention, see docs/engine.md. null: triton_tree on a GPU from Ampere on, else padded. flashinfer: on
    a GPU, with the extra of that name; an EAGLE head attends as with null."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens of a KV block."""


class EagleOptions(Options):
    """How far an EAGLE tree may grow."""

    depth: EagleDepth = DEFAULT_EAGLE_DEPTH
    """Most levels that are expanded."""
    top_k: EagleTopK = DEFAULT_EAGLE_TOP_K
    """Children of a node, and expanded nodes of a level."""


class TargetOptions(ModelOptions):
    """The target engine, with the head that drafts beside it."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of a target group."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Tokens of prompt and answer together. null: the context length of the model."""
    gpus: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """Share of a GPU that a rank takes, also of its memory; draft workers may have the rest. null: all of it, but where
    `paceline serve` finds too few GPUs, what draft workers leave."""
    kv_cache_fraction: Annotated[float, Field(gt=0, le=0.95)] | None = None
    """Unless kv_cache_tokens is given. On a GPU: share of its memory that model, activations and KV cache together may
    fill; null: 0.9. On a CPU: share of the free memory that the KV cache may fill; null: 0.2."""
    prefix_cache: bool = True
    exact: Exactness = "default"
    """bitwise: neither drafts nor other requests change a bit of the logits. Slower; tested on CPUs, and tried on
    one H200."""
    eagle_head: str = "none"
    """Directory of an EAGLE, P-EAGLE or DFlash head, or mtp for the multi-token prediction head in the target's own
    checkpoint. Every rank has a copy."""
    eagle_depth: EagleDepth = DEFAULT_EAGLE_DEPTH
    eagle_top_k: EagleTopK = DEFAULT_EAGLE_TOP_K

    @property
    def eagle(self) -> EagleOptions:
        return EagleOptions(depth=self.eagle_depth, top_k=self.eagle_top_k)


class TargetGroupOptions(TargetOptions):
    """The target groups of a cluster. Each has `tensor_parallel` ranks and a router of its own."""

    groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Target groups, at least."""
    max_groups: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Target groups, at most: see `autoscaling`. null: always `groups`."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    health_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds; a rank that is silent for longer, three times, has failed."""

    @model_validator(mode="after")
    def _groups_in_range(self) -> TargetGroupOptions:
        if self.max_groups is not None and self.groups > self.max_groups:
            raise ValueError(f"groups is {self.groups}, it must be from 1 to max_groups, {self.max_groups}")
        return self

    @property
    def most_groups(self) -> int:
        return self.groups if self.max_groups is None else self.max_groups


class LookaheadOptions(Options):
    """How the draft model drafts for `ouroboros` (Zhao et al. 2024, arXiv:2402.13720)."""

    window_size: Annotated[int, Field(ge=1, le=64)] = 5
    """Columns of the lookahead window, W."""
    lookahead_level: Annotated[int, Field(ge=2, le=16)] = 5
    """N; phrases have N - 1 tokens."""
    guess_set_size: Annotated[int, Field(ge=-1, le=64, json_schema_extra={"not": {"const": 0}})] = 5
    """Phrases kept for a token, and tried in a forward, G; -1: as many as the pool holds, of which W are tried."""
    num_suffixes: Annotated[int, Field(ge=0, le=16)] = 3
    """Phrases that continue a draft, K."""
    keep_phrases: bool = True
    """Keep phrases from one request of a namespace to the next. false: each request begins with an empty pool."""
    pool_phrases: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 16
    """Phrases kept in all namespaces together, half a kilobyte each."""

    @model_validator(mode="after")
    def _some_guesses(self) -> LookaheadOptions:
        if self.guess_set_size == 0:
            raise ValueError("guess_set_size is 0; it must be from 1 to 64, or -1")
        return self

    @property
    def num_guesses(self) -> int:
        """Phrases tried in a forward."""
        return self.window_size if self.guess_set_size == -1 else self.guess_set_size

    @property
    def phrase_length(self) -> int:
        return self.lookahead_level - 1


class DraftOptions(ModelOptions):
    """The draft engine."""

    gamma: Annotated[int, Field(ge=1, le=64)] = 8
    """Most tokens of a path; a worker stops earlier where another forward would not pay."""
    branch: Annotated[int, Field(ge=1, le=8)] = 2
    """Guesses for each token, 1: a chain; a third hardly gains anything."""
    ahead: Annotated[int, Field(ge=0, le=64)] | None = None
    """Likely outcomes of each draft that a worker drafts for while the target verifies it; 0: none. null: 8 on a GPU,
    none on CPUs, where the work would slow down a target on the same machine."""
    lookahead: LookaheadOptions = LookaheadOptions()
    gpus: Annotated[float, Field(ge=0.01, le=1)] | None = None
    """Share of a GPU that a draft worker, or a rank of one, takes, also of its memory. null: all of it, but less where
    `paceline serve` finds too few GPUs for workers of one rank."""


class DraftPoolOptions(DraftOptions):
    """The draft workers of a cluster."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Draft workers, at least."""
    max_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Draft workers, at most: see `autoscaling`. null: always `workers`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of a draft worker, on one node. More than 1 share the draft model; each has a GPU of its own, or more than
    half of one."""

    @model_validator(mode="after")
    def _workers_in_range(self) -> DraftPoolOptions:
        if self.max_workers is not None and not 1 <= self.workers <= self.max_workers:
            raise ValueError(f"workers is {self.workers}, it must be from 1 to max_workers, {self.max_workers}")
        return self

    @model_validator(mode="after")
    def _ranks_are_apart(self) -> DraftPoolOptions:
        if self.tensor_parallel > 1 and self.gpus is not None and self.gpus <= 0.5:
            raise ValueError(
                f"gpus is {self.gpus:g} with tensor_parallel {self.tensor_parallel}; it must be above 0.5, so that no "
                "two ranks are on one GPU"
            )
        return self

    @property
    def most_workers(self) -> int:
        return self.workers if self.max_workers is None else self.max_workers
