"""`paceline bench cache`: what the shared cache is worth: two fresh engines on the same requests, greedy.

The cold one has no cache, the warm one begins with what was answered, or put there, before. Both learn from what they
answer themselves and neither publishes, so that the cache is the only difference. Every kind of requests has its own
namespace. Rounds are planned and timed by a curve measured before, so that figures do not depend on the machine's load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.drafters.registry import CACHE
from actors.engine.warm_up import warm_up
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from cache_service.counts.soft_exchange import SoftExchangeSettings
from cache_service.index.warm_index import WarmIndexSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.cli.bench.cache_filling import CacheFiller, take_in
from cluster.cli.bench.cache_prompts import Scenario, make_scenarios
from cluster.cli.bench.local import check_room, compare_answers, encode_prompt
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.cli.bench.methods import EngineSettings, answer_of
from cluster.cli.bench.prompts import BenchPrompt, pick_rows
from cluster.cli.bench.speed import Equality, Speed, TimedBlock, measure_speed
from cluster.config import paceline_home
from cluster.offline.engine import LocalEngine
from cluster.router.step_time import StepTimeCurve
from cluster.router.trace import RoundTrace

COLD, WARM, REPLICA = "cold", "warm", "replica"
ROUTER_S = 0.001  # of a round, beside the forward

_FILLING_BATCH = 8
_PROFILES = 3  # measurements of the row times, of which the fastest counts


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What to measure."""

    prompts: tuple[BenchPrompt, ...] = ()  # for unrelated requests; none: left out
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(draft_model="none"))
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
    """Ratios are warm by cold; seconds are those of the curve."""

    name: str
    drafters: tuple[str, ...]
    num_before: int
    cold: Speed
    warm: Speed
    tokens_per_round_ratio: float | None
    replica: Speed | None  # of the engine that has answered before itself
    fresh_share: float | None  # tokens per round of the warm engine by those of the replica
    equality: Equality  # of the warm answers with the cold ones
    is_settled: bool  # whether all that was published had arrived in time
    soft_contexts: int  # that the warm engine had from others at its start, of all namespaces
    blocks: list[TimedBlock]


@dataclass(frozen=True, slots=True)
class CacheReport:
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    config: dict[str, Any]
    scenarios: list[ScenarioResult]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_cache(
    plan: CachePlan, progress: Progress = silent, on_result: Callable[[ScenarioResult], None] = lambda _: None
) -> CacheReport:
    """Measure all of it; on_result is called with each kind of requests as soon as it has been measured.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used,
    ServerError where no server can be run.
    """
    source = resolve_model(plan.engine.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    asked, others = pick_rows(plan.prompts, plan.rows_per_task)
    scenarios = make_scenarios(plan.kinds, plan.rows, asked, pick_rows(others, plan.rows_before_per_task)[0])
    rows = [row for scenario in scenarios for row in (*scenario.before, *scenario.asked)]
    token_ids = {row.name: encode_prompt(row, tokenizer) for row in rows}
    longest = check_room(token_ids, info, plan.max_new_tokens) + plan.max_new_tokens
    machine, results = describe_machine(), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        caches = _Caches(info, stack.enter_context(EmbeddedServer(folder / "server")), folder / "index")
        filling = replace(plan.engine, batch_size=_FILLING_BATCH)
        profile, seconds_of_rows = _row_times(plan, filling.engine(("auto",), longest))
        feeding = stack.enter_context(ExitStack())
        cache, writer = (feeding.enter_context(caches.open(has_prompts)) for has_prompts in (False, True))
        replica = filling.engine(("auto",), longest, cache=cache, seconds_of_rows=seconds_of_rows)
        CacheFiller(replica, cache, writer, plan.max_new_tokens, progress).fill(scenarios, token_ids)
        num_tokens = sum(one.publisher.counters.written_tokens for one in (cache, writer))
        replicas = [replica] if plan.replica else []
        del replica
        if not replicas:
            feeding.close()
        for drafters in plan.drafters:
            with caches.open() as cache:
                engines = {
                    name: plan.engine.engine(drafters, longest, cache=own, seconds_of_rows=seconds_of_rows)
                    for name, own in ((COLD, None), (WARM, cache))
                }
                has_index = CACHE in engines[WARM].drafter_names
                is_settled = take_in(
                    engines[WARM], cache, [one.name for one in scenarios], num_tokens if has_index else 0
                )
                # The replica learns from what it is asked, so it is compared with the first set only.
                if replicas and set(engines[WARM].drafter_names) <= set(replicas[0].drafter_names):
                    engines[REPLICA] = replicas[0]
                replicas.clear()
                asking = _Asking(engines, token_ids, plan.max_new_tokens, seconds_of_rows)
                for scenario in scenarios:
                    results.append(asking.measure(scenario, drafters, is_settled, progress))
                    on_result(results[-1])
                del engines, asking
    config = {key: value for key, value in asdict(plan).items() if key not in ("prompts", "engine")}
    config |= {**asdict(plan.engine), "weights": info.weights_fingerprint, "row_seconds": profile}
    return CacheReport(machine, describe_versions(), config, results)


@dataclass(frozen=True, slots=True)
class _Caches:
    """Clients of one server."""

    info: ModelInfo
    server: EmbeddedServer
    index_directory: Path

    @contextmanager
    def open(self, publish_prompts: bool = False) -> Iterator[SharedCache]:
        settings = SharedCacheSettings(
            index=WarmIndexSettings(directory=self.index_directory, vocab_size=self.info.vocab_size),
            soft=SoftExchangeSettings(poll_s=0.05, idle_poll_s=0.1),
            publish_prompts=publish_prompts,
        )
        cache = SharedCache(self.server.settings, self.info.fingerprint, settings=settings)
        try:
            yield cache
        finally:
            cache.close()


class _Asking:
    """Asks the engines in turn."""

    def __init__(
        self,
        engines: dict[str, LocalEngine],
        token_ids: dict[str, list[int]],
        max_new_tokens: int,
        seconds_of_rows: Callable[[int], float],
    ) -> None:
        self._engines = engines
        self._token_ids = token_ids
        self._max_new_tokens = max_new_tokens
        self._seconds_of_rows = seconds_of_rows
        sharing = engines[WARM].core.soft_sharing
        self._soft_contexts = 0 if sharing is None else sharing.stats().merged_contexts

    def measure(
        self, scenario: Scenario, drafters: tuple[str, ...], is_settled: bool, progress: Progress
    ) -> ScenarioResult:
        names = [name for name in self._engines if name != REPLICA or scenario.content == "answers"]
        blocks = []
        for done, row in enumerate(scenario.asked):
            progress(scenario.name, done, len(scenario.asked))
            blocks += [self._ask(name, scenario.name, row) for name in names]
        progress(scenario.name, len(scenario.asked), len(scenario.asked))
        cold, warm = measure_speed(blocks, COLD), measure_speed(blocks, WARM, COLD)
        replica = measure_speed(blocks, REPLICA, COLD) if REPLICA in names else None
        return ScenarioResult(
            name=scenario.name,
            drafters=drafters,
            num_before=len(scenario.before),
            cold=cold,
            warm=warm,
            tokens_per_round_ratio=_tokens_per_round_ratio(warm, cold),
            replica=replica,
            fresh_share=_tokens_per_round_ratio(warm, replica),
            equality=compare_answers(blocks, WARM, COLD),
            is_settled=is_settled,
            soft_contexts=self._soft_contexts,
            blocks=blocks,
        )

    def _ask(self, name: str, namespace: str, row: BenchPrompt) -> TimedBlock:
        seconds = 0.0

        def count(trace: RoundTrace) -> None:
            nonlocal seconds
            seconds += self._seconds_of_rows(max(1, trace.rows)) + ROUTER_S

        (generation,) = self._engines[name].generate(
            [self._token_ids[row.name]],
            max_new_tokens=self._max_new_tokens,
            namespace=namespace,
            drafters=self._engines[WARM].drafter_names if name == REPLICA else None,
            cache="read",
            on_round=count,
        )
        answer = replace(answer_of(generation), seconds=None)
        return TimedBlock(name, row.task, (row.name,), seconds, (answer,))


def _tokens_per_round_ratio(one: Speed, other: Speed | None) -> float | None:
    return one.tokens_per_round / other.tokens_per_round if other is not None and other.tokens_per_round else None


def _row_times(plan: CachePlan, engine: LocalEngine) -> tuple[list[tuple[int, float]], Callable[[int], float]]:
    """(rows, seconds) of forwards as given or measured, and the curve through them."""
    profile: Sequence[tuple[int, float]] = plan.row_seconds
    if not profile:
        profiles = [warm_up(engine.target) for _ in range(_PROFILES)]
        profile = [(points[0][0], min(seconds for _, seconds in points)) for points in zip(*profiles, strict=True)]
    return list(profile), StepTimeCurve(profile, engine.target.row_steps).seconds
