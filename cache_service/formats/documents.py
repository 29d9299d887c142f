"""Pieces of documents, and how overlapping or repeated pieces are merged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    offset: int  # position of the first token in the document
    token_ids: Int32Array  # [n >= 1], each >= 0
    kind: int = RecordKind.OUTPUT
    time_s: int = 0  # Unix time

    @property
    def end(self) -> int:
        return self.offset + len(self.token_ids)


def document_id_of(name: str) -> bytes:
    """Document id of a named request or file: a 128-bit hash of the name."""
    return hashlib.blake2b(name.encode(), digest_size=DOCUMENT_ID_BYTES).digest()


def content_id(token_ids: Int32Array) -> bytes:
    """Document id of a document without a name: a hash of its tokens."""
    tokens = np.ascontiguousarray(token_ids, "<i4").tobytes()
    return hashlib.blake2b(tokens, digest_size=DOCUMENT_ID_BYTES, person=b"paceline import").digest()


def assemble(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge overlapping and adjacent pieces of each document, so that each token occurs once.

    Where pieces disagree about a token, the one that begins first wins, then the longer, then the earlier in the input.
    A merged piece has the time of its newest part. The result is sorted by time, document id, kind and offset.
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
    return replace(first, token_ids=joined, time_s=time_s)


def split_pieces(pieces: Sequence[Piece], max_tokens: int, max_pieces: int) -> Iterator[list[Piece]]:
    """Batches of at most `max_tokens` tokens and `max_pieces` pieces, in order; longer pieces are split."""
    batch: list[Piece] = []
    room = max_tokens
    for piece in pieces:
        begin = 0
        while begin < len(piece.token_ids):
            if room == 0 or len(batch) == max_pieces:
                yield batch
                batch, room = [], max_tokens
            tokens = piece.token_ids[begin : begin + room]
            batch.append(replace(piece, offset=piece.offset + begin, token_ids=tokens))
            begin += len(tokens)
            room -= len(tokens)
    if batch:
        yield batch
