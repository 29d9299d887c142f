"""Binary form of pieces: the body of a stream entry and of a segment.

    pieces u32 | tokens u32 | then per piece, column by column: document id 16 bytes, offset u32, tokens u32,
    Unix time u32, kind u8 | all token ids int32

Little-endian; the two counts determine the length.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_service.errors import FormatError
from cache_service.formats.documents import DOCUMENT_ID_BYTES, MAX_DOCUMENT_TOKENS, Int32Array, Piece

_COUNTS = struct.Struct("<II")
_PIECE_BYTES = DOCUMENT_ID_BYTES + 4 + 4 + 4 + 1
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class PieceColumns:
    """The pieces of a body, column by column. Arrays are read-only."""

    document_ids: bytes  # DOCUMENT_ID_BYTES per piece
    offsets: npt.NDArray[np.int64]  # [pieces]
    lengths: npt.NDArray[np.int64]  # [pieces], each >= 1
    times: npt.NDArray[np.int64]  # [pieces], Unix times
    kinds: npt.NDArray[np.uint8]  # [pieces]
    token_ids: Int32Array  # [sum of lengths], each >= 0, in the order of the pieces

    def pieces(self) -> list[Piece]:
        """token_ids of the pieces are read-only views."""
        ids, tokens, begin = self.document_ids, self.token_ids, 0
        pieces = []
        rows = zip(self.offsets.tolist(), self.lengths.tolist(), self.kinds.tolist(), self.times.tolist(), strict=True)
        for row, (offset, length, kind, time_s) in enumerate(rows):
            document_id = ids[row * DOCUMENT_ID_BYTES : (row + 1) * DOCUMENT_ID_BYTES]
            pieces.append(Piece(document_id, offset, tokens[begin : begin + length], kind=kind, time_s=time_s))
            begin += length
        return pieces


def body_size(num_pieces: int, num_tokens: int) -> int:
    return _COUNTS.size + _PIECE_BYTES * num_pieces + _TOKEN_BYTES * num_tokens


def encode_pieces(pieces: Sequence[Piece]) -> bytes:
    """Raises FormatError for a value that is invalid or does not fit its field."""
    lengths = [len(piece.token_ids) for piece in pieces]
    for piece, length in zip(pieces, lengths, strict=True):
        if len(piece.document_id) != DOCUMENT_ID_BYTES or length == 0 or piece.offset < 0:
            raise FormatError(
                "garbage",
                f"a piece at {piece.offset} has {length} tokens, id {piece.document_id.hex()}; it must be at 0 or "
                f"later, have a token and an id of {DOCUMENT_ID_BYTES} bytes",
            )
        if piece.end > MAX_DOCUMENT_TOKENS or not 0 <= piece.kind < 256 or not 0 <= piece.time_s < 2**32:
            raise FormatError(
                "oversize",
                f"a piece ends at {piece.end}, kind {piece.kind}, time {piece.time_s}; the limits are "
                f"{MAX_DOCUMENT_TOKENS}, 255, {2**32 - 1}",
            )
    columns = [
        _COUNTS.pack(len(pieces), sum(lengths)),
        b"".join(piece.document_id for piece in pieces),
        np.array([piece.offset for piece in pieces], "<u4").tobytes(),
        np.array(lengths, "<u4").tobytes(),
        np.array([piece.time_s for piece in pieces], "<u4").tobytes(),
        bytes(piece.kind for piece in pieces),
        *(np.asarray(piece.token_ids, "<i4").tobytes() for piece in pieces),
    ]
    return b"".join(columns)


def decode_pieces(body: bytes, max_pieces: int, max_tokens: int) -> PieceColumns:
    """Arrays are views of the body where the dtype allows. Raises FormatError."""
    if len(body) < _COUNTS.size:
        raise FormatError("garbage", f"a body has {len(body)} bytes; its counts take {_COUNTS.size}")
    num_pieces, num_tokens = _COUNTS.unpack_from(body)
    if num_pieces > max_pieces or num_tokens > max_tokens:
        raise FormatError(
            "oversize",
            f"a body says {num_pieces} pieces and {num_tokens} tokens; the limits are {max_pieces} and {max_tokens}",
        )
    size = body_size(num_pieces, num_tokens)
    if len(body) != size:
        raise FormatError("garbage", f"a body has {len(body)} bytes; its counts ask for {size}")
    place = _COUNTS.size + DOCUMENT_ID_BYTES * num_pieces
    offsets = np.frombuffer(body, "<u4", num_pieces, place).astype(np.int64)
    lengths = np.frombuffer(body, "<u4", num_pieces, place + 4 * num_pieces).astype(np.int64)
    times = np.frombuffer(body, "<u4", num_pieces, place + 8 * num_pieces).astype(np.int64)
    kinds = np.frombuffer(body, np.uint8, num_pieces, place + 12 * num_pieces)
    tokens = np.frombuffer(body, "<i4", num_tokens, place + 13 * num_pieces)
    if int(lengths.sum()) != num_tokens or (num_pieces and int(lengths.min()) == 0):
        raise FormatError("garbage", f"the pieces of a body do not hold its {num_tokens} tokens, or one is empty")
    if num_tokens and int(tokens.min()) < 0:
        raise FormatError("garbage", f"a body has token id {int(tokens.min())}; ids are >= 0")
    if num_pieces and int((offsets + lengths).max()) > MAX_DOCUMENT_TOKENS:
        raise FormatError("oversize", f"a piece ends past {MAX_DOCUMENT_TOKENS} tokens of its document")
    ids = body[_COUNTS.size : place]
    return PieceColumns(document_ids=ids, offsets=offsets, lengths=lengths, times=times, kinds=kinds, token_ids=tokens)
