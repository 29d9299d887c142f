"""Redis operations of the promotion gate: supporters of phrases by hashed id, and phrases with enough supporters.

Until a phrase has enough supporters, only keyed hashes of it and of them are stored, no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cache_service.errors import StoreUnavailable
from cache_service.promotion.promotion_policy import NEVER, PromotionPolicy
from cache_service.store.answers import as_bytes, as_count, faults_told
from cache_service.store.scripts import KEEP_PHRASE, SUPPORT_PHRASES
from cache_service.store.store import KEEP_S, Store

MAX_OFFERS = 32
"""Phrases per call, which bounds the script's cost."""

_DAY_S = 24 * 3600
_READ_AT_ONCE = 256
_SCAN_COUNT = 1000


class PromotionStore(Store):
    """The public namespace. Every method raises StoreUnavailable or StoreRefused, nothing else.

    The gate's keys, all in the area "gate": `left`, hash of tenant -> "never" or the time of its return; `phrases`,
    hash of id -> frame; `supporters:<id>`, sorted set of tenant by time; `offers:<tenant>:<day>`, counter; `lease`, so
    that compactors cannot block the gate. The fence is the namespace's.
    """

    def __init__(self, store: Store) -> None:
        """store: the public namespace's."""
        super().__init__(store.connection, store.keys)
        self._gate = store.keys.beside("gate")
        self._lease = self._gate.lease
        self._left = self._gate.key("left")
        self._phrases = self._gate.key("phrases")

    def time_s(self) -> int:
        return self.server_time_ms() // 1000

    def support(self, tenant: bytes, phrase_ids: Sequence[bytes], now_s: int, policy: PromotionPolicy) -> list[int]:
        """Count a tenant for at most MAX_OFFERS phrases. Returns for each 1 if its tokens are wanted, 0 if not, -1 if
        the tenant has offered too much today; [-2] if it has opted out."""
        offers = self._gate.key(f"offers:{tenant.hex()}:{now_s // _DAY_S}")
        keys = [self._left, offers, self._phrases, *map(self._supporters, phrase_ids)]
        limits = [policy.window_s, policy.min_tenants, policy.max_supporters, policy.tenant_offers, policy.max_phrases]
        with faults_told():
            answers = self.run(SUPPORT_PHRASES, keys, [tenant, now_s, *limits, *phrase_ids])
            answers = [int(answer) for answer in answers]
            if answers != [-2] and len(answers) != len(phrase_ids):
                raise ValueError
            return answers

    def keep_phrase(self, phrase_id: bytes, frame: bytes, policy: PromotionPolicy) -> bool:
        arguments = [phrase_id, frame, policy.min_tenants, policy.max_phrases, max(KEEP_S, policy.window_s)]
        with faults_told():
            return bool(as_count(self.run(KEEP_PHRASE, [self._phrases, self._supporters(phrase_id)], arguments)))

    def drop_phrases(self, phrase_ids: Sequence[bytes]) -> None:
        with faults_told():
            for begin in range(0, len(phrase_ids), _READ_AT_ONCE):
                self._client.hdel(self._phrases, *phrase_ids[begin : begin + _READ_AT_ONCE])

    def opt_out(self, tenant: bytes) -> None:
        with faults_told():
            self._client.hset(self._left, tenant, "never")

    def opt_in(self, tenant: bytes, now_s: int) -> None:
        """Count the tenant's texts from `now_s` on. No effect for a tenant that has not opted out."""
        with faults_told():
            if self._client.hget(self._left, tenant) == b"never":
                self._client.hset(self._left, tenant, str(now_s))

    def erase(self, tenants: Sequence[bytes]) -> None:
        """Remove tenants from the supporters of every phrase. Scans the whole server."""
        if not tenants:
            return
        with faults_told():
            names: list[Any] = []
            for name in self._client.scan_iter(match=self._gate.key("supporters:*"), count=_SCAN_COUNT):
                names.append(name)
                if len(names) == _READ_AT_ONCE:
                    self._remove_from(names, tenants)
                    names = []
            self._remove_from(names, tenants)

    def left(self) -> dict[bytes, float]:
        """When each tenant that ever opted out returned, or NEVER."""
        with faults_told():
            found = self._client.hgetall(self._left)
            return {
                as_bytes(tenant): NEVER if value == b"never" else float(int(value)) for tenant, value in found.items()
            }

    def phrases(self) -> Iterator[list[tuple[bytes, bytes, dict[bytes, float]]]]:
        """All phrases in batches: (id, frame, when each tenant last said it)."""
        with faults_told():
            batch: dict[bytes, bytes] = {}
            for phrase_id, frame in self._client.hscan_iter(self._phrases, count=_READ_AT_ONCE):
                batch[as_bytes(phrase_id)] = as_bytes(frame)
                if len(batch) == _READ_AT_ONCE:
                    yield self._with_supporters(batch)
                    batch = {}
            if batch:
                yield self._with_supporters(batch)

    def keep(self, keep_s: int, digests: Sequence[str]) -> None:
        """Set the pool's time to live."""
        keys = self.keys
        with faults_told(), self._client.pipeline(transaction=False) as pipeline:
            for key in (keys.epoch, keys.manifest, keys.fence, *map(keys.segment, digests)):
                pipeline.expire(key, keep_s)
            pipeline.execute()

    def clear_log(self) -> int:
        """Delete the pool's log, which only writers other than the gate make; 1 if there was one."""
        with faults_told():
            return as_count(self._client.delete(self.keys.log))

    @property
    def _client(self) -> Any:  # redis-py types the answers of both kinds of client as awaitable or not
        return self.client()

    def _remove_from(self, names: Sequence[Any], tenants: Sequence[bytes]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.zrem(name, *tenants)
            pipeline.execute()

    def _supporters(self, phrase_id: bytes) -> str:
        return self._gate.key(f"supporters:{phrase_id.hex()}")

    def _with_supporters(self, batch: dict[bytes, bytes]) -> list[tuple[bytes, bytes, dict[bytes, float]]]:
        with self._client.pipeline(transaction=False) as pipeline:
            for phrase_id in batch:
                pipeline.zrange(self._supporters(phrase_id), 0, -1, withscores=True)
            answers = pipeline.execute()
        if len(answers) != len(batch):
            raise StoreUnavailable("Redis answers nonsense: answers are missing")
        found = []
        for (phrase_id, frame), answer in zip(batch.items(), answers, strict=True):
            found.append((phrase_id, frame, {as_bytes(tenant): float(seen_s) for tenant, seen_s in answer}))
        return found
