"""What the shared cache is worth: two fresh engines beside each other on the same prompts, greedy.

One has no cache, the other begins with what was answered, or put there, before. Both learn alike from what they answer
themselves, and neither publishes, so what lies between them is the cache as it was. Every kind of requests has a
namespace of its own, which nothing leaves. A third one, if it is wanted, is the replica that has answered those before
itself: the second begins as a fresh replica beside it does. Rounds last what a curve says that was measured before, so
that figures do not depend on what else the machine does: with it, the engines choose which drafts to verify, and
seconds are counted.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.drafters.contract import MAX_CONTEXT, VerifiedRows
from actors.drafters.registry import CACHE, SOFT_NGRAM, create_drafters
from actors.drafters.soft_ngram import SoftNgramDrafter
from actors.engine.warm_up import warm_up
from actors.models.catalog import Progress, silent
from actors.models.loader import ModelInfo
from cache_service.counts.soft_exchange import DELTA_BYTES, SoftExchangeSettings
from cache_service.formats.documents import document_id_of
from cache_service.index.warm_index import WarmIndexSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.cache.soft_sharing import SoftSharing
from cluster.cli.bench.cache_plan import CachePlan, Scenario
from cluster.cli.bench.local import compare_answers
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.speed import Answer, Equality, Speed, TimedBlock, measure_speed
from cluster.offline.engine import Generation, LocalEngine
from cluster.router.step_time import StepTimeCurve
from cluster.router.trace import RoundTrace

COLD, WARM, REPLICA = "cold", "warm", "replica"
ROUTER_S = 0.001  # of a round, beside the forward

_REFERENCE = "reference"  # the namespace of answers that are not published
_SETTLE_S = 60.0  # for what was published to be there to draft from
_QUIET_S = 1.0  # without anything new, after which there is no more
_TICK_S = 0.01
_AT_ONCE = 4  # batches of requests that fill the cache, between two looks at the clock
_STALE_EVERY = 4  # one token of so many is another
_HOSTILE_CONTEXT, _HOSTILE_TOKENS = 12, 8  # known tokens, and what is put behind them
_SURE = 0.95  # how probable a model of another kind finds what it says
_PROFILES = 3  # of which the fastest counts


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """Ratios are warm by cold; seconds are those of the curve."""

    name: str
    drafters: tuple[str, ...]
    num_before: int
    cold: Speed
    warm: Speed
    tokens_per_round_ratio: float | None
    replica: Speed | None  # that has answered before itself; None: nobody has, or it is not asked
    fresh_share: float | None  # tokens a round of the warm engine by those of that one
    equality: Equality  # of the warm answers with the cold ones
    is_settled: bool  # whether all that was published had arrived in good time
    soft_contexts: int  # that the warm engine had from others when it began, of all namespaces
    blocks: list[TimedBlock]


def measure_value(
    plan: CachePlan,
    info: ModelInfo,
    scenarios: Sequence[Scenario],
    token_ids: dict[str, list[int]],
    on_result: Callable[[ScenarioResult], None] = lambda _: None,
    progress: Progress = silent,
) -> tuple[list[tuple[int, float]], list[ScenarioResult]]:
    """((rows, seconds) that the figures go by, a result for each set of drafters and scenario).

    token_ids: of the prompts, by name. Raises ModelError, InvalidRequest, ServerError.
    """
    longest = max(map(len, token_ids.values())) + plan.max_new_tokens
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedServer(folder / "server"))
        make = _Maker(plan, info, server, folder / "index", longest)
        profile, seconds_of_rows = _row_times(plan, make)
        feeding = stack.enter_context(ExitStack())
        cache, writer = (feeding.enter_context(make.cache(has_prompts)) for has_prompts in (False, True))
        replica: LocalEngine | None = make.engine(cache, ("auto",), plan.batch_size, seconds_of_rows)
        assert replica is not None
        _Feeder(plan, info, replica, cache, writer, token_ids, progress).feed(scenarios)
        num_tokens = sum(one.publisher.counters.written_tokens for one in (cache, writer))
        if not plan.replica:
            replica = None
            feeding.close()
        results = []
        for drafters in plan.drafters:
            with make.cache() as cache:
                cold, warm = (make.engine(one, drafters, 1, seconds_of_rows) for one in (None, cache))
                is_settled = _settle(warm, cache, [one.name for one in scenarios], num_tokens)
                asking = _Asking(plan, cold, warm, replica, token_ids, seconds_of_rows, progress)
                for scenario in scenarios:
                    results.append(asking.measure(scenario, drafters, is_settled))
                    on_result(results[-1])
                del cold, warm, asking
            replica = None  # it has learnt from what it was asked: beside another set it would know more
    return profile, results


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes engines and caches that differ in what they are told here alone."""

    plan: CachePlan
    info: ModelInfo
    server: EmbeddedServer
    index_directory: Path
    longest: int  # tokens of a prompt with its answer

    @contextmanager
    def cache(self, publish_prompts: bool = False) -> Iterator[SharedCache]:
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

    def engine(
        self,
        cache: SharedCache | None,
        drafters: tuple[str, ...],
        batch_size: int,
        seconds_of_rows: Callable[[int], float] | None = None,
    ) -> LocalEngine:
        plan = self.plan
        return LocalEngine(
            plan.model,
            draft_model=plan.draft_model,
            drafters=drafters,
            batch_size=batch_size,
            dtype=plan.dtype,
            device=plan.device,
            max_draft_tokens=plan.max_draft_tokens,
            kv_cache_tokens=max(256, 2 * batch_size * (self.longest + plan.max_draft_tokens + 64)),
            cache=cache,
            seconds_of_rows=seconds_of_rows,
        )


class _Feeder:
    """Fills the cache, as far as it can by having requests answered."""

    def __init__(
        self,
        plan: CachePlan,
        info: ModelInfo,
        engine: LocalEngine,
        cache: SharedCache,
        writer: SharedCache,
        token_ids: dict[str, list[int]],
        progress: Progress,
    ) -> None:
        """cache: the engine's; writer: for what no engine would say."""
        self._plan = plan
        self._engine = engine
        self._cache = cache
        self._writer = writer
        self._token_ids = token_ids
        self._progress = progress
        self._vocab_size = info.vocab_size
        self._random = random.Random(0)
        drafters = create_drafters((SOFT_NGRAM,), delta_bytes=DELTA_BYTES)
        self._drafter = drafters[SOFT_NGRAM]
        self._sharing = writer.share_counts(drafters)

    def feed(self, scenarios: Sequence[Scenario]) -> None:
        namespaces = [scenario.name for scenario in scenarios]
        for scenario in scenarios:
            if scenario.content == "answers":
                self._answer(scenario.before, scenario.name)
                continue
            has_answers = scenario.content in ("stale", "hostile")
            answers = self._answer(scenario.asked, _REFERENCE) if has_answers else [[] for _ in scenario.asked]
            for row, answer in zip(scenario.asked, answers, strict=True):
                self._write(scenario, row, answer)
        for sharing in (self._engine.core.soft_sharing, self._sharing):
            if sharing is not None:
                _give_out(sharing, namespaces)
        for cache in (self._cache, self._writer):
            _until(lambda cache=cache: cache.publisher.queued_tokens == 0)  # type: ignore[misc]

    def _answer(self, rows: Sequence[BenchPrompt], namespace: str) -> list[list[int]]:
        answers: list[list[int]] = []
        step = _AT_ONCE * self._plan.batch_size
        for begin in range(0, len(rows), step):
            self._progress(f"before {namespace}", begin, len(rows))
            prompts = [self._token_ids[row.name] for row in rows[begin : begin + step]]
            said = self._engine.generate(
                prompts,
                max_new_tokens=self._plan.max_new_tokens,
                namespace=namespace,
                cache="off" if namespace == _REFERENCE else "read_write",
            )
            answers += [generation.token_ids for generation in said]
        self._progress(f"before {namespace}", len(rows), len(rows))
        return answers

    def _write(self, scenario: Scenario, row: BenchPrompt, answer: Sequence[int]) -> None:
        prompt = self._token_ids[row.name]
        if scenario.content == "hostile":
            text = [*prompt, *answer]
            for at in range(len(prompt), len(text)):
                known, wrong = text[max(0, at - _HOSTILE_CONTEXT) : at], self._other(text[at : at + _HOSTILE_TOKENS])
                self._publish(scenario.name, f"{row.name} {at}", [], [*known, *wrong])
                self._teach(scenario.name, known, wrong)
            return
        said = self._nearly(answer) if scenario.content == "stale" else self._noise()
        self._publish(scenario.name, row.name, prompt, said)
        self._teach(scenario.name, prompt, said)

    def _publish(self, namespace: str, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        document_id = document_id_of(name)
        if prompt:
            self._writer.prompted(namespace, document_id, np.array(prompt, np.int32))
        self._writer.committed(namespace, document_id, len(prompt), np.array(tokens, np.int32))

    def _teach(self, namespace: str, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Have the soft counts say that a model was sure of these tokens behind those before."""
        assert isinstance(self._drafter, SoftNgramDrafter)
        text = np.array([*[-1] * MAX_CONTEXT, *before, *tokens], np.int32)
        ends = np.arange(len(text) - len(tokens), len(text))
        contexts = text[ends[:, None] - np.arange(MAX_CONTEXT, 0, -1)]
        probs = np.full((len(tokens), 1), _SURE, np.float32)
        self._drafter.remember(VerifiedRows(namespace, contexts, text[ends][:, None], probs, may_share=True))

    def _noise(self) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(self._plan.max_new_tokens)]

    def _other(self, tokens: Sequence[int]) -> list[int]:
        """At every place another token."""
        return [(token + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size for token in tokens]

    def _nearly(self, answer: Sequence[int]) -> list[int]:
        wrong = self._other(answer)
        is_wrong = [position % _STALE_EVERY == _STALE_EVERY - 1 for position in range(len(answer))]
        return [wrong[at] if is_wrong[at] else token for at, token in enumerate(answer)]


class _Asking:
    """Asks the engines, in turn."""

    def __init__(
        self,
        plan: CachePlan,
        cold: LocalEngine,
        warm: LocalEngine,
        replica: LocalEngine | None,
        token_ids: dict[str, list[int]],
        seconds_of_rows: Callable[[int], float],
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._engines = {COLD: cold, WARM: warm}
        self._drafters = warm.drafter_names
        has_drafters = replica is not None and set(self._drafters) <= set(replica.drafter_names)
        self._replica = replica if has_drafters else None
        self._token_ids = token_ids
        self._seconds_of_rows = seconds_of_rows
        self._progress = progress
        self._soft_contexts = 0 if warm.core.soft_sharing is None else warm.core.soft_sharing.stats().merged_contexts

    def measure(self, scenario: Scenario, drafters: tuple[str, ...], is_settled: bool) -> ScenarioResult:
        blocks = []
        engines = dict(self._engines)
        if self._replica is not None and scenario.content == "answers":
            engines[REPLICA] = self._replica
        for done, row in enumerate(scenario.asked):
            self._progress(scenario.name, done, len(scenario.asked))
            blocks += [self._ask(name, engine, scenario.name, row) for name, engine in engines.items()]
        self._progress(scenario.name, len(scenario.asked), len(scenario.asked))
        cold, warm = measure_speed(blocks, COLD), measure_speed(blocks, WARM, COLD)
        replica = measure_speed(blocks, REPLICA, COLD) if REPLICA in engines else None
        return ScenarioResult(
            name=scenario.name,
            drafters=drafters,
            num_before=len(scenario.before),
            cold=cold,
            warm=warm,
            tokens_per_round_ratio=_share(warm, cold),
            replica=replica,
            fresh_share=_share(warm, replica),
            equality=compare_answers(blocks, WARM, COLD, self._token_ids, None),
            is_settled=is_settled,
            soft_contexts=self._soft_contexts,
            blocks=blocks,
        )

    def _ask(self, name: str, engine: LocalEngine, namespace: str, row: BenchPrompt) -> TimedBlock:
        seconds = 0.0

        def count(trace: RoundTrace) -> None:
            nonlocal seconds
            seconds += self._seconds_of_rows(max(1, trace.rows)) + ROUTER_S

        generation = engine.generate(
            [self._token_ids[row.name]],
            max_new_tokens=self._plan.max_new_tokens,
            namespace=namespace,
            drafters=self._drafters if name == REPLICA else None,
            cache="read",
            on_round=count,
        )[0]
        return TimedBlock(name, row.task, (row.name,), seconds, (_answer_of(generation),))


def _share(one: Speed, other: Speed | None) -> float | None:
    """Of tokens a round."""
    return one.tokens_per_round / other.tokens_per_round if other is not None and other.tokens_per_round else None


def _answer_of(one: Generation) -> Answer:
    return Answer(
        token_ids=tuple(one.token_ids),
        rounds=one.rounds,
        draft_tokens=one.draft_tokens,
        accepted_tokens=dict(one.accepted_tokens),
        text=one.text,
        round_tokens=tuple(one.round_tokens),
        target_rows=one.target_rows,
    )


def _row_times(plan: CachePlan, make: _Maker) -> tuple[list[tuple[int, float]], Callable[[int], float]]:
    """(rows, seconds) of forwards as they were given, or as they are measured here, and the curve through them."""
    engine = make.engine(None, ("auto",), plan.batch_size)
    profile = list(plan.row_seconds) or _profile(engine)
    return profile, StepTimeCurve(profile, engine.target.row_steps).seconds


def _profile(engine: LocalEngine) -> list[tuple[int, float]]:
    """(rows, seconds) of forwards, each the fastest of a few."""
    profiles = [warm_up(engine.target) for _ in range(_PROFILES)]
    return [(points[0][0], min(seconds for _, seconds in points)) for points in zip(*profiles, strict=True)]


def _settle(engine: LocalEngine, cache: SharedCache, namespaces: Sequence[str], num_tokens: int) -> bool:
    """Have the engine know what is in the cache; False if that took too long. num_tokens: that have been published."""
    cache.follow(namespaces)
    sharing = engine.core.soft_sharing
    has_counts = sharing is None or _take_in(sharing, namespaces)
    return has_counts and (
        CACHE not in engine.drafter_names or _until(lambda: cache.stats().index.tokens >= num_tokens)
    )


def _take_in(sharing: SoftSharing, namespaces: Sequence[str]) -> bool:
    """Exchange until nothing has come for a while."""
    for namespace in namespaces:
        sharing.follow(namespace)
    merged, since = -1, time.monotonic()

    def is_quiet() -> bool:
        nonlocal merged, since
        sharing.tick(time.monotonic())
        stats = sharing.stats()
        if stats.merged_contexts != merged or stats.waiting_contexts or stats.warm_ratio < 1.0:
            merged, since = stats.merged_contexts, time.monotonic()
        return time.monotonic() - since > _QUIET_S

    return _until(is_quiet)


def _give_out(sharing: SoftSharing, namespaces: Sequence[str]) -> None:
    """Exchange until all that may be shared is in the cache."""
    for namespace in namespaces:
        sharing.follow(namespace)
    written, since = -1, time.monotonic()

    def is_done() -> bool:
        nonlocal written, since
        sharing.tick(time.monotonic())
        tables = [sharing.tables.table_of(namespace) for namespace in namespaces]
        if sharing.stats().written_bytes != written or any(table is not None and table.num_untaken for table in tables):
            written, since = sharing.stats().written_bytes, time.monotonic()
        return time.monotonic() - since > _QUIET_S

    _until(is_done)


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True
