"""The promotion gate: phrases that enough distinct tenants have said become readable to all, in batches.

The public pool is a namespace with a manifest and no log. Every batch is a new generation with one segment of all
public phrases, so readers replace the pool as a whole, and a phrase that lost its support is gone with the next batch.
Only the gate writes it, under a lease with a fencing token, as compactors do.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cache_service.errors import FormatError, SettingError
from cache_service.formats.documents import Piece
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Generation, Manifest
from cache_service.formats.segment import SegmentEntry, decode_segment, encode_segment
from cache_service.promotion.candidate_codec import decode_candidate, encode_candidate
from cache_service.promotion.phrases import Phrase, encode_phrase, phrases_of
from cache_service.promotion.promotion_policy import (
    NEVER,
    Candidate,
    PromotionPolicy,
    batch_time,
    noise_of,
    support_of,
    verdict,
)
from cache_service.promotion.promotion_store import MAX_OFFERS, PromotionStore
from cache_service.store.store import KEEP_S, Store

log = logging.getLogger(__name__)

ID_BYTES = 16
MIN_SECRET_BYTES = 16

MAX_TEXT_TOKENS = 4096
"""Most tokens of a text that are looked at: it has no more phrases than fit into them, and looking takes time."""

_LEASE_MS = 60_000
_WORK_S = 0.001  # time spent on phrases between two rests
_RETIRE_S = 60  # time to live of the previous batch's segment, for its readers
_CUT_TOKENS = 64  # blocked before the cut of a long text: sensitive text may go on behind it

Blocks = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""Returns which tokens of a text (int [n]) must not become public, bool [n]: a `SensitiveSpans` or another rule."""


def nothing_blocked(token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For gates that only revoke: phrases in the pool have been checked."""
    return np.zeros(len(token_ids), np.bool_)


@dataclass(slots=True)
class PromotionCounters:
    """Counts since the start."""

    offered: int = 0
    refused_offers: int = 0  # offers by tenants that opted out or offered too much
    kept: int = 0  # phrases that reached enough supporters through an offer of this process
    batches: int = 0  # written
    refused_batches: int = 0  # there was a newer lease, epoch or manifest
    dropped: int = 0  # phrases that lost their support, or look sensitive
    unreadable: int = 0  # phrases and batches of another format or key
    foreign_writes: int = 0  # times that a log had been written to the pool


@dataclass(frozen=True, slots=True)
class PromotionTerms:
    """What all gates of a cluster must agree on."""

    secret: bytes = field(repr=False)
    policy: PromotionPolicy
    members: frozenset[str]  # organisations that may support phrases


class PromotionGate:
    """Counts the supporters of phrases and decides which are public. Not thread-safe. Methods raise StoreError."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        secret: bytes,
        blocks: Blocks,
        policy: PromotionPolicy | None = None,
        clock: Callable[[], float] | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """store, codec: of the public namespace. secret: key for hashes of tenants and phrases, the same in all
        processes. blocks: the filter of sensitive tokens. clock: None: Redis's, which all processes share. rest_s: rest
        after every millisecond of work in a release, for the process's more urgent threads. Raises SettingError."""
        if len(secret) < MIN_SECRET_BYTES:
            raise SettingError("length of the secret", len(secret), f"it must be at least {MIN_SECRET_BYTES} bytes")
        self.counters = PromotionCounters()
        self.policy = policy or PromotionPolicy()
        self._blocks = blocks
        self._store = PromotionStore(store)
        self._codec = codec
        self._secret = secret
        self._clock = clock
        self._rest_s = rest_s
        self._owner = secrets.token_hex(16)
        self._members: frozenset[bytes] | None = None  # None: all that have not opted out
        self._admitted: frozenset[str] = frozenset()  # organisations whose hashes are members
        self.released_s = -1  # Unix time of the last batch seen

    def admit(self, organisations: Iterable[str]) -> bool:
        """Let only these organisations support phrases. Those that had opted out may do so with later answers; those
        admitted before but not now opt out. Returns whether any may have left, so that `revoke` is needed."""
        admitted, left = frozenset(organisations), self._store.left()
        # Hashes are made of those that come and go: there may be very many that stay.
        gone = frozenset(map(self._organisation_id, self._admitted - admitted))
        members = (self._members or frozenset()) - gone
        members |= frozenset(map(self._organisation_id, admitted - self._admitted))
        for organisation_id in gone:
            self._store.opt_out(organisation_id)
        for organisation_id in left.keys() & members:
            if left[organisation_id] == NEVER:
                self._store.opt_in(organisation_id, self._now())
        has_changed = self._members is None or bool(gone)
        self._members, self._admitted = members, admitted
        return has_changed

    def offer(self, organisation: str, phrases: Iterable[Phrase], age_s: float = 0.0) -> None:
        """`organisation` said these phrases `age_s` seconds ago. It is the one billed, so that many tenants of one
        organisation count once. Phrases that are too long, or look sensitive when they reach enough supporters, are
        left out."""
        kept = [phrase for phrase in phrases if self._has_right_size(phrase)]
        tenant, now_s = self._organisation_id(organisation), self._now()
        said_s = now_s - math.ceil(age_s)
        for begin in range(0, len(kept), MAX_OFFERS):
            some = {self._phrase_id(phrase): phrase for phrase in kept[begin : begin + MAX_OFFERS]}
            answers = self._store.support(tenant, list(some), said_s, self.policy)
            self.counters.offered += len(some)
            if answers == [-2]:
                self.counters.refused_offers += len(some)
                return
            self.counters.refused_offers += answers.count(-1)
            for answer, (phrase_id, phrase) in zip(answers, some.items(), strict=True):
                if answer == 1 and not self._is_sensitive(phrase):
                    frame = encode_candidate(self._codec, phrase, now_s)
                    self.counters.kept += self._store.keep_phrase(phrase_id, frame, self.policy)

    def offer_text(self, organisation: str, token_ids: npt.NDArray[np.integer], age_s: float = 0.0) -> None:
        """Offer the phrases of a text (ints [n]) said `age_s` seconds ago, without those that look sensitive in their
        context. Only the first MAX_TEXT_TOKENS tokens are used."""
        tokens = np.asarray(token_ids[:MAX_TEXT_TOKENS], np.int64)
        blocked = self._blocks(tokens)
        if len(tokens) < len(token_ids):
            blocked[-_CUT_TOKENS:] = True
        self.offer(organisation, phrases_of(tokens, blocked), age_s)

    def opt_out(self, organisation: str) -> None:
        """It supports nothing any more. Phrases public through it disappear with `revoke` or the next batch."""
        self._store.opt_out(self._organisation_id(organisation))

    def opt_in(self, organisation: str) -> None:
        """It may support phrases again, with later answers."""
        self._store.opt_in(self._organisation_id(organisation), self._now())

    def erase(self, organisations: Iterable[str]) -> None:
        """Also delete the hashes of these organisations' phrases. Notes of who has opted out stay."""
        self._store.erase([self._organisation_id(organisation) for organisation in organisations])

    def release(self) -> bool:
        """Write the due batch. False: it exists, another gate holds the lease, or it was refused."""
        due_s = batch_time(self._now(), self.policy)
        if due_s <= self.released_s:
            return False
        token = self._store.acquire_lease(self._owner, _LEASE_MS)
        return token is not None and self._with_lease(token, due_s)

    def revoke(self, *, seizes: bool = False) -> bool:
        """Remove phrases that lost their support from the pool; add none. False: there is no pool, another gate holds
        the lease, or it was refused. seizes: take the lease from other gates."""
        take = self._store.seize_lease if seizes else self._store.acquire_lease
        token = take(self._owner, _LEASE_MS)
        return token is not None and self._with_lease(token, None)

    def public(self) -> frozenset[Phrase]:
        manifest = self._manifest()
        return frozenset() if manifest is None else frozenset(self._segment(manifest).values())

    # --- batches

    def _with_lease(self, token: int, due_s: int | None) -> bool:
        try:
            return self._release(token, due_s)
        finally:
            self._store.release_lease(self._owner)

    def _release(self, token: int, due_s: int | None) -> bool:
        """due_s: None: only remove phrases, by the rules of the existing batch."""
        epoch = self._store.begin_epoch()
        self.counters.foreign_writes += self._store.clear_log()
        version = self._store.read_manifest().version
        manifest = self._manifest()
        before = {} if manifest is None else self._segment(manifest)
        released_s = -1 if manifest is None else manifest.open_generation.started_s
        if due_s is None:
            if manifest is None:
                return False
            allowed = self._decide(released_s)
            allowed = {phrase_id: phrase for phrase_id, phrase in allowed.items() if phrase_id in before}
        elif due_s <= released_s:
            self.released_s = released_s
            return False
        else:
            allowed = self._decide(due_s, self._rest_s)
        time_s = released_s if due_s is None else due_s
        if allowed == before:
            self._store.keep(KEEP_S, [] if manifest is None else [entry.digest for entry in manifest.segments])
        elif not self._write(token, epoch, replaces=version, time_s=time_s, allowed=allowed, old=manifest):
            return False
        if due_s is not None:
            self.released_s = due_s
        return True

    def _decide(self, batch_s: int, rest_s: float = 0.0) -> dict[bytes, Phrase]:
        """All phrases allowed in the batch of that time. Drops those that have lost their support."""
        policy, now_s = self.policy, self._now()
        since_s = self._store.left()
        allowed: dict[bytes, Phrase] = {}
        dropped: list[bytes] = []
        rested = time.perf_counter()
        for some in self._store.phrases():
            if rest_s:
                self._store.acquire_lease(self._owner, _LEASE_MS)  # renew; if it is lost, nothing can be written
            for phrase_id, frame, seen_s in some:
                if rest_s and time.perf_counter() - rested >= _WORK_S:
                    time.sleep(rest_s)
                    rested = time.perf_counter()
                candidate = self._decode(phrase_id, frame, seen_s)
                if candidate is None:
                    continue
                support = support_of(candidate, since_s, now_s, policy.window_s, members=self._members)
                noise = noise_of(self._secret, phrase_id, policy.noise_epsilon)
                found = verdict(
                    candidate,
                    support,
                    noise,
                    is_sensitive=self._is_sensitive(candidate.phrase),
                    policy=policy,
                    batch_s=batch_s,
                )
                if found == "public":
                    allowed[phrase_id] = candidate.phrase
                elif found == "drop":
                    dropped.append(phrase_id)
        self._store.drop_phrases(dropped)
        self.counters.dropped += len(dropped)
        return allowed

    def _write(
        self, token: int, epoch: str, replaces: int, time_s: int, allowed: dict[bytes, Phrase], old: Manifest | None
    ) -> bool:
        entries: tuple[SegmentEntry, ...] = ()
        if allowed:
            # Sorted by id and with the batch's time, so that nothing reveals when or after which text a phrase
            # occurred.
            pieces = [
                Piece(phrase_id, 0, np.array(allowed[phrase_id], np.int32), time_s=time_s)
                for phrase_id in sorted(allowed)
            ]
            entry, frame = encode_segment(self._codec, pieces)
            if not self._store.write_segment(entry.digest, frame, keep_s=KEEP_S, token=token, epoch=epoch):
                return self._refused("lease or epoch has changed")
            entries = (entry,)
        # A generation number new to readers, so that they replace the previous one as a whole.
        version = replaces + 1
        generation = Generation(version, time_s, entries)
        new = Manifest(epoch, version, token, generations=(generation,), folded_generation=version)
        result = self._store.write_manifest(
            new.encode(self._codec),
            token=token,
            epoch=epoch,
            replaces=replaces,
            version=version,
            folded_id=new.folded_id,
            keep_s=KEEP_S,
        )
        if result != "ok":
            return self._refused(result)
        self.counters.batches += 1
        live = {entry.digest for entry in entries}
        retired = [entry.digest for entry in old.segments if entry.digest not in live] if old is not None else []
        self._store.keep_segments(retired, _RETIRE_S)
        return True

    def _refused(self, reason: str) -> bool:
        log.info("a batch of the public pool was refused: %s", reason)
        self.counters.refused_batches += 1
        return False

    def _manifest(self) -> Manifest | None:
        """The pool's manifest, if it can be read and has the current epoch."""
        stored = self._store.read_manifest()
        if stored.frame is None:
            return None
        try:
            manifest = Manifest.decode(self._codec, stored.frame)
        except FormatError as error:
            log.warning("the manifest of the public pool cannot be used: %s", error)
            self.counters.unreadable += 1
            return None
        return manifest if manifest.epoch == stored.epoch and manifest.version == stored.version else None

    def _segment(self, manifest: Manifest) -> dict[bytes, Phrase]:
        found: dict[bytes, Phrase] = {}
        for entry in manifest.segments:
            frame = self._store.read_segment(entry.digest, entry.num_bytes)
            try:
                pieces = [] if frame is None else decode_segment(self._codec, entry.digest, frame).pieces()
            except FormatError as error:
                log.warning("a batch of the public pool cannot be read: %s", error)
                self.counters.unreadable += 1
                continue
            found.update((piece.document_id, tuple(piece.token_ids.tolist())) for piece in pieces)
        return found

    # --- phrases

    def _has_right_size(self, phrase: Phrase) -> bool:
        return 1 <= len(phrase) <= self.policy.max_tokens and min(phrase) >= 0 and max(phrase) < 2**31

    def _is_sensitive(self, phrase: Phrase) -> bool:
        return bool(self._blocks(np.array(phrase, np.int64)).any())

    def _organisation_id(self, organisation: str) -> bytes:
        return self._hash(b"tenant\0", organisation.encode())

    def _phrase_id(self, phrase: Phrase) -> bytes:
        return self._hash(b"phrase\0", encode_phrase(phrase))

    def _hash(self, kind: bytes, what: bytes) -> bytes:
        return hmac.digest(self._secret, kind + what, hashlib.sha256)[:ID_BYTES]

    def _decode(self, phrase_id: bytes, frame: bytes, seen_s: dict[bytes, float]) -> Candidate | None:
        try:
            phrase, reached_s = decode_candidate(self._codec, frame)
            if self._phrase_id(phrase) != phrase_id:
                raise FormatError("garbage", "a phrase lies under the id of another one")
        except FormatError as error:
            log.debug("a phrase is left out: %s", error)
            self.counters.unreadable += 1
            return None
        return Candidate(phrase, reached_s, seen_s)

    def _now(self) -> int:
        return self._store.time_s() if self._clock is None else int(self._clock())
