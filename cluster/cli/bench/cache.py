"""`paceline bench cache`: what the shared cache is worth and what it costs, on this machine.

Every cache is on a server of its own, as `paceline serve` starts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.drafters.registry import create_drafter
from actors.models.catalog import Progress, resolve_model, silent
from actors.models.loader import load_tokenizer, read_model_info
from cache_service.formats.documents import Int32Array
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cli.bench.cache_index import (
    Freshness,
    IndexBench,
    WarmStart,
    drafting_seconds,
    load_kernels,
)
from cluster.cli.bench.cache_plan import CachePlan, make_scenarios
from cluster.cli.bench.cache_rounds import round_seconds
from cluster.cli.bench.cache_value import ScenarioResult, measure_value
from cluster.cli.bench.local import check_room, encode_prompt
from cluster.cli.bench.machine import describe_machine, describe_versions
from cluster.config import paceline_home

ROUND_STATES = ("none", "live", "stopped")

_DRAFTING_SEQUENCES = 8
_DRAFTING_NODES = 16
_DOCUMENT_TOKENS = 1200
_PHRASE_TOKENS = 6
_LEAST_PHRASES = 50  # of a document: enough to draft for
_FRESH_TOKENS_PER_S = 50_000
_FRESH_S = 3.0


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The router's own part of a round, with a toy target."""

    state: str  # of the cache's server; "none": there is no cache
    rounds: int
    median_us: float
    p99_us: float
    greatest_us: float


@dataclass(frozen=True, slots=True)
class IndexCost:
    """The local index, over made-up text."""

    builds: WarmStart  # the first process of a node
    maps: WarmStart  # the next one
    drafting_sequences: int
    drafting_median_us: float  # of a round, for all of them
    drafting_p99_us: float
    freshness: Freshness


@dataclass(frozen=True, slots=True)
class CacheReport:
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    config: dict[str, Any]
    scenarios: list[ScenarioResult]
    index_cost: IndexCost | None
    round_costs: list[RoundCost]
    stopped_p99_ratio: float | None  # of a round with the server stopped by one with the server running

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_cache(
    plan: CachePlan, progress: Progress = silent, on_result: Callable[[ScenarioResult], None] = lambda _: None
) -> CacheReport:
    """Measure all of it; on_result hears of each kind of requests as soon as it has been measured.

    Raises InvalidRequest for prompts that the model has no room for, ModelError for models that cannot be used,
    ServerError where no server can be run.
    """
    source = resolve_model(plan.model, paceline_home(), progress)
    info, tokenizer = read_model_info(source), load_tokenizer(source)
    scenarios = make_scenarios(plan)
    rows = [row for scenario in scenarios for row in (*scenario.before, *scenario.asked)]
    token_ids = {row.name: encode_prompt(row, tokenizer) for row in rows}
    check_room(token_ids, info, plan.max_new_tokens)
    machine = describe_machine()
    row_seconds, results = measure_value(plan, info, scenarios, token_ids, on_result, progress)
    index_cost = measure_index(plan.index_tokens, info.vocab_size, progress) if plan.index_tokens else None
    costs = measure_rounds(plan.rounds, plan.batch_size, progress) if plan.rounds else []
    p99 = {cost.state: cost.p99_us for cost in costs}
    config = {key: value for key, value in asdict(plan).items() if key not in ("prompts", "answers")}
    config |= {"weights": info.weights_fingerprint, "row_seconds": row_seconds}
    return CacheReport(
        machine,
        describe_versions(),
        config,
        results,
        index_cost,
        costs,
        p99["stopped"] / p99["live"] if costs else None,
    )


def measure_rounds(rounds: int, batch_size: int, progress: Progress = silent) -> list[RoundCost]:
    """A `RoundCost` for each of `ROUND_STATES`. Raises ServerError."""
    costs = []
    for done, state in enumerate(ROUND_STATES):
        progress("rounds", done, len(ROUND_STATES))
        seconds = round_seconds(state, batch_size, rounds)
        median, high = np.percentile(seconds, [50, 99]) * 1e6
        costs.append(RoundCost(state, rounds, float(median), float(high), max(seconds) * 1e6))
    progress("rounds", len(ROUND_STATES), len(ROUND_STATES))
    return costs


def measure_index(num_tokens: int, vocab_size: int, progress: Progress = silent) -> IndexCost:
    """With compiled kernels, over phrases that come again and again. Raises ServerError."""
    load_kernels()
    texts = _made_up_texts(num_tokens, vocab_size)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = IndexBench(stack.enter_context(EmbeddedServer(folder / "server")), folder / "index", vocab_size)
        stack.callback(bench.close)
        progress("index", 0, 3)
        bench.append("mine", texts, fold=True)
        builds, index = bench.start_warm("mine", sum(map(len, texts)))
        index.close()
        maps, index = bench.start_warm("mine", sum(map(len, texts)))
        progress("index", 1, 3)
        try:
            drafter = create_drafter("cache", index=index)
            asked = texts[:_DRAFTING_SEQUENCES]
            for _ in range(2):  # the first time compiles
                seconds = drafting_seconds(drafter, asked, _DRAFTING_NODES, namespace="mine")
        finally:
            index.close()
        progress("index", 2, 3)
        freshness = bench.freshness(np.concatenate(texts), _FRESH_TOKENS_PER_S, _FRESH_S, vocab_size)
        progress("index", 3, 3)
    median, high = np.percentile(seconds, [50, 99]) * 1e6
    return IndexCost(builds, maps, len(asked), float(median), float(high), freshness)


def _made_up_texts(num_tokens: int, vocab_size: int) -> list[Int32Array]:
    """Documents of phrases, of which some come much more often than others, as words do."""
    random_ = np.random.default_rng(0)
    # The highest tokens are left to the markers of `IndexBench.freshness`.
    phrases = random_.integers(0, max(1, vocab_size - 10), (4096, _PHRASE_TOKENS), dtype=np.int32)
    num_documents = max(_DRAFTING_SEQUENCES, num_tokens // _DOCUMENT_TOKENS)
    size = max(_LEAST_PHRASES, -(-num_tokens // num_documents // _PHRASE_TOKENS))
    return [phrases[np.minimum(random_.zipf(1.3, size), len(phrases)) - 1].reshape(-1) for _ in range(num_documents)]
