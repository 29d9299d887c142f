"""Which segments a fold rewrites and which generations it closes or drops: pure functions over manifests."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated

from pydantic import Field

from cache_service.formats.manifest import MAX_MANIFEST_SEGMENTS, Generation
from cache_service.formats.segment import MAX_SEGMENT_TOKENS, SegmentEntry
from cache_service.options import Options


class FoldLimits(Options):
    """Budgets of a namespace."""

    segment_tokens: Annotated[int, Field(ge=1, le=MAX_SEGMENT_TOKENS)] = 2**20  # most tokens per segment
    generation_tokens: Annotated[int, Field(ge=1, le=2**40)] = 4 * 2**20  # a generation with this many is closed
    generation_s: Annotated[float, Field(ge=0.001, le=2**32)] = 24 * 3600.0  # a generation of this age is closed
    max_generations: Annotated[int, Field(ge=2, le=1000)] = 4  # including the open one; the oldest is dropped whole
    # Size of all segments in Redis; a generation that exceeds max_bytes / max_generations is closed.
    max_bytes: Annotated[int, Field(ge=1, le=2**40)] = 256 * 2**20


def num_absorbed(sizes: Sequence[int], num_new: int, most: float = inf) -> int:
    """How many of the last segments to rewrite together with `num_new` tokens or contexts.

    A segment is rewritten once at least half its size is added behind it. So each token is rewritten only a few times
    until its segment is full, and few small segments remain. The sum of sizes stays within `most`.
    """
    absorbed, total = 0, num_new
    for size in reversed(sizes):
        if size > 2 * total or size + total > most:
            break
        total += size
        absorbed += 1
    return absorbed


def after_fold(
    generations: Sequence[Generation], segments: Sequence[SegmentEntry], now_s: int, limits: FoldLimits
) -> tuple[Generation, ...]:
    """The generations after the open one has received `segments`: it may be closed, and the oldest may be dropped.

    Both also happen to keep the manifest within MAX_MANIFEST_SEGMENTS. Unless only one generation is left, all together
    take at most `max_bytes`.
    """
    opened = generations[-1]
    started_s = opened.started_s if opened.segments else now_s
    result = [*generations[:-1], Generation(opened.number, started_s, tuple(segments))]
    if (
        result[-1].num_tokens >= limits.generation_tokens
        or result[-1].num_bytes > limits.max_bytes // limits.max_generations
        or now_s - started_s >= limits.generation_s
        or len(segments) >= MAX_MANIFEST_SEGMENTS // 4
    ):
        result.append(Generation(opened.number + 1, now_s))
    while len(result) > 1 and (
        len(result) > limits.max_generations
        or sum(generation.num_bytes for generation in result) > limits.max_bytes
        or sum(len(generation.segments) for generation in result) > MAX_MANIFEST_SEGMENTS
    ):
        del result[0]
    return tuple(result)
