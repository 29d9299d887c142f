"""Folds the tokens of a namespace into segments: see `fenced_fold`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import msgspec
from pydantic import Field

from cache_service.formats.documents import Piece, assemble, split_pieces
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import MAX_MANIFEST_SEGMENTS, Generation, Manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import MAX_SEGMENT_PIECES, SegmentEntry, encode_segment
from cache_service.log.fenced_fold import (
    FencedCompactor,
    Fold,
    FoldCounters,
    FoldEntries,
    Folding,
    FoldSeconds,
    FoldSettings,
    Lease,
)
from cache_service.log.fold_plan import FoldLimits, after_fold, num_absorbed
from cache_service.log.payload import TOKENS
from cache_service.log.second_chance import survivors
from cache_service.store.store import OpenNamespace, Store
from cache_service.store.turns import Turns

_SURVIVORS_DIVISOR = 4  # at most a quarter of a dropped generation survives


class CompactorSettings(FoldSettings):
    limits: FoldLimits = Field(default_factory=FoldLimits)
    lease_s: FoldSeconds = 30.0
    fold_entries: FoldEntries = 4096
    fold_every_s: FoldSeconds = 10.0


@dataclass(slots=True)
class CompactorCounters(FoldCounters):
    dropped_generations: int = 0


class Compactor(FencedCompactor[Manifest, SegmentEntry, list[Piece], PieceColumns]):
    """Compacts the tokens of one namespace. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        settings: CompactorSettings | None = None,
        clock: Callable[[], float] = time.time,
        limits: Callable[[bool], FoldLimits] | None = None,
        may_rest: bool = True,
        folding: Folding | None = None,
    ) -> None:
        """limits: returns the budgets of the next fold, in place of the settings' limits. Its argument says whether
        there are new entries. May raise StoreError. may_rest: False where budgets shrink without new entries.
        folding: as in `FencedCompactor`."""
        super().__init__(store, codec, TOKENS, may_rest, folding)
        self.counters: CompactorCounters = CompactorCounters()
        self._settings: CompactorSettings = settings or CompactorSettings()
        self._clock = clock
        self._limits = limits or (lambda has_new: self._settings.limits)

    def commit(self, fold: Fold[Manifest]) -> bool:
        is_done = super().commit(fold)
        if is_done:
            self.counters.dropped_generations += fold.manifest.oldest_generation - fold.replaces.oldest_generation
        return is_done

    def _empty_manifest(self, epoch: str, version: int) -> Manifest:
        return Manifest.empty(epoch, version, int(self._clock()))

    def _fold(self, old: Manifest, entries: list[list[Piece]], folded_id: str, lease: Lease) -> Manifest | None:
        has_new = folded_id != old.folded_id
        limits = self._limits(has_new)
        if not has_new and sum(generation.num_bytes for generation in old.generations) <= limits.max_bytes:
            return None
        pieces = [piece for entry in entries for piece in entry]
        segments = self._with_pieces(old.open_generation, pieces, lease)
        generations = after_fold(old.generations, segments, int(self._clock()), limits)
        return Manifest(
            epoch=old.epoch,
            version=old.version + 1,
            fencing_token=lease.token,
            generations=self._with_survivors(generations, old, limits, lease),
            folded_id=folded_id,
            folded_generation=old.open_generation.number,
        )

    def _with_pieces(self, generation: Generation, pieces: list[Piece], lease: Lease) -> list[SegmentEntry]:
        """Segments of the open generation with `pieces` added; its last small segments are rewritten."""
        segments = list(generation.segments)
        if not pieces:
            return segments
        sizes = [segment.num_tokens for segment in segments]
        num_new, most = sum(len(piece.token_ids) for piece in pieces), self._settings.limits.segment_tokens
        num_kept = len(segments) - num_absorbed(sizes, num_new, most)
        before = [piece for entry in segments[num_kept:] for piece in self._pieces_of(entry)]
        return segments[:num_kept] + self._write(assemble(before + pieces), lease)

    def _with_survivors(
        self, generations: tuple[Generation, ...], old: Manifest, limits: FoldLimits, lease: Lease
    ) -> tuple[Generation, ...]:
        """`generations`, with the survivors of dropped generations of `old` added to the open one."""
        dropped = [each for each in old.generations if each.number < generations[0].number]
        room = min(limits.generation_tokens, sum(each.num_tokens for each in dropped)) // _SURVIVORS_DIVISOR
        pieces = (piece for each in dropped for entry in each.segments for piece in self._pieces_of(entry))
        found = survivors(pieces, room)
        if not found:
            return generations
        added = self._write(found, lease)
        opened = generations[-1]
        result = (*generations[:-1], msgspec.structs.replace(opened, segments=(*opened.segments, *added)))
        num_bytes = sum(each.num_bytes for each in result)
        if num_bytes > limits.max_bytes or sum(len(each.segments) for each in result) > MAX_MANIFEST_SEGMENTS:
            return generations  # segments that no manifest names expire
        return result

    def _write(self, pieces: list[Piece], lease: Lease) -> list[SegmentEntry]:
        batches = split_pieces(pieces, self._settings.limits.segment_tokens, MAX_SEGMENT_PIECES)
        return [self._write_segment(*encode_segment(self._codec, batch), lease) for batch in batches]

    def _pieces_of(self, entry: SegmentEntry) -> list[Piece]:
        columns = self._read_segment(entry)
        return [] if columns is None else columns.pieces()


class CompactorThread:
    """Compacts namespaces periodically in a background thread. No method raises for a fault of the store."""

    def __init__(self, open_namespace: OpenNamespace, settings: CompactorSettings | None = None) -> None:
        self._open_namespace = open_namespace
        self._settings = settings or CompactorSettings()
        self._turns = Turns("cache-compactor")
        self._folding: Folding = WeakSet()

    def compact(
        self, namespace: str, limits: Callable[[bool], FoldLimits] | None = None, may_rest: bool = True
    ) -> Compactor:
        """Compact a namespace from now on. Returns its compactor, for its counters. limits, may_rest: as in
        `Compactor`."""
        store, codec = self._open_namespace(namespace)
        compactor = Compactor(store, codec, self._settings, limits=limits, may_rest=may_rest, folding=self._folding)
        self._turns.add(namespace, compactor.turn)
        return compactor

    def wake(self, namespace: str, compactor: Compactor) -> None:
        """Something is being written to the namespace of a compactor that rests: its next turn comes as usual."""
        compactor.wake()
        self._turns.add(namespace, compactor.turn, self._settings.fold_every_s)

    def forget(self, namespace: str) -> None:
        """Stop compacting it; its lease expires."""
        self._turns.remove(namespace)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`. Its leases expire."""
        return self._turns.close(timeout_s)
