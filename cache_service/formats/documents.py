"""Pieces of documents, and how pieces that overlap, repeat or come in any order make documents again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

DOCUMENT_ID_BYTES = 16
MAX_DOCUMENT_TOKENS = 2**31 - 1


class RecordKind(IntEnum):
    """Where a piece's tokens come from."""

    OUTPUT = 0  # verified tokens of an answer
    PROMPT = 1
    IMPORTED = 2


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one document."""

    document_id: bytes  # DOCUMENT_ID_BYTES of them
    offset: int  # place of the first token in its document
    token_ids: Int32Array  # shape [n >= 1], each >= 0
    kind: int = RecordKind.OUTPUT
    time_s: int = 0  # Unix time

    @property
    def end(self) -> int:
        return self.offset + len(self.token_ids)


def document_id_of(name: str) -> bytes:
    """The document id of a request or file that has a name: a 128-bit hash of it."""
    return hashlib.blake2b(name.encode(), digest_size=DOCUMENT_ID_BYTES).digest()


def assemble(pieces: Iterable[Piece]) -> list[Piece]:
    """The same tokens in as few pieces as possible, each token once, whatever the order and repetition of the input.

    Where pieces disagree about a token, the one that begins first, then the longer, then the earlier of the input wins.
    A result's time is its newest part's; results are in order of time, document id, kind and offset.
    """
    documents: dict[tuple[bytes, int], list[Piece]] = {}
    for piece in pieces:
        documents.setdefault((piece.document_id, piece.kind), []).append(piece)
    runs = [run for parts in documents.values() for run in _join(parts)]
    runs.sort(key=lambda run: (run.time_s, run.document_id, run.kind, run.offset))
    return runs


def _join(parts: list[Piece]) -> list[Piece]:
    if len(parts) == 1:
        return parts
    parts.sort(key=lambda part: (part.offset, -part.end))
    runs: list[Piece] = []
    first, tokens, end, time_s = parts[0], [parts[0].token_ids], parts[0].end, parts[0].time_s
    for part in parts[1:]:
        if part.offset > end:
            runs.append(_run(first, tokens, time_s))
            first, tokens, end, time_s = part, [part.token_ids], part.end, part.time_s
            continue
        time_s = max(time_s, part.time_s)
        if part.end > end:
            tokens.append(part.token_ids[end - part.offset :])
            end = part.end
    runs.append(_run(first, tokens, time_s))
    return runs


def _run(first: Piece, tokens: list[Int32Array], time_s: int) -> Piece:
    joined = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
    return Piece(first.document_id, first.offset, joined, kind=first.kind, time_s=time_s)


def split_pieces(pieces: Sequence[Piece], max_tokens: int, max_pieces: int) -> Iterator[list[Piece]]:
    """Batches of at most `max_tokens` tokens and `max_pieces` pieces, in order; a longer piece is cut."""
    batch: list[Piece] = []
    room = max_tokens
    for piece in pieces:
        begin = 0
        while begin < len(piece.token_ids):
            if room == 0 or len(batch) == max_pieces:
                yield batch
                batch, room = [], max_tokens
            tokens = piece.token_ids[begin : begin + room]
            batch.append(Piece(piece.document_id, piece.offset + begin, tokens, kind=piece.kind, time_s=piece.time_s))
            begin += len(tokens)
            room -= len(tokens)
    if batch:
        yield batch
