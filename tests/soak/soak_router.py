"""A router of the soak: serves a toy target's answers at a constant rate, and shares what they hold.

It reads its plan as one line of JSON, writes one line of figures a second, and ends when its standard input does.
"""

import json
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from actors.drafters.registry import create_drafters
from actors.messages import GenerationRequest, SamplingParams, TokenChunk
from cache_service.counts.soft_compactor import SoftCompactorSettings
from cache_service.counts.soft_exchange import DELTA_BYTES, SoftExchangeSettings
from cache_service.formats.documents import document_id_of
from cache_service.formats.namespaces import OPEN
from cache_service.index.epoch_watch import EpochWatchSettings
from cache_service.index.index_edition import WarmIndexSettings
from cache_service.log.compactor import CompactorSettings
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.publisher import PublisherSettings
from cache_service.store.connection import ConnectionSettings
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.guarded_sink import SharedLearning
from cluster.router.round import RequestFailed
from cluster.router.run_round import run_local_round
from paceline_testing.rounds import toy_info
from paceline_testing.toy_target import ToyTarget

FINGERPRINT = "soak"
VOCAB_SIZE = 5_000
BATCH = 4
ANSWER_TOKENS = 64
DOCUMENT_TOKENS = 500
LIVE_NAMESPACES = 4  # that come and go, beside the one that stays
PROMPTS = 8  # new ones of a namespace at a time; the other requests repeat earlier ones
PROMPTS_S = 30.0  # that they are asked for
KEEP_S = 60  # that a namespace lives after its last tokens


class RouterPlan(msgspec.Struct):
    """What a router is to do."""

    url: str
    password: str
    index_directory: str
    number: int
    tokens_per_s: float  # of answers
    bulk_tokens_per_s: float  # of documents that only go into the cache
    namespace_s: float  # after which the next namespace comes


def namespaces_at(time_s: float, namespace_s: float) -> list[str]:
    """Those in use, the same in all processes: one that stays, and some that come and go."""
    newest = int(time_s / namespace_s)
    return [OPEN, *(f"n{newest - age}" for age in range(LIVE_NAMESPACES))]


def settings_of(plan: RouterPlan) -> SharedCacheSettings:
    """Small budgets and short times, so that all that should level out does so within minutes."""
    return SharedCacheSettings(
        publisher=PublisherSettings(keep_s=KEEP_S, max_log_entries=2048),
        compactor=CompactorSettings(
            limits=FoldLimits(segment_tokens=20_000, generation_tokens=40_000, generation_s=120.0),
            lease_s=0.5,  # so that another one may fold the next time
            keep_s=KEEP_S,
            retire_s=20,
            fold_every_s=2.0 + 0.3 * plan.number,
        ),
        index=WarmIndexSettings(
            directory=Path(plan.index_directory),
            vocab_size=VOCAB_SIZE,
            index_tokens=400_000,
            namespace_tokens=150_000,
            base_tokens=8_000,
            max_namespaces=6,
            unused_file_s=120.0,
        ),
        soft=SoftExchangeSettings(
            max_namespaces=6,
            keep_s=KEEP_S,
            compactor=SoftCompactorSettings(
                max_contexts=2**14, keep_s=KEEP_S, retire_s=20, lease_s=0.5, fold_every_s=5.0
            ),
        ),
        epochs=EpochWatchSettings(keep_s=KEEP_S),
        max_compacted=8,
    )


class SoakRouter:
    """One router with its cache. Answers are compared with what the target answers by itself."""

    def __init__(self, plan: RouterPlan) -> None:
        self._plan = plan
        self.cache = SharedCache(
            ConnectionSettings(plan.url, password=plan.password), FINGERPRINT, settings=settings_of(plan)
        )
        names = ("cache", "soft_ngram", "suffix")
        options = {"soft_ngram": {"budget_bytes": 16 << 20, "table_bytes": 2 << 20}}
        drafters = create_drafters(names, index=self.cache.index, delta_bytes=DELTA_BYTES, options=options)
        self.sharing = self.cache.share_counts(drafters)
        self._target = ToyTarget(VOCAB_SIZE, 1024, 16, 1 << 14, order=2)
        self.core = RouterCore(
            toy_info(VOCAB_SIZE, 1024, 16),
            RouterConfig(max_running=BATCH, max_waiting=BATCH),
            SpeculationConfig(drafters=names),
            drafters,
            shared=SharedLearning(token_sink=self.cache, soft_sharing=self.sharing),
        )
        self._asked: dict[str, tuple[GenerationRequest, list[int]]] = {}
        self._random = np.random.default_rng(plan.number)
        self._num_asked = self._num_documents = 0
        self.wrong = self.failed = self.finished = 0
        self.cpu_s: deque[float] = deque(maxlen=60)

    def run(self, stop: threading.Event) -> None:
        began = printed = time.monotonic()
        bulk_tokens = 0
        while not stop.is_set():
            self._round()
            now = time.monotonic()
            if bulk_tokens < (now - began) * self._plan.bulk_tokens_per_s:
                self._publish_document()
                bulk_tokens += DOCUMENT_TOKENS
            if now - printed >= 1.0:
                printed = now
                print(json.dumps(self.figures()), flush=True)
            ahead_s = self.core.counters.emitted_tokens / self._plan.tokens_per_s - (now - began)
            if ahead_s > 0:
                stop.wait(min(1.0, ahead_s))
        for request_id in list(self._asked):
            self.core.cancel(request_id)
        self.core.target_lost()
        self.core.end_overdue(time.monotonic())
        if self.sharing is not None:
            self.sharing.exchange.close(5.0)
        self.cache.close(5.0)

    def figures(self) -> dict[str, float]:
        counters, stats = self.core.counters, self.cache.stats()
        soft = None if self.sharing is None else self.sharing.stats()
        index, publisher = stats.index, stats.publisher
        return {
            "finished": self.finished,
            "wrong": self.wrong,
            "failed": self.failed,
            "emitted_tokens": counters.emitted_tokens,
            "rounds": counters.rounds,
            "accepted": counters.accepted_tokens["cache"],
            "drafter_errors": sum(counters.drafter_errors.values()),
            "sink_faults": counters.sink_faults,
            "written_tokens": publisher.written_tokens,
            "overflow_tokens": publisher.overflow_tokens,
            "purged_tokens": publisher.purged_tokens,
            "failures": publisher.failures,
            "faults": publisher.faults + index.build_faults + (0 if soft is None else soft.faults),
            "damaged": index.damaged + (0 if soft is None else soft.corrupt),
            "folds": stats.folds,
            "namespaces": index.namespaces,
            "index_tokens": index.tokens,
            "index_bytes": index.memory_bytes,
            "resets": index.resets,
            "builds": index.builds,
            "maps": index.maps,
            "evictions": index.evictions,
            "cpu_s": time.process_time(),
        }

    def _namespace(self) -> str:
        names = namespaces_at(time.time(), self._plan.namespace_s)
        return names[int(self._random.integers(len(names)))]

    def _ask(self) -> None:
        namespace = self._namespace()
        of = int(time.time() / PROMPTS_S) * PROMPTS + int(self._random.integers(PROMPTS))
        prompt = np.random.default_rng([of, *namespace.encode()]).integers(0, VOCAB_SIZE, 8).astype(np.int32)
        self._num_asked += 1
        request = GenerationRequest(
            request_id=str(self._num_asked),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=1, temperature=0.0),
            max_new_tokens=ANSWER_TOKENS,
            namespace=namespace,
        )
        self._asked[request.request_id] = request, []
        self.core.add(request, time.monotonic())

    def _round(self) -> None:
        while self.core.num_running + self.core.num_waiting < BATCH:
            self._ask()
        self.core.exchange(time.monotonic())
        self._take(run_local_round(self.core, self._target.verify).events)

    def _take(self, events: list[TokenChunk | RequestFailed]) -> None:
        for event in events:
            request, tokens = self._asked[event.request_id]
            if isinstance(event, RequestFailed):
                self.failed += 1
                del self._asked[event.request_id]
                continue
            tokens.extend(event.token_ids)
            if event.finish_reason is not None:
                self.finished += 1
                self.wrong += tokens != self._target.complete(request)[0]
                del self._asked[event.request_id]

    def _publish_document(self) -> None:
        self._num_documents += 1
        document = document_id_of(f"{self._plan.number} {self._num_documents}")
        tokens = self._random.integers(0, VOCAB_SIZE, DOCUMENT_TOKENS).astype(np.int32)
        self.cache.committed(self._namespace(), document, 0, tokens)


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.readline(), type=RouterPlan)
    stop = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    SoakRouter(plan).run(stop)


if __name__ == "__main__":
    main()
