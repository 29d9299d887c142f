"""Streaming detokenisation: a character spread over several tokens is emitted once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_HALF = "\ufffd"  # what decoders write for an invalid or incomplete character
_MAX_OPEN_TOKENS = 3  # a UTF-8 character has at most 4 bytes, so at most 3 tokens can hold its beginning
_MAX_HELD_TOKENS = 32  # beyond this the bytes are taken as invalid
_CONTEXT_TOKENS = 4


class Detokenizer:
    """Decodes tokens together with the previously emitted group, since decoders treat the first token of a text
    differently (SentencePiece drops its space). Cost per token does not grow with the length of the text.

    `context` is the end of the prompt. `decode` leaves out special tokens.
    """

    __slots__ = ("_decode", "_prefix_text", "_read", "_tokens")

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_CONTEXT_TOKENS:])
        self._prefix_text = decode(self._tokens) if self._tokens else ""
        if _HALF in self._prefix_text:
            self._tokens, self._prefix_text = [], ""
        self._read = len(self._tokens)  # tokens[:read] are emitted already and decode to prefix_text

    def push(self, token_ids: Sequence[int]) -> str:
        """Text completed by these tokens; may be empty."""
        self._tokens.extend(token_ids)
        new = len(self._tokens) - self._read
        for open_tokens in range(min(new, _MAX_OPEN_TOKENS + 1)):
            end = len(self._tokens) - open_tokens
            text = self._decode(self._tokens[:end])
            if not text.endswith(_HALF):
                return self._show(text, end)
        if new > _MAX_HELD_TOKENS:
            end = len(self._tokens)
            return self._show(self._decode(self._tokens), end)
        return ""

    def flush(self) -> str:
        """The remaining text at the end, without an incomplete last character."""
        if self._read == len(self._tokens):
            return ""
        text = self._decode(self._tokens)
        return self._show(text, len(self._tokens)).rstrip(_HALF)

    def copy(self) -> Detokenizer:
        twin = Detokenizer(self._decode)
        twin._tokens, twin._prefix_text, twin._read = list(self._tokens), self._prefix_text, self._read
        return twin

    def _show(self, text: str, end: int) -> str:
        """Mark tokens[:end], which decode to `text`, as emitted; return the new part."""
        shown = text[len(self._prefix_text) :]
        # The group just emitted becomes the context of the next, since it begins at a character. If it has no text
        # (special tokens), the old context stays.
        context = self._decode(self._tokens[self._read : end]) if shown else ""
        if context:
            self._tokens = self._tokens[self._read :]
            end -= self._read
            self._prefix_text = context
        else:
            self._prefix_text = text
        self._read = end
        return shown
