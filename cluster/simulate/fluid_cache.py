"""An aggregated router's side of the shared cache: what it would write and read, without the texts."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from actors.messages import GenerationRequest
from cache_service.log.publisher import PublisherSettings
from cluster.simulate.followed import Followed
from cluster.simulate.shared_log import SharedLog

_FLUSH_S = PublisherSettings().flush_s
_RETRY_S = 1.0  # while the store is away


@dataclass(slots=True)
class _Decoding:
    """The sequences of a namespace that decode at once."""

    since_s: float
    has_company: bool  # of other namespaces, when the first of them began
    num_sequences: int = 0


class FluidCache:
    """A router writes an entry for each namespace with new tokens whenever it flushes. The number of entries follows
    from the time in which a namespace has sequences that decode. Tokens are written when their sequence ends."""

    def __init__(self, log: SharedLog, most_namespaces: int) -> None:
        self._log = log
        self._followed = Followed(
            most_namespaces, lambda namespace: log.follow(namespace, None), lambda namespace: log.leave(namespace, None)
        )
        self._decoding: dict[str, _Decoding] = {}
        self._queued: dict[str, int] = {}  # tokens that wait for the store

    def use(self, request: GenerationRequest) -> None:
        """Follow what a request reads."""
        if request.cache != "off":
            now = self._log.events.now
            for namespace in (request.namespace, *request.readable):
                self._followed.use(namespace, now)

    def begin(self, request: GenerationRequest, rounds_s: float) -> None:
        """A sequence emits its first token. rounds_s: time of all rounds that the router has had."""
        if request.cache != "read_write":
            return
        known = self._decoding.get(request.namespace)
        if known is None:
            known = self._decoding[request.namespace] = _Decoding(rounds_s, has_company=bool(self._decoding))
        known.num_sequences += 1

    def end(self, request: GenerationRequest, rounds_s: float, round_s: float, num_tokens: int) -> None:
        """The sequence has ended. round_s: time of a round; num_tokens: that it has emitted."""
        self.use(request)
        if request.cache != "read_write":
            return
        known = self._decoding[request.namespace]
        known.num_sequences -= 1
        num_entries = 0.0
        if not known.num_sequences:
            del self._decoding[request.namespace]
            # A flush is planned with the first token after the last one, which comes half a round later on average.
            # Where others decode, too, the first one is planned already.
            num_entries = (rounds_s - known.since_s) / (_FLUSH_S + round_s / 2)
            num_entries = 1.0 + (num_entries if known.has_company else floor(num_entries))
        if self._log.is_there:
            self._write(request.namespace, num_tokens, num_entries)
        else:
            if not self._queued:
                self._log.events.after(_RETRY_S, self._write_queued)
            self._queued[request.namespace] = self._queued.get(request.namespace, 0) + num_tokens

    def close(self) -> None:
        """The router is gone: it follows nothing any more, and what it has not written is lost."""
        self._followed.clear()
        self._decoding.clear()
        self._queued.clear()

    def _write_queued(self) -> None:
        if not self._log.is_there:
            self._log.events.after(_RETRY_S, self._write_queued)
            return
        for namespace, num_tokens in self._queued.items():
            self._write(namespace, num_tokens, 1.0)
        self._queued.clear()

    def _write(self, namespace: str, num_tokens: int, num_entries: float) -> None:
        num_bytes = self._log.meter.write(namespace, num_tokens, num_entries)
        self._log.meter.read_on(namespace, num_bytes, num_entries)
