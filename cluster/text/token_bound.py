"""A lower bound of the number of tokens of a text, from its length alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models


@dataclass(frozen=True, slots=True)
class TokenBound:
    """longest: no token stands for more than so many bytes, or characters if `counts_chars`. dropped: bytes that the
    vocabulary lacks."""

    longest: int
    counts_chars: bool
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        if self.counts_chars:
            size = len(text)
        else:
            size = len(text.encode(errors="replace").translate(None, self.dropped))
        return -(-size // self.longest)


def token_bound(tokenizer: Tokenizer | None) -> TokenBound | None:
    """None: the length of a token's text has no known bound. Tokenizers whose tokens are bytes, or that
    fall back to bytes, have a bound, unless they change or drop text."""
    if tokenizer is None or not isinstance(tokenizer.model, models.BPE):
        return None
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    if any(token.lstrip or token.rstrip for token in added.values()):  # they take in any number of spaces
        return None
    vocab = tokenizer.get_vocab()
    longest = max(map(len, vocab))
    normalizer, splits = _kinds(tokenizer.normalizer), _kinds(tokenizer.pre_tokenizer)
    if "Removed" in splits.values():
        return None
    if not normalizer and splits.keys() <= {"ByteLevel", "Split", "Digits"} and "ByteLevel" in splits:
        # A character of the vocabulary is a byte; added tokens are written as they are.
        longest = max(len(token.encode()) if token in added else len(token) for token in vocab)
        return TokenBound(longest, False, bytes(byte for byte, char in _byte_chars().items() if char not in vocab))
    has_bytes = tokenizer.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if has_bytes and normalizer.keys() <= {"Prepend", "Replace"} and splits.keys() <= {"Metaspace", "Split"}:
        return TokenBound(longest, counts_chars=True)
    return None


def _byte_chars() -> dict[int, str]:
    """How byte-level tokenizers write bytes: those that Latin-1 prints as they are, others from U+0100 on, in order."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    return {byte: chr(byte) for byte in printed} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _kinds(part: Any) -> dict[str, str]:
    """Kind -> what it does to what it finds, of a normalizer or pre-tokenizer and its parts."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    parts = state.get("normalizers") or state.get("pretokenizers") or [state]
    found: dict[str, str] = {}
    for one in parts:
        shrinks = one["type"] == "Replace" and one.get("pattern") != {"String": " "}
        found["Shrinks" if shrinks else one["type"]] = str(one.get("behavior", ""))
    return found
