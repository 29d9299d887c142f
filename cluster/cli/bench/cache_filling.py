"""Fills the shared cache for `paceline bench cache`: with an engine's answers, or with what no engine would answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.drafters.contract import MAX_CONTEXT, VerifiedRows
from actors.drafters.soft_ngram import SoftNgramDrafter
from actors.models.catalog import Progress
from cache_service.formats.documents import document_id_of
from cluster.cache.shared_cache import SharedCache
from cluster.cache.soft_sharing import SoftSharing
from cluster.cli.bench.cache_prompts import RANDOM, STALE, Scenario
from cluster.cli.bench.prompts import BenchPrompt
from cluster.offline.engine import LocalEngine
from cluster.offline.results import Generation

_SETTLE_S = 60.0  # until what was published can be drafted
_QUIET_S = 1.0  # without news, after which nothing more is expected
_TICK_S = 0.01
_STALE_EVERY = 4  # every so many tokens one is changed
_SURE = 0.95  # probability that the soft counts give to what they are taught


def fill_cache(
    engine: LocalEngine,
    cache: SharedCache,
    scenarios: Sequence[Scenario],
    *,
    token_ids: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    progress: Progress,
) -> None:
    """Publish what every scenario finds in the cache. cache: the engine's. token_ids: of the prompts, by name."""
    rng, sharing = np.random.default_rng(0), engine.core.soft_sharing

    def answers(rows: Sequence[BenchPrompt], namespace: str, **options: Any) -> list[Generation]:
        return engine.generate(
            [token_ids[row.name] for row in rows],
            max_new_tokens=max_new_tokens,
            namespace=namespace,
            on_progress=lambda done, _: progress(f"before {namespace}", done, len(rows)),
            **options,
        )

    for scenario in scenarios:
        if scenario.name == STALE:
            found = answers(scenario.asked, "reference", cache="off")
            wrong = [stale_answer(answer.token_ids, engine.info.vocab_size, rng) for answer in found]
        elif scenario.name == RANDOM:
            wrong = list(rng.integers(0, engine.info.vocab_size, (len(scenario.asked), max_new_tokens), np.int32))
        else:
            answers(scenario.before, scenario.name, cache="read_write")
            continue
        for row, tokens in zip(scenario.asked, wrong, strict=True):
            text = np.array([*token_ids[row.name], *tokens], np.int32)
            cache.committed(scenario.name, document_id_of(row.name), 0, text)
            if sharing is not None:
                _teach(sharing, scenario.name, text, len(tokens))
    if sharing is not None:
        _exchange_counts(sharing, [scenario.name for scenario in scenarios])
    _until(lambda: cache.publisher.queued_tokens == 0)


def take_in(engine: LocalEngine, cache: SharedCache, namespaces: Sequence[str], num_tokens: int) -> bool:
    """Wait until the engine can draft from the cache; False if that took too long. num_tokens: published tokens."""
    cache.follow(namespaces)
    sharing = engine.core.soft_sharing
    if sharing is not None and not _exchange_counts(sharing, namespaces):
        return False
    return _until(lambda: cache.stats().index.tokens >= num_tokens)


def stale_answer(answer: Sequence[int], vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """The answer with another token in every fourth place, int32."""
    tokens = np.array(answer, np.int32)
    places = tokens[_STALE_EVERY - 1 :: _STALE_EVERY]  # a view
    places[:] = (places + rng.integers(1, vocab_size, len(places))) % vocab_size
    return tokens


def _teach(sharing: SoftSharing, namespace: str, text: np.ndarray, num_tokens: int) -> None:
    """Make the soft counts say that a model was sure of the last `num_tokens` of a text."""
    assert isinstance(sharing.tables, SoftNgramDrafter)
    padded = np.concatenate([np.full(MAX_CONTEXT, -1, np.int32), text])
    ends = np.arange(len(padded) - num_tokens, len(padded))
    contexts = padded[ends[:, None] - np.arange(MAX_CONTEXT, 0, -1)]
    probs = np.full((num_tokens, 1), _SURE, np.float32)
    sharing.tables.remember(VerifiedRows(namespace, contexts, padded[ends][:, None], probs, may_share=True))


def _exchange_counts(sharing: SoftSharing, namespaces: Sequence[str]) -> bool:
    """Exchange counts until none has come or gone for a while; False if that took too long."""
    for namespace in namespaces:
        sharing.follow(namespace)
    last, since = (0, 0), time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        sharing.tick(time.monotonic())
        stats, tables = sharing.stats(), [sharing.tables.table_of(namespace) for namespace in namespaces]
        is_waiting = stats.waiting_contexts > 0 or any(table is not None and table.num_untaken for table in tables)
        now = (stats.merged_contexts, stats.written_bytes)
        if is_waiting or stats.warm_ratio < 1.0 or now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > _QUIET_S

    return _until(is_quiet)


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SETTLE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True
