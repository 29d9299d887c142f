"""What a process knows of the shared cache: an index for each namespace it reads, local, followed in the background.

An index is a base and a tail. The base is a static automaton of what the manifest's segments hold; it is built once on
a node and mapped by its other processes. The tail is a growing automaton of what the log has told since. When much of
the tail has been folded into segments, or a generation has expired, the namespace is read anew from the newest manifest
beside the old index, and takes its place when it is complete: nothing ever waits for it, and nothing that has expired
survives it. When the data are other data than before (a purge, a loss, a gap), the old index goes at once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from cache_service.automata import Automata
from cache_service.corpus_index import CorpusHeader
from cache_service.documents import Piece
from cache_service.errors import SettingError
from cache_service.fair_share import first_to_give_way
from cache_service.follower import Follower, FollowerSettings
from cache_service.frame import FrameCodec
from cache_service.index_files import IndexFiles, default_directory, digest_of, index_name
from cache_service.joined_text import joined_text
from cache_service.joined_text import warm_up as warm_up_joining
from cache_service.live_tail import LiveTail
from cache_service.log_reader import LogReader, ReaderCounters
from cache_service.manifest import Manifest, SegmentEntry
from cache_service.namespaces import owner_of
from cache_service.piece_codec import PieceColumns
from cache_service.setting_bounds import require_bounds
from cache_service.static_automaton import MAX_TOKEN_ID, StaticAutomaton
from cache_service.static_automaton import warm_up as warm_up_base
from cache_service.store import Store
from cache_service.store_keys import StoreKeys
from cache_service.stream_id import parse_id
from cache_service.suffix_automaton import SuffixAutomaton, warm_up_documents
from cache_service.turns import Turns

log = logging.getLogger(__name__)

_FORMAT = "paceline index 1"  # of the automata in files, part of their names
_TEND_S = 0.25
_TEND_BUSY_S = 0.05  # while an index is to be replaced
_TOUCH_S = 60.0
_ASK_AGAIN_S = 0.05  # whether another process has built what this one waits for

_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class WarmIndexSettings:
    """Bounds of what a process knows. Raises SettingError."""

    directory: Path | None = field(default_factory=default_directory)
    """Where the processes of a node share their indexes, decrypted: its owner's alone, best in memory; None: nowhere"""
    vocab_size: int = MAX_TOKEN_ID + 1  # tokens that are not below it are left out
    index_tokens: int = 16 * 2**20  # of all namespaces together; then one of the owner with most gives way
    namespace_tokens: int = 4 * 2**20  # of the newest segments of one namespace
    base_tokens: int = 2**16  # fewer are no base: they go into the tail
    max_namespaces: int = 64
    stay_s: float = 5.0  # after its last use, that a namespace gives way to no other
    wanted_s: float = 30.0  # after its last use, that a namespace is read as often as may be
    share_wait_s: float = 60.0  # for another process to build what this one needs as well
    unused_file_s: float = 600.0  # that a file stays which no process uses
    follower: FollowerSettings = field(default_factory=FollowerSettings)

    def __post_init__(self) -> None:
        require_bounds(
            self,
            vocab_size=(1, MAX_TOKEN_ID + 1),
            index_tokens=(1, 2**40),
            namespace_tokens=(1, 2**29),
            base_tokens=(1, 2**29),
            max_namespaces=(1, 65_536),
            stay_s=(0, 3600),
            wanted_s=(0, 86_400),
            share_wait_s=(0, 3600),
            unused_file_s=(2 * _TOUCH_S, 2**31),
        )

    @property
    def tail_tokens(self) -> int:
        """Most that a tail holds, if nobody folds the log: then it begins anew."""
        return max(2 * self.base_tokens, self.namespace_tokens // 2)


@dataclass(frozen=True, slots=True)
class WarmIndexStats:
    """At one moment; counts are since the start."""

    namespaces: int
    tokens: int  # in bases and tails
    memory_bytes: int  # of this process alone
    mapped_bytes: int  # of files that are shared
    warm_ratio: float  # share of the namespaces' segments that drafts are made from, 0 to 1; 1 without namespaces
    lag_s: float  # since the namespace was last read for which that is longest, of those that are wanted
    entries: int  # of logs
    segments: int
    damaged: int  # entries, segments and manifests that could not be read
    missing_segments: int
    resets: int
    builds: int  # bases built here
    maps: int  # bases that another process, or an earlier one, had built
    build_faults: int
    overflows: int  # tails that had to begin anew
    evictions: int  # namespaces that gave way
    refusals: int  # namespaces that were not followed: no room, or no possible name


@dataclass(slots=True)
class _Counts:
    builds: int = 0
    maps: int = 0
    build_faults: int = 0
    overflows: int = 0
    evictions: int = 0
    refusals: int = 0


class WarmIndex:
    """Follows namespaces and keeps an index of each. Thread-safe; no method raises for a fault of the store.

    open_namespace: the store and codec of a namespace, without asking the store anything.
    """

    def __init__(
        self,
        open_namespace: Callable[[str], tuple[Store, FrameCodec]],
        settings: WarmIndexSettings | None = None,
    ) -> None:
        self._settings = settings or WarmIndexSettings()
        reader = replace(self._settings.follower.reader, warm_tokens=self._settings.namespace_tokens)
        self._open_namespace = open_namespace
        self._files = IndexFiles(self._settings.directory)
        self._counts = _Counts()
        self._past = ReaderCounters()  # of readers that have ended
        self._lock = threading.Lock()  # of what is followed
        self._followed: dict[str, _Followed] = {}
        self._is_closed = False
        self._touched = time.monotonic()
        self._follower = Follower(open_namespace, replace(self._settings.follower, reader=reader))
        self._builder = Turns("cache-index-builder")
        self._builder.add("warm up", self._warm_up)
        self._builder.add("tend", self._tend)

    def follow(self, namespace: str) -> None:
        """Begin to learn what a namespace holds. Cheap, and nothing if it is followed already.

        Where there are too many, the least recently used one of the owner with most gives way, if it has not been used
        for `stay_s`, or the new one is somebody else's.
        """
        followed = self._followed.get(namespace)
        if followed is not None:
            followed.used = time.monotonic()
            return
        with self._lock:
            if self._is_closed or namespace in self._followed:
                return
            if len(self._followed) >= self._settings.max_namespaces and not self._evict_one_for(namespace):
                self._counts.refusals += 1
                return
            try:
                followed = _Followed(time.monotonic())
                followed.live = self._begin(namespace, followed)
            except SettingError as error:
                log.warning("namespace %r cannot be followed: %s", namespace[:200], error)
                self._counts.refusals += 1
                return
            self._followed[namespace] = followed

    def automata(self, namespace: str) -> Automata | None:
        """What there is to draft from at this moment; None: the namespace is not followed. Take it anew every round."""
        followed = self._followed.get(namespace)
        if followed is None:
            return None
        followed.used = time.monotonic()
        return followed.live.automata

    def forget(self, namespace: str) -> None:
        """Follow it no longer, and leave nothing of it behind on this node."""
        with self._lock:
            followed = self._followed.pop(namespace, None)
            if followed is not None:
                self._end(followed)
                self._files.keep(followed.live.name, None)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the threads and let go of all indexes; the files stay for those who come. False if a thread is still at
        work after `timeout_s`."""
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
        counts = self._counts
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
            builds=counts.builds,
            maps=counts.maps,
            build_faults=counts.build_faults,
            overflows=counts.overflows,
            evictions=counts.evictions,
            refusals=counts.refusals,
        )

    def _begin(self, namespace: str, followed: _Followed) -> _Edition:
        """Read a namespace from its newest manifest on. Raises SettingError."""
        store, _ = self._open_namespace(namespace)
        edition = _Edition(store.keys, self._settings, self._files, self._builder, self._counts)
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

    def _end_edition(self, edition: _Edition) -> None:
        self._follower.unfollow(edition.key)
        edition.close()
        _add_to(self._past, edition.counters)
        edition.reader = None  # which knows it: what is large must not wait for the garbage collector

    def _evict_one_for(self, newcomer: str) -> bool:
        """Make room for another namespace, if one may go. Call it with the lock held."""
        names = [*self._by_last_use(), newcomer]
        loser = first_to_give_way(names)
        owners = [owner_of(name) for name in names]
        # Whoever holds more than the newcomer's owner must not lock it out by asking all the time.
        has_more = owners.count(owner_of(loser)) > owners.count(owner_of(newcomer))
        if not has_more and time.monotonic() - self._followed[loser].used < self._settings.stay_s:
            return False
        self._evict(loser)
        return True

    def _evict_an_idle_one(self) -> None:
        """Make room for the tokens of the others, if one is not used just now. Call it with the lock held."""
        used = {name: followed.used for name, followed in self._followed.items()}  # other threads go on using them
        names = sorted(used, key=used.__getitem__)
        since = time.monotonic() - self._settings.stay_s
        num_spared = sum(last > since for last in used.values())
        if num_spared < len(names):
            # Not of the owner with most alone: where it is busy with all of its own, the budget holds all the same.
            self._evict(first_to_give_way(names, lambda name: self._followed[name].live.num_tokens, num_spared))

    def _evict(self, namespace: str) -> None:
        """Call it with the lock held."""
        self._end(self._followed.pop(namespace))
        self._counts.evictions += 1

    def _by_last_use(self) -> list[str]:
        return sorted(self._followed, key=lambda namespace: self._followed[namespace].used)

    def _warm_up(self) -> float:
        warm_up_documents()
        warm_up_joining()
        warm_up_base()
        self._builder.remove("warm up")
        return _TOUCH_S

    def _tend(self) -> float:
        """Replace indexes that should be, and keep within the budget. Returns when to do so again."""
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
        if time.monotonic() - self._touched > _TOUCH_S:
            self._touched = time.monotonic()
            for edition in editions:
                edition.touch()
            self._files.sweep(self._settings.unused_file_s)
        return _TEND_BUSY_S if is_busy else _TEND_S

    def _replace_if_ready(self, followed: _Followed, successor: _Edition) -> None:
        if followed.live.num_resets != followed.resets:  # the data are others, which the successor may not have seen
            followed.successor = None
            self._end_edition(successor)
        elif successor.is_complete:
            old, followed.live, followed.successor = followed.live, successor, None
            self._end_edition(old)


@dataclass(slots=True, eq=False)
class _Followed:
    """A namespace that is followed."""

    used: float  # when, last
    live: _Edition = field(init=False)
    successor: _Edition | None = None  # what will take its place
    resets: int = 0  # of the live one when the successor began


@dataclass(slots=True, eq=False)
class _Start:
    """What a base is to be made of."""

    segments: list[tuple[SegmentEntry, PieceColumns]] = field(default_factory=list)
    waits_until: float | None = None  # for another process to build it


class _Edition:
    """The index of a namespace as one reader has told it. Listens in the follower's thread, builds in the builder's."""

    def __init__(
        self, keys: StoreKeys, settings: WarmIndexSettings, files: IndexFiles, builder: Turns, counts: _Counts
    ) -> None:
        self.key = f"{keys.namespace} {next(_serials)}"
        self.name = index_name(keys)
        self.reader: LogReader | None = None
        self._fingerprint = keys.fingerprint
        self._settings = settings
        self._files = files
        self._builder = builder
        self._counts = counts
        self._lock = threading.Lock()  # of the following, which two threads change
        self._awaited: _Start | None = None  # a base that is to come
        self._content: str | None = None  # name of the base's file
        self._is_mapped = False
        self._is_closed = False
        self._oldest_generation = 0
        self._unfolded: deque[tuple[tuple[int, int], int]] = deque()  # (entry, tokens in the tail)
        self._folded_tokens = 0  # of the tail
        self._is_expired = False
        self.num_resets = 0
        self.automata = self._empty()

    # What the reader tells.

    def begin(self, manifest: Manifest | None, segments: list[tuple[int, SegmentEntry]]) -> bool:
        self._oldest_generation = 0 if manifest is None else manifest.oldest_generation
        has_base = sum(entry.num_tokens for _, entry in segments) >= self._settings.base_tokens
        content = self._name_of(entry for _, entry in segments) if has_base else None
        self._files.keep(self.name, content)
        start = _Start() if content is not None else None
        with self._lock:
            if self._is_closed:
                return False
            self._awaited, self._content = start, content
        if start is None or content is None:
            return True
        base = self._files.open(self.name, content)
        if base is not None:
            self._counts.maps += 1
            self._take_base(start, base, content, is_mapped=True)
        return base is None

    def segment(self, entry: SegmentEntry, columns: PieceColumns) -> None:
        start = self._awaited
        if start is not None:
            start.segments.append((entry, columns))
        else:
            self.automata.tail.add(columns.pieces())

    def segments_told(self) -> None:
        start = self._awaited
        if start is not None:
            task = f"build {next(_serials)}"
            self._builder.add(task, lambda: self._build(task, start))

    def entry(self, entry_id: str, pieces: list[Piece]) -> None:
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        if len(self.automata.tail) + num_tokens > self._settings.tail_tokens:
            log.warning("the log of a namespace is folded too slowly: its oldest tokens are left out")
            self._counts.overflows += 1
            with self._lock:
                self.automata = self.automata._replace(tail=self._new_tail(), tail_serial=next(_serials))
            self._forget_log()
        num_new = self.automata.tail.add(pieces)
        if num_new:
            self._unfolded.append((parse_id(entry_id), num_new))

    def renew(self, manifest: Manifest) -> None:
        folded = parse_id(manifest.folded_id)
        while self._unfolded and self._unfolded[0][0] <= folded:
            self._folded_tokens += self._unfolded.popleft()[1]
        self._is_expired = self._is_expired or manifest.oldest_generation > self._oldest_generation

    def reset(self) -> None:
        with self._lock:
            self.automata = self._empty()
            self._awaited = self._content = None
            self._is_mapped = False
        self.num_resets += 1
        self._forget_log()

    # What others ask.

    @property
    def is_complete(self) -> bool:
        """Whether it holds what there is."""
        return self._awaited is None and self.reader is not None and self.reader.has_caught_up

    @property
    def wants_successor(self) -> bool:
        base = self.automata.base
        most = max(self._settings.base_tokens, (0 if base is None else len(base)) // 4)
        return self.is_complete and (self._is_expired or self._folded_tokens >= most)

    @property
    def num_tokens(self) -> int:
        base, tail = self.automata.base, self.automata.tail
        return len(tail) + (0 if base is None else len(base))

    @property
    def memory_bytes(self) -> int:
        base, tail = self.automata.base, self.automata.tail
        return tail.memory_bytes + (0 if base is None or self._is_mapped else base.memory_bytes)

    @property
    def mapped_bytes(self) -> int:
        base = self.automata.base
        return 0 if base is None or not self._is_mapped else base.memory_bytes

    @property
    def warm_ratio(self) -> float:
        if self.reader is None or self._awaited is not None:
            return 0.0
        return self.reader.warm_ratio

    @property
    def lag_s(self) -> float:
        return 0.0 if self.reader is None else self.reader.lag_s

    @property
    def counters(self) -> ReaderCounters:
        return ReaderCounters() if self.reader is None else self.reader.counters

    def touch(self) -> None:
        content = self._content
        if content is not None:
            self._files.touch(self.name, content)

    def close(self) -> None:
        """Let go of everything. The file stays."""
        with self._lock:
            self._is_closed = True
            self._awaited = self._content = None
            self.automata = self._empty()

    # How it is made.

    def _build(self, task: str, start: _Start) -> float:
        """One try to get a base. Returns when to try again."""
        now = time.monotonic()
        if start.waits_until is None:
            start.waits_until = now + self._settings.share_wait_s
        if self._awaited is start:
            try:
                if not self._find_or_build(start, may_wait=now < start.waits_until):
                    return _ASK_AGAIN_S
            except Exception:
                log.exception("a base of the shared cache cannot be built; drafts are made without it")
                self._counts.build_faults += 1
                self._take_base(start, None, None, is_mapped=False)
        self._builder.remove(task)
        return _ASK_AGAIN_S

    def _find_or_build(self, start: _Start, may_wait: bool) -> bool:
        """False: another process is at it."""
        content = self._name_of(entry for entry, _ in start.segments)
        with self._files.claim(self.name) as is_ours:
            if not is_ours and may_wait:
                return False
            base = self._files.open(self.name, content)
            is_mapped = base is not None
            if is_mapped:
                self._counts.maps += 1
            else:
                base, header = self._built(start)
                self._counts.builds += base is not None
                if is_ours and base is not None and self._files.write(self.name, content, header, base):
                    mapped = self._files.open(self.name, content, verify=False)
                    base, is_mapped = mapped or base, mapped is not None
        self._take_base(start, base, content, is_mapped)
        return True

    def _built(self, start: _Start) -> tuple[StaticAutomaton | None, CorpusHeader]:
        text, num_documents = joined_text([columns for _, columns in start.segments], self._settings.vocab_size)
        header = CorpusHeader(
            self._fingerprint, self._fingerprint, self._settings.vocab_size, num_documents, len(text) - num_documents
        )
        if not header.num_tokens:
            return None, header
        automaton = SuffixAutomaton(len(text))
        automaton.extend(text)
        return StaticAutomaton.freeze(automaton), header

    def _take_base(self, start: _Start, base: StaticAutomaton | None, content: str | None, is_mapped: bool) -> None:
        with self._lock:
            is_wanted = self._awaited is start
            if is_wanted:
                self.automata = self.automata._replace(base=base, base_serial=next(_serials))
                self._awaited, self._content, self._is_mapped = None, content if is_mapped else None, is_mapped
            is_needed = content == self._content
        if is_mapped and not is_needed and content is not None:  # it came too late, for data that are gone, perhaps
            self._files.remove(self.name, content)

    def _name_of(self, segments: Iterable[SegmentEntry]) -> str:
        return digest_of([_FORMAT, str(self._settings.vocab_size), *(entry.digest for entry in segments)])

    def _empty(self) -> Automata:
        return Automata(None, 0, self._new_tail(), next(_serials))

    def _new_tail(self) -> LiveTail:
        return LiveTail(self._settings.vocab_size)

    def _forget_log(self) -> None:
        """Begin to count how much of the tail has been folded."""
        self._unfolded.clear()
        self._folded_tokens = 0
        self._is_expired = False


def _add_to(total: ReaderCounters, counters: ReaderCounters) -> None:
    for counter in fields(counters):
        setattr(total, counter.name, getattr(total, counter.name) + getattr(counters, counter.name))
