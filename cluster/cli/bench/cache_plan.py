"""What `paceline bench cache` measures: its options, and the kinds of requests that a cache may help or harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.errors import InvalidRequest
from cluster.cli.bench.cache_prompts import (
    EDITS,
    REPEATED,
    TEMPLATED,
    edit_prompts,
    repeated_prompts,
    story_prompts,
    templated_prompts,
)
from cluster.cli.bench.prompts import BenchPrompt, pick_rows

UNRELATED, OTHER_TOPIC, STALE, RANDOM, HOSTILE = "unrelated", "other-topic", "stale", "random", "hostile"
KINDS = (REPEATED, TEMPLATED, EDITS, UNRELATED, OTHER_TOPIC, STALE, RANDOM, HOSTILE)

# Of the cache: answers to `Scenario.before`; or, under the prompts of `Scenario.asked`, their answers with every fourth
# token another, noise, or, behind every few tokens of their answers, something else than what comes there.
Content = Literal["answers", "stale", "random", "hostile"]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What to measure."""

    prompts: tuple[BenchPrompt, ...] = ()  # for requests that have nothing to do with each other; none: left out
    model: str = "smollm2"
    draft_model: str = "none"
    drafters: tuple[tuple[str, ...], ...] = (("auto",),)  # two fresh engines for each set
    kinds: tuple[str, ...] = ()  # of requests, by name; none: all
    rows: int = 4  # requests of every kind that has prompts of its own
    rows_per_task: int | None = 2  # of `prompts`; None: all
    rows_before_per_task: int = 4  # others of `prompts`, before them
    max_new_tokens: int = 96
    max_draft_tokens: int = 16
    dtype: str = "float32"
    device: str = "auto"
    # Whether the engine that has answered before itself is asked as well, beside the first set of drafters, which must
    # be among those of `auto`.
    replica: bool = False
    row_seconds: tuple[tuple[int, float], ...] = ()  # (rows, seconds) of a forward; none: as measured at the start
    batch_size: int = 8  # of the requests that fill the cache


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of requests."""

    name: str  # and that of a namespace of its own
    content: Content
    before: tuple[BenchPrompt, ...]
    asked: tuple[BenchPrompt, ...]


def make_scenarios(plan: CachePlan) -> list[Scenario]:
    """In the order in which they are measured. Raises InvalidRequest for a kind that there is not."""
    for kind in plan.kinds:
        if kind not in KINDS:
            raise InvalidRequest("kinds", kind, f"it must be one of {', '.join(KINDS)}")
        if kind == UNRELATED and not plan.prompts:
            raise InvalidRequest("kinds", kind, "it needs a file of prompts")
    repeated, templated, edits = (make(plan.rows) for make in (repeated_prompts, templated_prompts, edit_prompts))
    scenarios = [Scenario(one.name, "answers", one.before, one.asked) for one in (repeated, templated, edits)]
    if plan.prompts:
        asked, others = pick_rows(plan.prompts, plan.rows_per_task)
        before = pick_rows(others, plan.rows_before_per_task)[0]
        scenarios.append(Scenario(UNRELATED, "answers", tuple(before), tuple(asked)))
    scenarios.append(Scenario(OTHER_TOPIC, "answers", edits.before, story_prompts(OTHER_TOPIC, plan.rows, 3)))
    scenarios.append(Scenario(STALE, "stale", (), story_prompts(STALE, plan.rows, 1)))
    scenarios.append(Scenario(RANDOM, "random", (), story_prompts(RANDOM, plan.rows, 2)))
    scenarios.append(Scenario(HOSTILE, "hostile", (), story_prompts(HOSTILE, plan.rows, 4)))
    return [scenario for scenario in scenarios if scenario.name in (plan.kinds or KINDS)]
