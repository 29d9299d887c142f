"""Reports requests and committed tokens to the shared cache. Errors of the cache never affect a round."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol

import numpy as np

from actors.drafters.registry import CACHE
from actors.messages import GenerationRequest
from cache_service.automata.automata_index import AutomataIndex
from cache_service.formats.earnings import Earnings
from cluster.cache.soft_sharing import SoftSharing
from cluster.router.counters import RouterCounters
from cluster.router.round import Emitted, Round
from cluster.router.sequence import Sequence

logger = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")


class TokenSink(Protocol):
    """What a router needs of the shared cache (`cluster.cache.shared_cache.SharedCache`)."""

    @property
    def index(self) -> AutomataIndex: ...
    def follow(self, namespaces: SequenceOf[str]) -> None: ...
    def bounded(self, namespace: str, tenant: str, max_bytes: int | None) -> None: ...
    def watch(self, namespace: str, learner: object) -> None: ...
    def ended(self, learner: object) -> SequenceOf[str]: ...
    def prompted(self, namespace: str, document_id: bytes, token_ids: np.ndarray) -> None: ...
    def committed(self, namespace: str, document_id: bytes, offset: int, token_ids: np.ndarray) -> None: ...
    def answered(self, organisation: str, token_ids: np.ndarray) -> None: ...
    def finished(self, namespace: str, earnings: Earnings) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedLearning:
    """The router's parts of the shared cache. Without them it keeps what it learns to itself."""

    # Receives committed tokens that may be learnt from; its index has phrases for the lookahead of draft workers.
    token_sink: TokenSink | None = None
    soft_sharing: SoftSharing | None = None  # exchanges the counts of the drafter "soft_ngram" with other routers


class Learner(Protocol):
    def drop(self, namespace: str) -> None:
        """Drop what rounds have taught of a namespace."""


def _guarded(
    tell: Callable[Concatenate[GuardedSink, TokenSink, _Arguments], None],
) -> Callable[Concatenate[GuardedSink, _Arguments], None]:
    """Do nothing without a sink. The first exception is logged."""

    @functools.wraps(tell)
    def guarded(self: GuardedSink, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if self._sink is None:
            return
        try:
            tell(self, self._sink, *args, **kwargs)
        except Exception:
            self._counters.sink_faults += 1
            if self._counters.sink_faults == 1:
                logger.warning("the token sink failed; further failures are only counted", exc_info=True)

    return guarded


class GuardedSink:
    """Reports to the shared cache, or to none; exceptions are counted as `sink_faults`.

    The cache's methods return within microseconds. They copy what they keep of the arrays, which are views.
    learner: told when a namespace has ended. cache_source: index of the shared cache among the draft sources.
    """

    def __init__(
        self, sink: TokenSink | None, learner: Learner, counters: RouterCounters, cache_source: int | None = None
    ) -> None:
        self._sink = sink
        self._cache_source = cache_source
        self._learner = learner
        self._counters = counters
        self._document_base = secrets.token_bytes(8)

    @property
    def is_there(self) -> bool:
        return self._sink is not None

    @_guarded
    def follow(self, sink: TokenSink, request: GenerationRequest) -> None:
        if request.cache == "off":
            return
        sink.follow((request.namespace, *request.readable))
        if request.cache == "read_write":
            sink.bounded(request.namespace, request.tenant, request.cache_bytes)

    @_guarded
    def watch(self, sink: TokenSink, namespace: str) -> None:
        sink.watch(namespace, self._learner)

    @_guarded
    def forget_ended(self, sink: TokenSink, in_use: Iterable[str]) -> None:
        """Have the learner drop ended namespaces. in_use: namespaces of open requests, which go on to teach."""
        ended = sink.ended(self._learner)
        for namespace in ended:
            self._learner.drop(namespace)
        if ended:
            for namespace in set(in_use).intersection(ended):
                sink.watch(namespace, self._learner)

    def share(self, round: Round, emitted: list[Emitted]) -> None:
        """Report the round's committed tokens of sequences that may be learnt from."""
        if self._sink is None:
            return
        for index, first, _ in emitted:
            sequence = round.entries[index].sequence
            if sequence.request.cache == "read_write" and sequence.num_tokens > first:
                self._committed(sequence, first)

    @_guarded
    def finished(self, sink: TokenSink, sequence: Sequence) -> None:
        request, stats = sequence.request, sequence.progress.stats
        if request.cache == "off":
            return
        accepted = stats.accepted_tokens.get(CACHE, 0)
        record = sequence.drafts.record
        outcome = () if record is None or self._cache_source is None else record.outcomes[self._cache_source]
        sink.finished(sequence.namespace, Earnings(1, int(accepted > 0), stats.rounds, accepted, *outcome))
        if request.promotes and request.cache == "read_write":
            sink.answered(request.promotes, sequence.tokens(sequence.begin.num_prompt_tokens))

    @_guarded
    def _committed(self, sink: TokenSink, sequence: Sequence, first: int) -> None:
        namespace = sequence.namespace
        document_id = self._document_base + sequence.arrival.to_bytes(8, "little")
        if first == sequence.num_prompt:
            sink.prompted(namespace, document_id, sequence.tokens()[:first])
        sink.committed(namespace, document_id, first, sequence.tokens(first))
