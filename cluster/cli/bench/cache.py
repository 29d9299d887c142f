"""`paceline bench cache`: what the shared cache is worth: two fresh engines on the same requests, greedy.

The cold engine has no cache; the warm one begins with earlier answers or imported texts. Both learn from their own
answers and neither publishes, so the cache is the only difference. Every kind of requests has its own namespace. Rounds
are planned and timed by a curve measured before, so that figures do not depend on the machine's load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from actors.drafters.registry import CACHE, NONE
from actors.engine.warm_up import warm_up
from actors.home import paceline_home
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from cache_service.counts.soft_exchange import SoftExchangeSettings
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.cli.bench.cache_filling import fill_cache, take_in
from cluster.cli.bench.cache_prompts import make_scenarios
from cluster.cli.bench.measure import Comparison, compare_methods, encode_prompts
from cluster.cli.bench.methods import EngineMethod, make_engine
from cluster.cli.bench.options import CacheOptions
from cluster.cli.bench.prompts import BenchPrompt, pick_rows
from cluster.cli.engine import split_names
from cluster.cli.row_times import parse_row_times
from cluster.router.step_time import StepTimeCurve

_FILLING_BATCH = 8
_PROFILES = 3  # measurements of the row times, of which the fastest counts


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One kind of requests with one set of drafters. Seconds are those of the curve."""

    name: str
    drafters: tuple[str, ...]
    num_before: int
    is_settled: bool  # whether all that was published had arrived in time
    comparison: Comparison  # cold, warm and, where it was asked, the replica


@dataclass(frozen=True, slots=True)
class CacheReport:
    # (rows, seconds) of forwards by which rounds were chosen and timed
    row_seconds: list[tuple[int, float]] = field(default_factory=list)
    scenarios: list[ScenarioResult] = field(default_factory=list)


def run_cache(
    prompts: Sequence[BenchPrompt], options: CacheOptions, report: CacheReport, progress: Progress = silent
) -> None:
    """Fills the report as scenarios are done. prompts: for unrelated requests, which are left out if there are none.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used,
    ServerError where no server can be run.
    """
    source = resolve_model(options.model, paceline_home(), progress)
    info = read_model_info(source)
    asked, others = pick_rows(prompts, options.rows_per_task)
    before, _ = pick_rows(others, options.rows_before)
    scenarios = make_scenarios(split_names(options.kinds), options.rows, asked, before)
    rows = [row for scenario in scenarios for row in (*scenario.before, *scenario.asked)]
    token_ids = encode_prompts(rows, info, load_tokenizer(source), options.max_new_tokens)
    longest = max(map(len, token_ids.values())) + options.max_new_tokens
    profile, seconds_of_rows = _row_times(options, longest)
    report.row_seconds.extend(profile)
    make = partial(make_engine, options, longest=longest, seconds_of_rows=seconds_of_rows)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedServer(folder / "server"))
        open_cache = partial(_open_cache, info, server, folder / "index")
        cache = stack.enter_context(open_cache())
        replica = make(("auto",), batch_size=_FILLING_BATCH, cache=cache)  # kept: it still publishes its counts
        fill_cache(
            replica, cache, scenarios, token_ids=token_ids, max_new_tokens=options.max_new_tokens, progress=progress
        )
        for index, drafters in enumerate(options.drafter_sets()):
            with open_cache() as own:
                cold, warm = make(drafters), make(drafters, cache=own)
                names = warm.drafter_names
                num_tokens = cache.publisher.counters.written_tokens if CACHE in names else 0
                is_settled = take_in(warm, own, [one.name for one in scenarios], num_tokens)
                # The replica learns from what it is asked, so it is compared with the first set only.
                has_replica = options.replica and index == 0 and set(names) <= set(replica.drafter_names)
                for scenario in scenarios:
                    reads = {"namespace": scenario.name, "cache": "read"}
                    methods = [EngineMethod("cold", cold, reads), EngineMethod("warm", warm, reads)]
                    if has_replica and scenario.before:
                        methods.append(EngineMethod("replica", replica, {**reads, "drafters": names}))
                    show = partial(progress, scenario.name)
                    found = compare_methods(
                        methods, scenario.asked, token_ids, max_new_tokens=options.max_new_tokens, progress=show
                    )
                    result = ScenarioResult(scenario.name, drafters, len(scenario.before), is_settled, comparison=found)
                    report.scenarios.append(result)
            methods = []
            del cold, warm  # before the next two are made


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


def _row_times(options: CacheOptions, longest: int) -> tuple[list[tuple[int, float]], Callable[[int], float]]:
    """(rows, seconds) of forwards as given or measured, and the curve through them."""
    target = make_engine(options, (NONE,), longest, batch_size=_FILLING_BATCH).target
    profile = list(parse_row_times(options.row_times))
    if not profile:
        profiles = [warm_up(target) for _ in range(_PROFILES)]
        profile = [(points[0][0], min(seconds for _, seconds in points)) for points in zip(*profiles, strict=True)]
    return profile, StepTimeCurve(profile, target.row_steps).seconds
