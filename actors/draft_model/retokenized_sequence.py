"""One sequence in two vocabularies: the target's tokens, the text they spell, the draft model's tokens of that text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Sequences

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import SequenceStart
from actors.models.token_text import TokenText

# Draft tokens at the end that more text may still change, and how far behind them a word is looked for to begin at.
_OPEN_TOKENS = 8
_MOST_REDONE = 64
# Bytes of text before a place that tell how what follows is spelled: a long word and the one before it.
_CONTEXT_BYTES = 48
_INSIDE = -1  # the token ends inside a character, or inside text that the tokenizer changes


class RetokenizedSequence:
    """What the target has committed, and what the draft model is to be told of it.

    `draft_ids` spell the committed text as far as it is whole characters; bytes of a character that has only begun are
    `open_bytes` until it is whole. Bytes that are no character at all are U+FFFD to the draft model.
    """

    def __init__(self, begin: SequenceStart, target: TokenText, draft: TokenText) -> None:
        self.begin = begin
        self._has_begun = False
        self.num_tokens = 0  # target tokens
        self.draft_ids = list(draft.prefix)
        self.num_sent = 0  # draft_ids[:num_sent] are what the draft engine knows; 0: nothing
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
        """Take in the target's next tokens, int [n]. Work grows with n, not with the sequence."""
        spelled = self._spelled(token_ids) if self._has_begun else self._beginning(token_ids)
        self.num_tokens += len(token_ids)
        new = self._decoder.decode(spelled)
        if new:
            self._text += new.encode()
            self._respell(self._first_to_redo())

    def realign(self, guess: DraftTree, most: int) -> DraftTree | None:
        """The draft model's chain, as at most `most` tokens of the target behind the committed ones.

        None where the guess does not go on from the committed bytes, or the target's tokenizer has no token begin
        there. A last token that more text might make longer is left out, unless it is the only one. Confidence is the
        draft model's where tokens end together, and falls evenly, in logarithms, along the bytes between.
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

    def check_integrity(self) -> str | None:
        """Text of the first contradiction, or None."""
        if len(self._ends) != len(self.draft_ids) or self.num_sent > len(self.draft_ids):
            return f"{len(self.draft_ids)} draft tokens have {len(self._ends)} ends, and {self.num_sent} were sent"
        known = [end for end in self._ends if end != _INSIDE]
        if known != sorted(known) or (known and known[-1] > len(self._text)):
            return f"draft tokens end at {known[-3:]} of {len(self._text)} bytes"
        return None

    def _spelled(self, token_ids: Sequences[int]) -> bytes:
        return b"".join(map(self._target.bytes_of, token_ids))

    def _beginning(self, token_ids: Sequences[int]) -> bytes:
        """What a text's first tokens spell without what the target's tokenizer adds: the draft model's adds its own.
        Tokens that spell nothing may come before."""
        prefix = self._target.prefix
        has_prefix = self.num_tokens == 0 and tuple(token_ids[: len(prefix)]) == prefix
        spelled = self._spelled(token_ids[len(prefix) :] if has_prefix else token_ids)
        self._has_begun = bool(spelled)
        return spelled.removeprefix(b" ") if self._target.adds_space else spelled

    def _spell(self, draft_ids: list[int]) -> tuple[bytes, list[int], bool]:
        """Whole characters that the guessed tokens spell, each token's end in bytes, and whether more may follow.

        A special token that the target has no equal of ends the text: there is nothing to write for it.
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
        """The first draft token to spell anew. What is far enough back, and before the beginning of a word if one is
        near, stays as it is: new text at the end cannot change it."""
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
        """Where the text of token `first` begins, if a character begins there."""
        end = self._ends[first - 1] if first else 0
        return None if end == _INSIDE else end

    def _respell(self, first: int) -> None:
        """Replace the draft tokens from `first` on by those of the text from there on."""
        begin = self._ends_at(first) or 0
        text = self._text[begin:].decode()
        token_ids = self._draft.encode_behind(self._context(begin), text) if begin else self._draft.encode_start(text)
        if token_ids is None:
            # The tokenizer changes the text, so which token stands for what is not known inside of it.
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
        """Ends in the text of tokens that spell its end; inside a character, _INSIDE."""
        lengths = np.array([len(self._draft.bytes_of(token)) for token in token_ids], np.int64)
        ends = (len(self._text) - lengths.sum() + lengths.cumsum()).tolist()
        return [end if end > 0 and self._begins_character(end) else _INSIDE for end in ends]

    def _begins_character(self, place: int) -> bool:
        return place == len(self._text) or self._text[place] & 0xC0 != 0x80

    def _context(self, end: int) -> str:
        return self._text[max(0, end - _CONTEXT_BYTES) : end].decode(errors="ignore")
