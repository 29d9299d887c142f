"""Imports documents into a namespace, as log entries, which followers use at once. It folds them as it goes, so that no
import is too long for the log.

Documents that exist are left out: repeating an import adds nothing, and repeating an interrupted one completes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from cache_service.admin.namespace_contents import read_contents
from cache_service.errors import FormatError, NamespaceBusy, NamespaceUnread
from cache_service.formats.documents import Piece, split_pieces
from cache_service.formats.entry_codec import MAX_ENTRY_PIECES, decode_entry, encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Manifest
from cache_service.formats.stream_id import START, parse_id
from cache_service.log.compactor import Compactor
from cache_service.store.admin_store import AdminStore

MAX_DOCUMENT_TOKENS = 2**20
"""Longer documents are split: matches of this length are of no use, and memory stays bounded."""

_ENTRY_TOKENS = 4096
_FLUSH_TOKENS = 64 * _ENTRY_TOKENS
_FLUSH_PIECES = 16_384
_FOLD_TOKENS = 2**20
_MAX_LOG_ENTRIES = 16_384
_MAX_WAITING_ENTRIES = 8192  # unfolded entries in the log; beyond it, the import waits
_PATIENCE_S = 120.0


@dataclass(slots=True)
class ImportResult:
    """What an import has done."""

    documents: int = 0  # added
    tokens: int = 0
    known_documents: int = 0  # existed already, or came twice
    known_tokens: int = 0
    stored_bytes: int = 0  # size of the entries in Redis
    dropped_generations: int = 0  # dropped to stay within the namespace's budgets


class Importer:
    """Imports into one namespace."""

    def __init__(self, store: AdminStore, codec: FrameCodec, compactor: Compactor, keep_s: int) -> None:
        """compactor: folds the same namespace, with the cluster's budgets."""
        self.result = ImportResult()
        self._store = store
        self._codec = codec
        self._compactor = compactor
        self._keep_s = keep_s
        self._known: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        self._waiting: list[Piece] = []
        self._waiting_tokens = 0
        self._unfolded_tokens = 0
        self._last_id = START

    def run(self, documents: Iterable[Piece]) -> ImportResult:
        """Import pieces of documents; what has been imported stays when `documents` raises.

        Raises StoreError; NamespaceBusy if another compactor holds the namespace and does not fold; NamespaceUnread if
        its data have a later format or key, since the cluster might not be able to read what is written.
        """
        self._require_known_key()
        for piece in read_contents(self._store, self._codec).pieces:
            self._known.setdefault((piece.document_id, piece.kind), []).append((piece.offset, piece.end))
        try:
            for piece in documents:
                self._add(piece)
        finally:
            self._flush()
            self._fold()
            self._compactor.release()
        return self.result

    def _require_known_key(self) -> None:
        frame = self._store.read_manifest().frame
        try:
            if frame is not None:
                Manifest.decode(self._codec, frame)
            for _, entry in islice(self._store.log_after(START, 1), 1):
                decode_entry(self._codec, entry)
        except FormatError as error:
            if error.reason == "newer":
                raise NamespaceUnread(f"namespace {self._store.keys.namespace} cannot be read here: {error}") from None

    def _add(self, piece: Piece) -> None:
        extents = self._known.setdefault((piece.document_id, piece.kind), [])
        if any(begin <= piece.offset and piece.end <= end for begin, end in extents):
            self.result.known_documents += 1
            self.result.known_tokens += len(piece.token_ids)
            return
        extents.append((piece.offset, piece.end))
        self._waiting.append(piece)
        self._waiting_tokens += len(piece.token_ids)
        self.result.documents += 1
        self.result.tokens += len(piece.token_ids)
        if self._waiting_tokens >= _FLUSH_TOKENS or len(self._waiting) >= _FLUSH_PIECES:
            self._flush()

    def _flush(self) -> None:
        """Write in one transaction, so that each document is written whole or not at all."""
        if not self._waiting:
            return
        batches = split_pieces(self._waiting, _ENTRY_TOKENS, MAX_ENTRY_PIECES)
        frames = [encode_entry(self._codec, batch) for batch in batches]
        self._wait_for_room(len(frames))
        self._last_id = self._store.append(frames, _MAX_LOG_ENTRIES, self._keep_s)[-1]
        self.result.stored_bytes += sum(map(len, frames))
        self._unfolded_tokens += self._waiting_tokens
        self._waiting, self._waiting_tokens = [], 0
        if self._unfolded_tokens >= _FOLD_TOKENS:
            self._fold()

    def _fold(self) -> None:
        dropped = self._compactor.counters.dropped_generations
        while self._compactor.fold():
            pass  # a fold takes a bounded part of the log
        self.result.dropped_generations += self._compactor.counters.dropped_generations - dropped
        self._unfolded_tokens = 0

    def _wait_for_room(self, num_entries: int) -> None:
        """A full log drops its oldest entries, so they must have been folded before."""
        waited_s = 0.0
        while self._store.log_length() + num_entries > _MAX_WAITING_ENTRIES and not self._is_folded():
            self._fold()
            if waited_s >= _PATIENCE_S:
                raise NamespaceBusy(
                    f"namespace {self._store.keys.namespace} has {self._store.log_length()} entries in its log, and "
                    f"another compactor holds it without folding them; try again"
                )
            time.sleep(0.1)
            waited_s += 0.1

    def _is_folded(self) -> bool:
        """Whether everything written is in segments; the log may still hold it for a while."""
        return parse_id(self._last_id) <= parse_id(self._store.folded_id())
