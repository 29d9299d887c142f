"""What a fold makes of the segments there are: pure decisions over manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cache_service.formats.manifest import MAX_MANIFEST_SEGMENTS, Generation
from cache_service.formats.segment import MAX_SEGMENT_TOKENS, SegmentEntry
from cache_service.setting_bounds import require_bounds


@dataclass(frozen=True, slots=True)
class FoldLimits:
    """Budgets of a namespace. Raises SettingError."""

    segment_tokens: int = 2**20  # in a segment, at most
    generation_tokens: int = 4 * 2**20  # a generation with so many is closed
    generation_s: float = 24 * 3600.0  # one that is so old as well
    max_generations: int = 4  # the open one included; the oldest is dropped whole
    max_bytes: int = 256 * 2**20  # of all segments together, as they lie in Redis; a generation's part of it closes it

    def __post_init__(self) -> None:
        require_bounds(
            self,
            segment_tokens=(1, MAX_SEGMENT_TOKENS),
            generation_tokens=(1, 2**40),
            generation_s=(0.001, 2**32),
            max_generations=(2, 1000),
            max_bytes=(1, 2**40),
        )


def num_absorbed(sizes: Sequence[int], num_new: int, most: float = inf) -> int:
    """How many of the last segments, of these sizes, to write anew together with `num_new` tokens or contexts.

    A segment is absorbed by half as many as its own, so that each token is rewritten only a few times on its way into a
    full segment, and few small segments stay. All together are not more than `most`.
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
    """The generations when the open one holds `segments`: it may close, and the oldest may go.

    Both happen too where the manifest would have no room for more segments. What is left takes `max_bytes` at most.
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
