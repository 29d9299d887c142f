"""The newest tokens of a namespace: an automaton that one thread extends while others read it without waiting.

There are two copies of the automaton (see Ramalhete and Correia, "Left-Right: A Concurrency Control Technique with
Wait-Free Population Oblivious Reads", 2015). Readers use the front copy; the writer updates the back copy and swaps
them. Both get the same pieces in the same order, so a cursor is valid in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_service.automata.suffix_automaton import SuffixAutomaton
from cache_service.formats.documents import Piece

_READER_PAUSE_S = 0.0002


@dataclass(slots=True, eq=False)
class Side:
    """One of the two automata. Read it between `LiveTail.enter` and `LiveTail.leave`."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    version: int = 0  # number of batches appended
    readers: list[None] = field(default_factory=list)  # one entry each


@dataclass(frozen=True, slots=True)
class _Batch:
    """Arguments of `SuffixAutomaton.append`."""

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]


class _Run(NamedTuple):
    """Consecutive known tokens of a document, to which later pieces are appended."""

    begin: int  # positions in the document
    end: int
    place: int  # end in the automaton; ~row of the piece while its batch is being made


_UNKNOWN = _Run(0, -1, 0)


class LiveTail:
    """Documents that grow in pieces. `add` is for one thread at a time, the rest for any number of threads."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: pieces with token ids from there on are ignored."""
        self._vocab_size = vocab_size
        self._front, self._back = Side(), Side()
        self._pending: _Batch | None = None  # not yet in the back copy
        self._runs: dict[tuple[bytes, int], _Run] = {}

    def __len__(self) -> int:
        """Tokens, and one more for each separate run of tokens."""
        return len(self._front.automaton)

    @property
    def memory_bytes(self) -> int:
        return self._front.automaton.memory_bytes + self._back.automaton.memory_bytes

    def add(self, pieces: Sequence[Piece]) -> int:
        """Add pieces; returns the number of new tokens.

        A piece that begins within or right after the known run of its document extends it; else it begins a new run.
        """
        tokens: list[npt.NDArray[np.int32]] = []
        after: list[int] = []
        runs: dict[tuple[bytes, int], _Run] = {}
        for piece in pieces:
            key = (piece.document_id, piece.kind)
            known = runs.get(key) or self._runs.get(key) or _UNKNOWN
            begin, place, new = piece.offset, 0, piece.token_ids
            if known.begin <= piece.offset <= known.end:
                if piece.end <= known.end:
                    continue
                begin, place, new = known.begin, known.place, new[known.end - piece.offset :]
            if int(new.max()) >= self._vocab_size:
                continue
            if piece.end > known.end:
                runs[key] = _Run(begin, piece.end, ~len(after))
            tokens.append(new)
            after.append(place)
        if not after:
            return 0
        lengths = np.array([len(new) for new in tokens], np.int64)
        batch = _Batch(np.concatenate(tokens), lengths, np.array(after, np.int64))
        places = self._append(batch)
        for key, run in runs.items():
            self._runs[key] = run._replace(place=int(places[~run.place]))
        return len(batch.tokens)

    def enter(self) -> Side:
        """The automaton to read; it does not change until `leave`."""
        while True:
            side = self._front
            side.readers.append(None)
            # The writer looks for readers after it has swapped: either it sees this reader, or this reader sees the
            # swap.
            if side is self._front:
                return side
            side.readers.pop()

    def leave(self, side: Side) -> None:
        side.readers.pop()

    def _append(self, batch: _Batch) -> npt.NDArray[np.int64]:
        back, front = self._back, self._front
        while back.readers:
            time.sleep(_READER_PAUSE_S)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            _append(back, pending)
        places = _append(back, batch)
        self._front, self._back, self._pending = back, front, batch
        return places


def _append(side: Side, batch: _Batch) -> npt.NDArray[np.int64]:
    places = side.automaton.append(batch.tokens, batch.lengths, batch.after)
    side.version += 1
    return places
