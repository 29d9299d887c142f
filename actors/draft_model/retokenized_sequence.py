"""One sequence in two vocabularies: the target's tokens, the text they spell, the draft model's tokens of that text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Sequences

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import SequenceStart
from actors.models.token_text import TokenText

_OPEN_TOKENS = 8  # draft tokens at the end that more text may change
_MOST_REDONE = 64  # limit of draft tokens that are encoded again
_CONTEXT_BYTES = 48  # bytes of text before a place that decide how the text after it is encoded
_INSIDE = -1  # the token ends inside a character, or inside text that the tokenizer changes


class RetokenizedSequence:
    """Committed text of the target, as tokens of the draft model.

    `draft_ids` are the tokens of all whole characters. Bytes of an incomplete character at the end are `open_bytes`.
    Invalid bytes are U+FFFD for the draft model.
    """

    def __init__(self, begin: SequenceStart, target: TokenText, draft: TokenText) -> None:
        self.begin = begin
        self._has_begun = False
        self.num_tokens = 0  # target tokens
        self.draft_ids = list(draft.prefix)
        self.num_sent = 0  # the draft engine has draft_ids[:num_sent]
        self._ends = [0] * len(draft.prefix)  # bytes of text up to each draft token's end, or _INSIDE
        self._text = bytearray()  # UTF-8
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._target, self._draft = target, draft

    @property
    def text(self) -> str:
        return self._text.decode()

    @property
    def open_bytes(self) -> bytes:
        return self._decoder.getstate()[0]

    def extend(self, token_ids: Sequences[int]) -> None:
        """Append the target's next tokens, int [n]. Takes O(n), whatever the length of the sequence."""
        spelled = self._spelled(token_ids) if self._has_begun else self._beginning(token_ids)
        self.num_tokens += len(token_ids)
        new = self._decoder.decode(spelled)
        if new:
            self._text += new.encode()
            self._respell(self._first_to_redo())

    def realign(self, guess: DraftTree, most: int) -> DraftTree | None:
        """The draft model's chain as at most `most` tokens of the target after the committed ones.

        None if the guess does not continue the committed bytes, or if no token of the target starts there. A last token
        that more text might lengthen is left out, unless it is the only one. Confidence is the draft model's where
        tokens of both end together, and log-linear in the bytes between.
        """
        spelled, ends, is_open = self._spell(guess.token_ids.tolist())
        skip = len(self.open_bytes)
        if len(spelled) <= skip or not spelled.startswith(self.open_bytes):
            return None
        token_ids = self._target.encode_behind(self._context(len(self._text)), spelled.decode(), skip)
        if token_ids is None:
            return None
        if is_open and len(token_ids) > 1:
            token_ids = token_ids[:-1]
        token_ids = token_ids[:most]
        places = skip + np.cumsum([len(self._target.bytes_of(token)) for token in token_ids])
        logs = np.log(np.maximum(guess.confidence[: len(ends)], 1e-30))
        confidence = np.exp(np.interp(places, [0, *ends], [0.0, *logs]))
        return DraftTree.chain(np.asarray(token_ids), confidence)

    def _spelled(self, token_ids: Sequences[int]) -> bytes:
        return b"".join(map(self._target.bytes_of, token_ids))

    def _beginning(self, token_ids: Sequences[int]) -> bytes:
        """The bytes of a text's first tokens, without what the target's tokenizer adds to every text."""
        prefix = self._target.prefix
        has_prefix = self.num_tokens == 0 and tuple(token_ids[: len(prefix)]) == prefix
        spelled = self._spelled(token_ids[len(prefix) :] if has_prefix else token_ids)
        self._has_begun = bool(spelled)
        return spelled.removeprefix(b" ") if self._target.adds_space else spelled

    def _spell(self, draft_ids: list[int]) -> tuple[bytes, list[int], bool]:
        """Whole characters of the guessed tokens, the end of each token in bytes, and whether more text may follow.

        A special token that the target lacks ends the text.
        """
        pieces: list[bytes] = []
        is_open = True
        for token in draft_ids:
            content = self._draft.special_content(token)
            piece = self._draft.bytes_of(token)
            if not piece or (content is not None and not self._target.has_special(content)):
                is_open = False
                break
            pieces.append(piece)
        spelled = b"".join(pieces)
        try:
            spelled.decode()
        except UnicodeDecodeError as error:
            spelled, is_open = spelled[: error.start], True
        return spelled, np.cumsum([len(piece) for piece in pieces], dtype=np.int64).tolist(), is_open

    def _first_to_redo(self) -> int:
        """The first draft token to encode again: some tokens back, at the start of a word if one is near. New text at
        the end cannot change the tokens before."""
        count = len(self._ends)
        if count <= _OPEN_TOKENS:
            return len(self._draft.prefix)
        least = max(len(self._draft.prefix), count - _MOST_REDONE)
        places = [first for first in range(count - _OPEN_TOKENS, least - 1, -1) if self._ends_at(first) is not None]
        for first in places:
            end = self._ends[first - 1] if first else 0
            if end and self._text[end : end + 1] == b" " and not self._text[end - 1 : end].isspace():
                return first
        return places[0] if places else count

    def _ends_at(self, first: int) -> int | None:
        """Start of token `first` in the text, if a character starts there."""
        end = self._ends[first - 1] if first else 0
        return None if end == _INSIDE else end

    def _respell(self, first: int) -> None:
        """Encode the text again from draft token `first` on."""
        begin = self._ends_at(first) or 0
        text = self._text[begin:].decode()
        token_ids = self._draft.encode_behind(self._context(begin), text) if begin else self._draft.encode_start(text)
        if token_ids is None:
            # The tokenizer changes the text, so the ends of its tokens are unknown.
            token_ids = self._draft.encode(text)
            ends = [_INSIDE] * (len(token_ids) - 1) + [len(self._text)]
        else:
            ends = self._ends_of(token_ids)
        if not token_ids:
            return
        old = self.draft_ids[first : self.num_sent]
        if token_ids[: len(old)] != old:
            self.num_sent = 0
        self.draft_ids[first:] = token_ids
        self._ends[first:] = ends

    def _ends_of(self, token_ids: list[int]) -> list[int]:
        """Ends of the last tokens in the text; _INSIDE for an end inside a character."""
        lengths = np.array([len(self._draft.bytes_of(token)) for token in token_ids], np.int64)
        ends = (len(self._text) - lengths.sum() + lengths.cumsum()).tolist()
        return [end if end > 0 and self._begins_character(end) else _INSIDE for end in ends]

    def _begins_character(self, place: int) -> bool:
        return place == len(self._text) or self._text[place] & 0xC0 != 0x80

    def _context(self, end: int) -> str:
        return self._text[max(0, end - _CONTEXT_BYTES) : end].decode(errors="ignore")
