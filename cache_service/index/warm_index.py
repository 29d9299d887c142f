"""A process's local indexes of the shared cache, one per namespace, kept up to date in the background.

The index of a namespace is an edition with a base and a tail: see `index_edition`. When much of the tail has been
folded into segments, or a generation has expired, a successor is read from the newest manifest and replaces the old
edition once it is complete, so drafts never wait and expired data do not survive. After a purge, loss or gap, the old
contents are dropped at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace

from cache_service.automata.automata_index import Automata
from cache_service.automata.kernel_warm_up import warm_up
from cache_service.errors import SettingError
from cache_service.formats.namespaces import owner_of
from cache_service.index.index_edition import TOUCH_S, Edition, EditionCounts, WarmIndexSettings
from cache_service.index.index_files import IndexFiles
from cache_service.log.follower import Follower
from cache_service.log.log_feed import LogFeed
from cache_service.log.log_reader import ReaderCounters
from cache_service.store.fair_share import first_to_give_way
from cache_service.store.store import OpenNamespace
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

_TEND_S = 1.0
_TEND_BUSY_S = 0.05  # while an index is to be replaced


@dataclass(frozen=True, slots=True)
class WarmIndexStats:
    """Current sizes, and counts since the start."""

    namespaces: int
    tokens: int  # in bases and tails
    memory_bytes: int  # memory of this process alone
    mapped_bytes: int  # size of shared files
    warm_ratio: float  # mean share of segments processed, 0 to 1; 1 without namespaces
    lag_s: float  # longest time since a namespace in use was known to have been read
    entries: int  # log entries read
    segments: int
    damaged: int  # entries, segments and manifests that could not be read
    missing_segments: int
    resets: int
    builds: int  # bases built here
    maps: int  # bases that another process, or an earlier one, had built
    build_faults: int
    overflows: int  # tails that were emptied at their limit
    evictions: int
    refusals: int  # namespaces not followed: no room, or an invalid name


class WarmIndex:
    """Follows namespaces and keeps an index of each. Thread-safe; no method raises for a fault of the store."""

    def __init__(
        self, open_namespace: OpenNamespace, settings: WarmIndexSettings | None = None, feed: LogFeed | None = None
    ) -> None:
        """feed: as in `Follower`."""
        self._settings = settings or WarmIndexSettings()
        reader = self._settings.follower.reader.model_copy(update={"warm_tokens": self._settings.namespace_tokens})
        self._open_namespace = open_namespace
        self._files = IndexFiles(self._settings.directory)
        self._counts = EditionCounts()
        self._evictions = self._refusals = 0
        self._past = ReaderCounters()  # sums over readers that have ended
        self._lock = threading.Lock()  # guards what is followed
        self._followed: dict[str, _Followed] = {}
        self._is_closed = False
        self._touched = time.monotonic()
        self._follower = Follower(open_namespace, self._settings.follower.model_copy(update={"reader": reader}), feed)
        self._builder = Turns("cache-index-builder")
        self._builder.add("warm up", self._warm_up)
        self._builder.add("tend", self._tend)

    def follow(self, namespace: str) -> None:
        """Index a namespace from now on. Cheap if it is followed already.

        At `max_namespaces`, the owner with most loses its least recently used namespace if that has not been used for
        `stay_s`, or if that owner has more namespaces than the new one's owner; else the new one is refused.
        """
        followed = self._followed.get(namespace)
        if followed is not None:
            followed.used = time.monotonic()
            return
        with self._lock:
            if self._is_closed or namespace in self._followed:
                return
            if len(self._followed) >= self._settings.max_namespaces and not self._evict_one_for(namespace):
                self._refusals += 1
                return
            try:
                followed = _Followed(time.monotonic())
                followed.live = self._begin(namespace, followed)
            except SettingError as error:
                log.warning("namespace %r cannot be followed: %s", namespace[:200], error)
                self._refusals += 1
                return
            self._followed[namespace] = followed

    def automata(self, namespace: str) -> Automata | None:
        """What to draft from in this round; None: the namespace is not followed."""
        followed = self._followed.get(namespace)
        if followed is None:
            return None
        followed.used = time.monotonic()
        return followed.live.automata

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the threads and free all indexes; the files stay. False if a thread still works after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for followed in self._followed.values():
                self._end(followed)
            self._followed.clear()
        ended = self._follower.close(timeout_s)
        return self._builder.close(max(0.0, deadline - time.monotonic())) and ended

    def stats(self) -> WarmIndexStats:
        now = time.monotonic()
        with self._lock:
            all_followed = list(self._followed.values())
            readers = [replace(self._past), *(followed.live.counters for followed in all_followed)]
        editions = [followed.live for followed in all_followed]
        wanted = [followed for followed in all_followed if now - followed.used < self._settings.wanted_s]
        return WarmIndexStats(
            namespaces=len(editions),
            tokens=sum(edition.num_tokens for edition in editions),
            memory_bytes=sum(edition.memory_bytes for edition in editions),
            mapped_bytes=sum(edition.mapped_bytes for edition in editions),
            warm_ratio=sum(edition.warm_ratio for edition in editions) / len(editions) if editions else 1.0,
            lag_s=max((followed.live.lag_s for followed in wanted), default=0.0),
            entries=sum(reader.entries for reader in readers),
            segments=sum(reader.segments for reader in readers),
            damaged=sum(r.corrupt_entries + r.corrupt_segments + r.corrupt_manifests for r in readers),
            missing_segments=sum(reader.missing_segments + reader.skipped_segments for reader in readers),
            resets=sum(reader.resets for reader in readers),
            **asdict(self._counts),
            evictions=self._evictions,
            refusals=self._refusals,
        )

    def _begin(self, namespace: str, followed: _Followed) -> Edition:
        """Start an edition from the newest manifest. Raises SettingError."""
        store, _ = self._open_namespace(namespace)
        edition = Edition(store.keys, self._settings, self._files, builder=self._builder, counts=self._counts)
        wanted_s = self._settings.wanted_s
        edition.reader = self._follower.follow(
            namespace, edition, edition.key, lambda: time.monotonic() - followed.used < wanted_s
        )
        return edition

    def _end(self, followed: _Followed) -> None:
        """Call it with the lock held."""
        for edition in (followed.live, followed.successor):
            if edition is not None:
                self._end_edition(edition)

    def _end_edition(self, edition: Edition) -> None:
        self._follower.unfollow(edition.key)
        edition.close()
        _add_to(self._past, edition.counters)
        edition.reader = None  # break the reference cycle, so that large arrays are freed at once

    def _evict_one_for(self, newcomer: str) -> bool:
        """Evict a namespace for another one, if one may go. Call it with the lock held."""
        names = [*sorted(self._followed, key=lambda name: self._followed[name].used), newcomer]
        loser = first_to_give_way(names)
        owners = [owner_of(name) for name in names]
        # An owner that holds more than the newcomer's must not lock it out by constant use.
        has_more = owners.count(owner_of(loser)) > owners.count(owner_of(newcomer))
        if not has_more and time.monotonic() - self._followed[loser].used < self._settings.stay_s:
            return False
        self._evict(loser)
        return True

    def _evict_an_idle_one(self) -> None:
        """Evict one that has not been used for `stay_s`, to stay within index_tokens. Call it with the lock held."""
        used = {name: followed.used for name, followed in self._followed.items()}  # a copy: other threads change them
        names = sorted(used, key=used.__getitem__)
        since = time.monotonic() - self._settings.stay_s
        num_spared = sum(last > since for last in used.values())
        if num_spared < len(names):
            # The largest owner among the idle ones: the budget also holds where the largest of all is busy.
            self._evict(first_to_give_way(names, lambda name: self._followed[name].live.num_tokens, num_spared))

    def _evict(self, namespace: str) -> None:
        """Call it with the lock held."""
        self._end(self._followed.pop(namespace))
        self._evictions += 1

    def _warm_up(self) -> float:
        warm_up()
        self._builder.remove("warm up")
        return TOUCH_S

    def _tend(self) -> float:
        """Replace outdated editions and keep within the budget. Returns the seconds until the next turn."""
        is_busy = False
        with self._lock:
            for namespace, followed in self._followed.items():
                if followed.successor is not None:
                    self._replace_if_ready(followed, followed.successor)
                elif followed.live.wants_successor:
                    followed.successor = self._begin(namespace, followed)
                    followed.resets = followed.live.num_resets
                is_busy = is_busy or followed.successor is not None
            num_tokens = sum(followed.live.num_tokens for followed in self._followed.values())
            if num_tokens > self._settings.index_tokens and len(self._followed) > 1:
                self._evict_an_idle_one()
            editions = [followed.live for followed in self._followed.values()]
        if time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()
            for edition in editions:
                edition.touch()
            self._files.sweep(self._settings.unused_file_s)
        return _TEND_BUSY_S if is_busy else _TEND_S

    def _replace_if_ready(self, followed: _Followed, successor: Edition) -> None:
        if followed.live.num_resets != followed.resets:  # the successor may have read purged data
            followed.successor = None
            self._end_edition(successor)
        elif successor.is_complete:
            old, followed.live, followed.successor = followed.live, successor, None
            self._end_edition(old)


@dataclass(slots=True, eq=False)
class _Followed:
    used: float  # time of the last use
    live: Edition = field(init=False)
    successor: Edition | None = None  # replaces `live` once it is complete
    resets: int = 0  # resets of the live edition when the successor began


def _add_to(total: ReaderCounters, counters: ReaderCounters) -> None:
    for counter in fields(counters):
        setattr(total, counter.name, getattr(total, counter.name) + getattr(counters, counter.name))
