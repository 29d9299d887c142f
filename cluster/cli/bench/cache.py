"""`paceline bench cache`: what the shared cache is worth: two fresh engines on the same requests, greedy.

The cold one has no cache, the warm one begins with what was answered, or put there, before. Both learn from what they
answer themselves and neither publishes, so that the cache is the only difference. Every kind of requests has its own
namespace. Rounds are planned and timed by a curve measured before, so that figures do not depend on the machine's load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actors.drafters.registry import CACHE, NONE
from actors.engine.warm_up import warm_up
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from cache_service.counts.soft_exchange import SoftExchangeSettings
from cache_service.index.warm_index import WarmIndexSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.cli.bench.cache_filling import fill_cache, take_in
from cluster.cli.bench.cache_prompts import make_scenarios
from cluster.cli.bench.measure import encode_prompts, run_blocks, summarise
from cluster.cli.bench.methods import EngineMethod, make_engine
from cluster.cli.bench.prompts import BenchPrompt, pick_rows
from cluster.cli.bench.speed import MethodResult, TimedBlock
from cluster.config import paceline_home
from cluster.router.step_time import StepTimeCurve

_FILLING_BATCH = 8
_PROFILES = 3  # measurements of the row times, of which the fastest counts


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What to measure."""

    engine: Mapping[str, Any]  # options of `LocalEngine` that all engines share
    prompts: tuple[BenchPrompt, ...] = ()  # for unrelated requests; none: left out
    drafters: tuple[tuple[str, ...], ...] = (("auto",),)  # two fresh engines for each set
    kinds: tuple[str, ...] = ()  # of requests, by name; none: all
    rows: int = 4  # requests of every kind with prompts of its own
    rows_per_task: int | None = 2  # of `prompts`; None: all
    rows_before_per_task: int = 4  # others of `prompts`, answered before
    max_new_tokens: int = 96
    replica: bool = False  # ask the engine that has answered before itself, too, if the first drafters are in `auto`
    row_seconds: tuple[tuple[int, float], ...] = ()  # (rows, seconds) of a forward; none: as measured at the start


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One kind of requests with one set of drafters. Seconds are those of the curve."""

    name: str
    drafters: tuple[str, ...]
    num_before: int
    is_settled: bool  # whether all that was published had arrived in time
    methods: list[MethodResult]  # cold, warm and, where it was asked, the replica
    blocks: list[TimedBlock]


@dataclass(frozen=True, slots=True)
class CacheReport:
    row_seconds: list[tuple[int, float]]  # (rows, seconds) of forwards by which rounds were chosen and timed
    scenarios: list[ScenarioResult] = field(default_factory=list)


def run_cache(plan: CachePlan, progress: Progress = silent) -> CacheReport:
    """Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used,
    ServerError where no server can be run."""
    source = resolve_model(plan.engine["model"], paceline_home(), progress)
    info = read_model_info(source)
    asked, others = pick_rows(plan.prompts, plan.rows_per_task)
    scenarios = make_scenarios(plan.kinds, plan.rows, asked, pick_rows(others, plan.rows_before_per_task)[0])
    rows = [row for scenario in scenarios for row in (*scenario.before, *scenario.asked)]
    token_ids = encode_prompts(rows, info, load_tokenizer(source), plan.max_new_tokens)
    longest = max(map(len, token_ids.values())) + plan.max_new_tokens
    profile, seconds_of_rows = _row_times(plan, longest)
    report = CacheReport(profile)
    make = partial(make_engine, plan.engine, longest=longest, seconds_of_rows=seconds_of_rows)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        open_cache = partial(
            _open_cache, info, stack.enter_context(EmbeddedServer(folder / "server")), folder / "index"
        )
        cache = stack.enter_context(open_cache())
        replica = make(("auto",), batch_size=_FILLING_BATCH, cache=cache)
        fill_cache(
            replica, cache, scenarios, token_ids=token_ids, max_new_tokens=plan.max_new_tokens, progress=progress
        )
        for index, drafters in enumerate(plan.drafters):
            with open_cache() as own:
                cold, warm = make(drafters), make(drafters, cache=own)
                names = warm.drafter_names
                num_tokens = cache.publisher.counters.written_tokens if CACHE in names else 0
                is_settled = take_in(warm, own, [one.name for one in scenarios], num_tokens)
                # The replica learns from what it is asked, so it is compared with the first set only.
                has_replica = plan.replica and index == 0 and set(names) <= set(replica.drafter_names)
                for scenario in scenarios:
                    options = {"namespace": scenario.name, "cache": "read"}
                    methods = [EngineMethod("cold", cold, options), EngineMethod("warm", warm, options)]
                    if has_replica and scenario.before:
                        methods.append(EngineMethod("replica", replica, {**options, "drafters": names}))
                    show = partial(progress, scenario.name)
                    blocks = run_blocks(methods, scenario.asked, token_ids, plan.max_new_tokens, progress=show)
                    report.scenarios.append(
                        ScenarioResult(
                            name=scenario.name,
                            drafters=drafters,
                            num_before=len(scenario.before),
                            is_settled=is_settled,
                            methods=summarise(methods, blocks),
                            blocks=blocks,
                        )
                    )
    return report


@contextmanager
def _open_cache(info: ModelInfo, server: EmbeddedServer, index_directory: Path) -> Iterator[SharedCache]:
    settings = SharedCacheSettings(
        index=WarmIndexSettings(directory=index_directory, vocab_size=info.vocab_size),
        soft=SoftExchangeSettings(poll_s=0.05, idle_poll_s=0.1),
    )
    cache = SharedCache(server.settings, info.fingerprint, settings=settings)
    try:
        yield cache
    finally:
        cache.close()


def _row_times(plan: CachePlan, longest: int) -> tuple[list[tuple[int, float]], Callable[[int], float]]:
    """(rows, seconds) of forwards as given or measured, and the curve through them."""
    target = make_engine(plan.engine, (NONE,), longest, batch_size=_FILLING_BATCH).target
    profile: Sequence[tuple[int, float]] = plan.row_seconds
    if not profile:
        profiles = [warm_up(target) for _ in range(_PROFILES)]
        profile = [(points[0][0], min(seconds for _, seconds in points)) for points in zip(*profiles, strict=True)]
    return list(profile), StepTimeCurve(profile, target.row_steps).seconds
