"""Bytes of tokens and tokens of text, to translate between tokenizers of different vocabularies."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError
from actors.models.loader import load_config, load_tokenizer
from actors.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes one
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class TokenText:
    """The bytes of every token of a tokenizer, and the tokens of a text that follows other text.

    Supports byte-level vocabularies (GPT-2 and most since) and SentencePiece with or without bytes. Special tokens have
    the bytes of their content, so that a marker of both tokenizers is translated.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Raises ModelError, with the model's name, for a tokenizer whose tokens have no bytes of their own."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"model {name!r}: its tokenizer has no fast version, which another vocabulary needs")
        backend.no_truncation()
        backend.no_padding()
        self._backend: Any = backend
        self._pieces = _pieces(backend, name)
        added = backend.get_added_tokens_decoder().items()
        self._special = {index: str(token.content) for index, token in added if token.special}
        self._bytes = {piece[0]: index for index, piece in enumerate(self._pieces) if len(piece) == 1}
        self.prefix = _prefix(backend)
        self.adds_space = b"".join(map(self.bytes_of, self.encode("a"))) == b" a"  # before every text

    def __len__(self) -> int:
        """One more than the highest token id."""
        return len(self._pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for unused ids."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def special_content(self, token_id: int) -> str | None:
        """The text of a special token, None for other tokens."""
        return self._special.get(token_id)

    def has_special(self, content: str) -> bool:
        return content in self._special.values()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that the tokenizer adds to every text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_start(self, text: str) -> list[int] | None:
        """Tokens of a text at the very start; SentencePiece adds a space. None if the tokenizer changes the text."""
        token_ids = self.encode(text)
        spelled = b"".join(map(self.bytes_of, token_ids))
        return token_ids if spelled in (text.encode(), b" " + text.encode()) else None

    def encode_behind(self, before: str, text: str, skip: int = 0) -> list[int] | None:
        """Tokens of text.encode()[skip:] after the text `before`, byte for byte.

        skip: leading bytes of the first character that are already there. None if no encoding has a token that starts
        there, or if the tokenizer changes the text (normalisation).
        """
        wanted = text.encode()[skip:]
        # The line break is for SentencePiece, which adds a space at the start of a text.
        for whole in dict.fromkeys((before + text, text, "\n" + text)):
            token_ids = self._last(self.encode(whole), wanted)
            if token_ids is not None:
                return token_ids
        return self._encode_from_inside(before, text, skip) if skip else None

    def _encode_from_inside(self, before: str, text: str, skip: int) -> list[int] | None:
        """The rest of the first character, one byte a token, then the text after it."""
        rest = [self._bytes.get(byte) for byte in text[0].encode()[skip:]]
        behind = self.encode_behind(before + text[0], text[1:])
        return None if behind is None or None in rest else [byte for byte in rest if byte is not None] + behind

    def _last(self, token_ids: list[int], wanted: bytes) -> list[int] | None:
        """The last tokens with exactly these bytes, or None."""
        first, missing = len(token_ids), len(wanted)
        while missing > 0 and first > 0:
            first -= 1
            missing -= len(self.bytes_of(token_ids[first]))
        spelled = b"".join(map(self.bytes_of, token_ids[first:]))
        return token_ids[first:] if spelled == wanted else None


def has_own_vocabulary(draft: ModelSource, target: ModelSource) -> bool:
    """Whether the draft model's token ids differ from the target's. Raises ModelError.

    The same tokens under the same ids are the same vocabulary. A special token of only one of the two makes no
    difference if the draft model has a row for its id. A draft model without tokenizer files has the target's
    tokenizer.
    """
    if draft.path == target.path or draft.tokenizer_fingerprint() == target.tokenizer_fingerprint():
        return False
    if not any((draft.path / name).is_file() for name in _TOKENIZER_FILES):
        return False
    ours, theirs = load_tokenizer(draft), load_tokenizer(target)
    our_added, their_added = ours.get_added_vocab(), theirs.get_added_vocab()
    our_ids, their_ids = ours.get_vocab(), theirs.get_vocab()
    if _without(our_ids, our_added) != _without(their_ids, their_added):
        return True
    if any(our_ids.get(token, index) != index for token, index in their_added.items()):
        return True
    return max(their_ids.values(), default=0) >= int(load_config(draft).get_text_config().vocab_size)


def _without(vocabulary: dict[str, int], added: dict[str, int]) -> dict[str, int]:
    return {token: index for token, index in vocabulary.items() if token not in added}


def _pieces(backend: Any, name: str) -> list[bytes]:
    """The bytes of each token by id; empty for unused ids."""
    kinds = _decoders(backend)
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "Metaspace" in kinds or _SPACE in kinds:
        to_bytes = _sentence_piece
    else:
        raise ModelError(
            f"model {name!r}: its tokenizer is neither byte-level nor of SentencePiece; "
            "a draft model and a target of different vocabularies need one of the two"
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        pieces[index] = to_bytes(token)
    for index, token in backend.get_added_tokens_decoder().items():
        pieces[index] = str(token.content).encode()
    return pieces


def _decoders(backend: Any) -> set[str]:
    """The types of the tokenizer's decoders, and the patterns that they replace."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    replaced = {part["pattern"].get("String", "") for part in parts if part["type"] == "Replace"}
    return {part["type"] for part in parts} | replaced


def _alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable ones are themselves, others follow in order
    from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _prefix(backend: Any) -> tuple[int, ...]:
    """Tokens that the tokenizer adds before every text."""
    whole, body = backend.encode("a", add_special_tokens=True).ids, backend.encode("a", add_special_tokens=False).ids
    for first in range(len(whole) - len(body) + 1):
        if whole[first : first + len(body)] == body:
            return tuple(whole[:first])
    return ()
