"""One index of a namespace, filled by one reader: a base and a tail.

The base is a static automaton of the manifest's segments; one process of a node builds it and the others map it. The
tail is a growing automaton of the log entries since then. If the base has the beginning of a document, its later tokens
are a separate text in the tail, until the next base joins the two.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cache_service.automata.automata_index import Automata
from cache_service.automata.corpus_index import CorpusHeader
from cache_service.automata.joined_text import joined_text
from cache_service.automata.live_tail import LiveTail
from cache_service.automata.static_automaton import MAX_TOKEN_ID, StaticAutomaton
from cache_service.automata.suffix_automaton import SuffixAutomaton
from cache_service.formats.documents import Piece
from cache_service.formats.manifest import Manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import SegmentEntry
from cache_service.formats.store_keys import StoreKeys
from cache_service.formats.stream_id import parse_id
from cache_service.index.index_files import IndexFiles, default_directory, digest_of, index_name
from cache_service.log.follower import FollowerSettings
from cache_service.log.log_reader import LogReader, ReaderCounters
from cache_service.options import Options
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

_FORMAT = "paceline index 1"  # format of index files, part of their names
_ASK_AGAIN_S = 0.05  # between looks for a base that another process builds

TOUCH_S = 60.0
"""Pause between two marks of an index file as used."""

_serials = itertools.count(1)


class WarmIndexSettings(Options):
    """Limits of a process's indexes."""

    directory: Path | None = Field(default_factory=default_directory)
    """Where the processes of a node share their indexes, decrypted: private, best in memory; None: nowhere"""
    vocab_size: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID + 1)] = MAX_TOKEN_ID + 1  # larger token ids are left out
    # Limit for all namespaces together; beyond it, one of the owner with most is evicted.
    index_tokens: Annotated[int, Field(ge=1, le=2**40)] = 16 * 2**20
    namespace_tokens: Annotated[int, Field(ge=1, le=2**29)] = 4 * 2**20  # read from the newest segments
    base_tokens: Annotated[int, Field(ge=1, le=2**29)] = 2**16  # fewer tokens go into the tail, without a base
    max_namespaces: Annotated[int, Field(ge=1, le=65_536)] = 64
    stay_s: Annotated[float, Field(ge=0, le=3600)] = 5.0  # no eviction so soon after a use
    wanted_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0  # full reading rate after a use
    share_wait_s: Annotated[float, Field(ge=0, le=3600)] = 60.0  # for another process's build
    unused_file_s: Annotated[float, Field(ge=2 * TOUCH_S, le=2**31)] = 600.0  # life of a file that no process uses
    follower: FollowerSettings = Field(default_factory=FollowerSettings)

    @property
    def tail_tokens(self) -> int:
        """Limit of a tail, reached if the log is not folded; then it starts empty."""
        return max(2 * self.base_tokens, self.namespace_tokens // 2)


@dataclass(slots=True)
class EditionCounts:
    """Sums over all indexes of a process since its start."""

    builds: int = 0
    maps: int = 0
    build_faults: int = 0
    overflows: int = 0


@dataclass(slots=True, eq=False)
class _Start:
    """The segments to build a base from."""

    segments: list[tuple[SegmentEntry, PieceColumns]] = field(default_factory=list)
    waits_until: float | None = None  # for another process to build it


class Edition:
    """A Listener in the follower's thread; builds its base in the builder's thread."""

    def __init__(
        self, keys: StoreKeys, settings: WarmIndexSettings, files: IndexFiles, builder: Turns, counts: EditionCounts
    ) -> None:
        self.key = f"{keys.namespace} {next(_serials)}"
        self.name = index_name(keys)
        self.reader: LogReader | None = None  # another thread may clear it: read it once
        self._fingerprint = keys.fingerprint
        self._settings = settings
        self._files = files
        self._builder = builder
        self._counts = counts
        self._lock = threading.Lock()  # guards the fields below, which two threads change
        self._awaited: _Start | None = None  # base to be built
        self._content: str | None = None  # name of the base's file
        self._is_mapped = False
        self._is_closed = False
        self._oldest_generation = 0
        self._unfolded: deque[tuple[tuple[int, int], int]] = deque()  # (entry, tokens in the tail)
        self._folded_tokens = 0  # tokens of the tail that segments hold by now
        self._is_expired = False
        self.num_resets = 0
        self.automata = self._empty()

    # Listener

    def begin(self, manifest: Manifest | None, segments: list[SegmentEntry]) -> bool:
        self._oldest_generation = 0 if manifest is None else manifest.oldest_generation
        has_base = sum(entry.num_tokens for entry in segments) >= self._settings.base_tokens
        content = self._name_of(segments) if has_base else None
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

    @property
    def is_complete(self) -> bool:
        """Whether it holds the whole namespace."""
        reader = self.reader
        return self._awaited is None and reader is not None and reader.has_caught_up

    @property
    def wants_successor(self) -> bool:
        if not (self._is_expired or self._folded_tokens):
            return False
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
        reader = self.reader
        return 0.0 if reader is None or self._awaited is not None else reader.warm_ratio

    @property
    def lag_s(self) -> float:
        reader = self.reader
        return 0.0 if reader is None else reader.lag_s

    @property
    def counters(self) -> ReaderCounters:
        reader = self.reader
        return ReaderCounters() if reader is None else reader.counters

    def touch(self) -> None:
        content = self._content
        if content is not None:
            self._files.touch(self.name, content)

    def close(self) -> None:
        """Free all memory. The file stays."""
        with self._lock:
            self._is_closed = True
            self._awaited = self._content = None
            self.automata = self._empty()

    def _build(self, task: str, start: _Start) -> float:
        """Try once to get a base. Returns the seconds until the next try."""
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
        """False: another process is building it."""
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
            target=self._fingerprint,
            tokenizer_fingerprint=self._fingerprint,
            vocab_size=self._settings.vocab_size,
            num_documents=num_documents,
            num_tokens=len(text) - num_documents,
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
        if is_mapped and not is_needed and content is not None:  # it came too late, perhaps for purged data
            self._files.remove(self.name, content)

    def _name_of(self, segments: Iterable[SegmentEntry]) -> str:
        return digest_of([_FORMAT, str(self._settings.vocab_size), *(entry.digest for entry in segments)])

    def _empty(self) -> Automata:
        return Automata(None, 0, self._new_tail(), next(_serials))

    def _new_tail(self) -> LiveTail:
        return LiveTail(self._settings.vocab_size)

    def _forget_log(self) -> None:
        """Restart counting how much of the tail has been folded."""
        self._unfolded.clear()
        self._folded_tokens = 0
        self._is_expired = False
