"""The newest tokens of a namespace: an automaton that one thread extends while others draft from it, and nobody waits.

There are two automata (compare Ramalhete and Correia, "Left-Right: A Concurrency Control Technique with Wait-Free
Population Oblivious Reads", 2015). Readers use the one in front; the writer brings the other one up to date and puts
it in front. As both take in the same pieces in the same order, a cursor of one is a cursor of the other.
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
    version: int = 0  # batches that it has taken in
    readers: list[None] = field(default_factory=list)  # one entry each


@dataclass(frozen=True, slots=True)
class _Batch:
    """What `SuffixAutomaton.append` takes."""

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]


class _Run(NamedTuple):
    """The tokens of a document that can go on: from where to where, and the end of the text there."""

    begin: int
    end: int
    state: int


_UNKNOWN = _Run(0, -1, 0)


class LiveTail:
    """Documents that grow by turns. `add` is for one thread at a time, the rest for any number of threads."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: token ids are below it; pieces with others are left out."""
        self._vocab_size = vocab_size
        self._front, self._back = Side(), Side()
        self._pending: _Batch | None = None  # what the side in the back lacks
        self._runs: dict[tuple[bytes, int], _Run] = {}

    def __len__(self) -> int:
        """Tokens, with one more for every piece that stands by itself."""
        return len(self._front.automaton)

    @property
    def num_documents(self) -> int:
        return len(self._runs)

    @property
    def memory_bytes(self) -> int:
        return self._front.automaton.memory_bytes + self._back.automaton.memory_bytes

    def add(self, pieces: Sequence[Piece]) -> int:
        """Take in pieces; returns how many tokens of them are new.

        A piece that begins in or right behind what is known of its document goes on with it; another one begins a
        document of its own.
        """
        tokens: list[npt.NDArray[np.int32]] = []
        after: list[int] = []
        runs: dict[tuple[bytes, int], _Run] = {}
        for piece in pieces:
            key = (piece.document_id, piece.kind)
            known = runs.get(key) or self._runs.get(key) or _UNKNOWN
            begin, state, new = piece.offset, 0, piece.token_ids
            if known.begin <= piece.offset <= known.end:
                if piece.end <= known.end:
                    continue
                begin, state, new = known.begin, known.state, new[known.end - piece.offset :]
            if int(new.max()) >= self._vocab_size:
                continue
            if piece.end > known.end:
                runs[key] = _Run(begin, piece.end, ~len(after))
            tokens.append(new)
            after.append(state)
        if not after:
            return 0
        lengths = np.array([len(new) for new in tokens], np.int64)
        batch = _Batch(np.concatenate(tokens), lengths, np.array(after, np.int64))
        places = self._take_in(batch)
        for key, run in runs.items():
            self._runs[key] = run._replace(state=int(places[~run.state]))
        return len(batch.tokens)

    def enter(self) -> Side:
        """The automaton to read, as it will stay until `leave`."""
        while True:
            side = self._front
            side.readers.append(None)
            # The writer looks for readers after it has changed the front: either it sees this one, or this one sees
            # the change.
            if side is self._front:
                return side
            side.readers.pop()

    def leave(self, side: Side) -> None:
        side.readers.pop()

    def _take_in(self, batch: _Batch) -> npt.NDArray[np.int64]:
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
