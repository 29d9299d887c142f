"""How a compactor folds a log, whatever is in it, so that two at work at once do no harm.

A lease says which of several compactors works; it is advice. What keeps the data whole is the write of the manifest:
Redis refuses it unless the writer's lease is still the newest that was granted, the data set is the one it read, and
the manifest is the one it replaces. Segments are named by their content and written before the manifest that mentions
them, so a compactor may stop anywhere, for any time. The log is trimmed up to where the fold before this one ended: a
reader of that manifest still finds its place in it.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cache_service.errors import FormatError
from cache_service.formats.stream_id import START
from cache_service.setting_bounds import require_bounds
from cache_service.store.store import KEEP_S, Store

log = logging.getLogger(__name__)


class FoldedManifest(Protocol):
    """What manifests have in common."""

    @property
    def epoch(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def fencing_token(self) -> int: ...
    @property
    def folded_id(self) -> str: ...


Manifest = TypeVar("Manifest", bound=FoldedManifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """How a compactor works. Raises SettingError."""

    lease_s: float
    fold_entries: int  # of the log, at most, in a fold
    keep_s: int = KEEP_S  # that what is stored lives after its last fold
    retire_s: int = 600  # that a segment stays for readers of the manifest before
    fold_every_s: float

    def __post_init__(self) -> None:
        require_bounds(
            self,
            lease_s=(0.01, 3600),
            fold_entries=(1, 65_536),
            keep_s=(1, 2**31),
            retire_s=(1, 2**31),
            fold_every_s=(0.01, 3600),
        )


@dataclass(slots=True)
class FoldCounters:
    """Since the start."""

    folds: int = 0
    folded_entries: int = 0
    corrupt_entries: int = 0
    trimmed_entries: int = 0
    left_folds: int = 0  # because manifest or log are of a later format or key
    refused_folds: int = 0  # by a newer lease, data set or manifest
    failures: int = 0  # Redis was unavailable or refused


@dataclass(frozen=True, slots=True)
class Fold(Generic[Manifest]):
    """A fold that is prepared: its segments are written, its manifest is not."""

    manifest: Manifest
    frame: bytes
    replaces: Manifest  # that it was made from
    live: tuple[str, ...]  # digests that the manifest mentions
    retired: tuple[str, ...]  # and those that it no longer does
    num_entries: int
    has_more: bool  # the log goes on after what was folded


class FencedCompactor(ABC, Generic[Manifest]):
    """Compacts one log of one namespace. Not thread-safe."""

    counters: FoldCounters
    _settings: FoldSettings

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owner = secrets.token_hex(16)

    def fold(self) -> bool:
        """Fold once, if this compactor may and there is something. True if there is more. Raises StoreError."""
        fold = self.prepare()
        return fold is not None and self.commit(fold) and fold.has_more

    @abstractmethod
    def prepare(self) -> Fold[Manifest] | None:
        """Read the log and write the segments of its next part. None: another one compacts, or nothing is to be done.

        Raises StoreError.
        """

    def commit(self, fold: Fold[Manifest]) -> bool:
        """Make a prepared fold the truth. False if Redis refused it: then nothing has changed. Raises StoreError."""
        new, old, settings = fold.manifest, fold.replaces, self._settings
        verdict = self._store.write_manifest(
            fold.frame, new.fencing_token, new.epoch, old.version, new.version, new.folded_id, settings.keep_s
        )
        if verdict != "ok":
            self._refused(verdict)
            return False
        self.counters.folds += 1
        self.counters.folded_entries += fold.num_entries
        if old.folded_id != START:
            self.counters.trimmed_entries += self._store.trim_log(new.version, old.folded_id)
        self._store.keep_live_segments(fold.live, settings.keep_s)
        self._store.keep_segments(fold.retired, settings.retire_s)
        return True

    def release(self) -> None:
        """Let another compactor take over at once. Raises StoreError."""
        self._store.release_lease(self._owner)

    def _lease(self) -> int | None:
        """The fencing token of a lease, new or renewed; None: somebody else has it, or the namespace has expired or was
        never written to: then not even leases are to keep anything of it."""
        settings = self._settings
        if self._store.read_epoch() is None:
            return None
        return self._store.acquire_lease(self._owner, max(1, int(settings.lease_s * 1000)), settings.keep_s)

    def _unfolded(self, old: Manifest) -> list[tuple[str, bytes]] | None:
        """The next entries of the log, one more than are folded at once; None: somebody else is at work."""
        view = self._store.read_log(old.folded_id, self._settings.fold_entries + 1)
        return view.after(old.folded_id) if (view.epoch, view.version) == (old.epoch, old.version) else None

    def _prepared(
        self, manifest: Manifest, frame: bytes, replaces: Manifest, live: list[str], before: list[str], num_entries: int
    ) -> Fold[Manifest]:
        """before: digests that the manifest before mentions."""
        known = set(live)
        retired = tuple(digest for digest in before if digest not in known)
        has_more = num_entries >= self._settings.fold_entries
        return Fold(manifest, frame, replaces, tuple(live), retired, num_entries, has_more)

    def _refused(self, reason: str) -> None:
        log.info("a fold of %s was refused: %s", self._place, reason)
        self.counters.refused_folds += 1

    def _leave(self, what: str, error: FormatError) -> None:
        """To compactors that can read it: in an upgrade or a change of keys, others know more than this one. Its lease,
        renewed turn after turn, would keep them out: release it where nothing is folded."""
        if self.counters.left_folds == 0:
            log.warning("%s of %s is left to others: %s", what, self._place, error)
        self.counters.left_folds += 1

    @property
    def _place(self) -> str:
        """For logs."""
        keys = self._store.keys
        return f"{keys.namespace} {keys.area}".rstrip()
