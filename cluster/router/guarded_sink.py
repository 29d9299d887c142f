"""Reports requests and committed tokens to the shared cache. Errors of the cache never affect a round."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol

from actors.drafters.registry import CACHE
from actors.messages import GenerationRequest
from cache_service.automata.automata_index import AutomataIndex
from cache_service.formats.documents import Int32Array
from cache_service.formats.earnings import Earnings
from cluster.cache.soft_sharing import SoftSharing
from cluster.router.counters import RouterCounters
from cluster.router.round import Emitted, Round
from cluster.router.sequence import Sequence

logger = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")


class TokenSink(Protocol):
    """Receives tokens that may be learnt from. Methods return within microseconds; an exception is counted and loses
    only that report. Arrays are views: a sink copies what it keeps."""

    def answered(self, organisation: str, token_ids: Int32Array) -> None:
        """The whole answer, shape [n], of a request whose organisation feeds the public pool."""

    def finished(self, namespace: str, earnings: Earnings) -> None:
        """A request that could draft from the cache has got all its tokens; `earnings`: what the cache brought it."""

    def follow(self, namespaces: SequenceOf[str]) -> None:
        """A request has come that may draft from these namespaces."""

    def bounded(self, namespace: str, tenant: str, max_bytes: int | None) -> None:
        """A request has come that will add to this namespace. max_bytes: limit of all namespaces of the tenant
        together; None: as much as others."""

    def watch(self, namespace: str, learner: object) -> None:
        """The learner (a router) will learn of this namespace, so `ended` must report its end. Called with every
        request, and again for namespaces that have ended while requests use them."""

    def ended(self, learner: object) -> SequenceOf[str]:
        """Namespaces whose learnt statistics this learner must drop now. Each is reported once to every learner;
        afterwards it may no longer be watched."""

    def prompted(self, namespace: str, document_id: bytes, token_ids: Int32Array) -> None:
        """The prompt of a document, shape [n]; called once, before its first `committed`."""

    def committed(
        self, namespace: str, document_id: bytes, offset: int, token_ids: SequenceOf[int] | Int32Array
    ) -> None:
        """Tokens that a round has committed, shape [n >= 1]; offset: position of the first in prompt and output."""


@dataclass(frozen=True, slots=True)
class SharedLearning:
    """The router's parts of the shared cache. Without them it keeps what it learns to itself."""

    token_sink: TokenSink | None = None  # receives committed tokens that may be learnt from
    soft_sharing: SoftSharing | None = None  # exchanges the counts of the drafter "soft_ngram" with other routers
    index: AutomataIndex | None = None  # phrases for the lookahead of draft workers


class Learner(Protocol):
    def drop(self, namespace: str) -> None:
        """Drop what rounds have taught of a namespace."""


def _guarded(
    tell: Callable[Concatenate[GuardedSink, TokenSink, _Arguments], None],
) -> Callable[Concatenate[GuardedSink, _Arguments], None]:
    """Do nothing without a sink. Exceptions of the sink are counted, the first is logged."""

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
    """A token sink, or none, for requests and rounds; its exceptions are counted as `sink_faults`.

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
        """A request has come."""
        if request.cache == "off":
            return
        sink.follow((request.namespace, *request.readable))
        if request.cache == "read_write":
            sink.bounded(request.namespace, request.tenant, request.cache_bytes)

    @_guarded
    def watch(self, sink: TokenSink, namespace: str) -> None:
        """The learner will learn of this namespace."""
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
        """A request has got all its tokens."""
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
