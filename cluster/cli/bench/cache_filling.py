"""Fills the shared cache for `paceline bench cache`, by having requests answered where an engine would say it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from actors.drafters.contract import MAX_CONTEXT, VerifiedRows
from actors.drafters.registry import SOFT_NGRAM, create_drafters
from actors.drafters.soft_ngram import SoftNgramDrafter
from actors.models.catalog import Progress
from cache_service.counts.soft_exchange import DELTA_BYTES
from cache_service.formats.documents import document_id_of
from cluster.cache.shared_cache import SharedCache
from cluster.cache.soft_sharing import SoftSharing
from cluster.cli.bench.cache_prompts import Scenario
from cluster.cli.bench.prompts import BenchPrompt
from cluster.offline.engine import LocalEngine

_REFERENCE = "reference"  # namespace of answers that are not published
_SETTLE_S = 60.0  # until what was published can be drafted
_QUIET_S = 1.0  # without news, after which nothing more is expected
_TICK_S = 0.01
_AT_ONCE = 32  # requests between two reports of progress
_STALE_EVERY = 4  # every so many tokens one is changed
_HOSTILE_CONTEXT, _HOSTILE_TOKENS = 12, 8  # known tokens, and the other tokens behind them
_SURE = 0.95  # probability that the soft counts give to what they are taught


class CacheFiller:
    def __init__(
        self, engine: LocalEngine, cache: SharedCache, writer: SharedCache, max_new_tokens: int, progress: Progress
    ) -> None:
        """cache: the engine's; writer: publishes what no engine would say."""
        self._engine = engine
        self._cache = cache
        self._writer = writer
        self._max_new_tokens = max_new_tokens
        self._progress = progress
        self._random = random.Random(0)
        drafters = create_drafters((SOFT_NGRAM,), delta_bytes=DELTA_BYTES)
        self._drafter = drafters[SOFT_NGRAM]
        self._sharing = writer.share_counts(drafters)

    def fill(self, scenarios: Sequence[Scenario], token_ids: dict[str, list[int]]) -> None:
        """token_ids: of the prompts, by name."""
        for scenario in scenarios:
            if scenario.content == "answers":
                self._answer(scenario.before, token_ids, scenario.name)
                continue
            is_noise = scenario.content == "random"
            answers = [[] for _ in scenario.asked] if is_noise else self._answer(scenario.asked, token_ids, _REFERENCE)
            for row, answer in zip(scenario.asked, answers, strict=True):
                self._write(scenario, row.name, token_ids[row.name], answer)
        for sharing in (self._engine.core.soft_sharing, self._sharing):
            if sharing is not None:
                _give_out(sharing, [scenario.name for scenario in scenarios])
        for cache in (self._cache, self._writer):
            _until(lambda cache=cache: cache.publisher.queued_tokens == 0)  # type: ignore[misc]

    def _answer(self, rows: Sequence[BenchPrompt], token_ids: dict[str, list[int]], namespace: str) -> list[list[int]]:
        answers: list[list[int]] = []
        for begin in range(0, len(rows), _AT_ONCE):
            self._progress(f"before {namespace}", begin, len(rows))
            said = self._engine.generate(
                [token_ids[row.name] for row in rows[begin : begin + _AT_ONCE]],
                max_new_tokens=self._max_new_tokens,
                namespace=namespace,
                cache="off" if namespace == _REFERENCE else "read_write",
            )
            answers += [generation.token_ids for generation in said]
        self._progress(f"before {namespace}", len(rows), len(rows))
        return answers

    def _write(self, scenario: Scenario, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if scenario.content == "hostile":
            text = [*prompt, *answer]
            for at in range(len(prompt), len(text)):
                known, wrong = text[max(0, at - _HOSTILE_CONTEXT) : at], self._other(text[at : at + _HOSTILE_TOKENS])
                self._publish(scenario.name, f"{name} {at}", [], [*known, *wrong])
                self._teach(scenario.name, known, wrong)
            return
        said = self._nearly(answer) if scenario.content == "stale" else self._noise()
        self._publish(scenario.name, name, prompt, said)
        self._teach(scenario.name, prompt, said)

    def _publish(self, namespace: str, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        document_id = document_id_of(name)
        if prompt:
            self._writer.prompted(namespace, document_id, np.array(prompt, np.int32))
        self._writer.committed(namespace, document_id, len(prompt), np.array(tokens, np.int32))

    def _teach(self, namespace: str, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Make the soft counts say that a model was sure of `tokens` behind `before`."""
        assert isinstance(self._drafter, SoftNgramDrafter)
        text = np.array([*[-1] * MAX_CONTEXT, *before, *tokens], np.int32)
        ends = np.arange(len(text) - len(tokens), len(text))
        contexts = text[ends[:, None] - np.arange(MAX_CONTEXT, 0, -1)]
        probs = np.full((len(tokens), 1), _SURE, np.float32)
        self._drafter.remember(VerifiedRows(namespace, contexts, text[ends][:, None], probs, may_share=True))

    def _noise(self) -> list[int]:
        return [self._random.randrange(self._engine.info.vocab_size) for _ in range(self._max_new_tokens)]

    def _other(self, tokens: Sequence[int]) -> list[int]:
        """Another token at every place."""
        size = self._engine.info.vocab_size
        return [(token + 1 + self._random.randrange(size - 1)) % size for token in tokens]

    def _nearly(self, answer: Sequence[int]) -> list[int]:
        wrong = self._other(answer)
        is_wrong = [position % _STALE_EVERY == _STALE_EVERY - 1 for position in range(len(answer))]
        return [wrong[at] if is_wrong[at] else token for at, token in enumerate(answer)]


def take_in(engine: LocalEngine, cache: SharedCache, namespaces: Sequence[str], num_tokens: int) -> bool:
    """Wait until the engine can draft from the cache; False if that took too long. num_tokens: published tokens."""
    cache.follow(namespaces)
    sharing = engine.core.soft_sharing
    if sharing is not None and not _take_in_counts(sharing, namespaces):
        return False
    return _until(lambda: cache.stats().index.tokens >= num_tokens)


def _take_in_counts(sharing: SoftSharing, namespaces: Sequence[str]) -> bool:
    def news() -> object:
        stats = sharing.stats()
        return object() if stats.waiting_contexts or stats.warm_ratio < 1.0 else stats.merged_contexts

    return _exchange(sharing, namespaces, news)


def _give_out(sharing: SoftSharing, namespaces: Sequence[str]) -> bool:
    def news() -> object:
        tables = [sharing.tables.table_of(namespace) for namespace in namespaces]
        is_waiting = any(table is not None and table.num_untaken for table in tables)
        return object() if is_waiting else sharing.stats().written_bytes

    return _exchange(sharing, namespaces, news)


def _exchange(sharing: SoftSharing, namespaces: Sequence[str], news: Callable[[], object]) -> bool:
    """Exchange counts until `news` has not changed for a while; False if that took too long."""
    for namespace in namespaces:
        sharing.follow(namespace)
    last, since = news(), time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        sharing.tick(time.monotonic())
        if (now := news()) != last:
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
