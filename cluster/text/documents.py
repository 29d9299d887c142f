"""Reads documents from text files and JSON lines and tokenises them piece by piece."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from actors.models.catalog import Progress, silent
from cluster.errors import ConfigError
from cluster.validation import is_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT_KEYS = ("text", "prompt", "messages", "prompt_token_ids", "token_ids")
PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")

_ROW_SUFFIXES = (".jsonl", ".ndjson")
_PIECE_CHARS = 1 << 16  # a piece has one to two times this, cut after a line if possible
_BATCH_PIECES = 64
_SHOWN_CHARS = 60  # of a wrong value
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a document: text, or tokens if the file has them."""

    content: str | Tokens
    ends_document: bool


def read_documents(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, vocab_size: int, progress: Progress = silent
) -> Iterator[tuple[Tokens, bool]]:
    """Tokenised pieces of documents: one document a row of JSON lines, or one a file. Raises ConfigError."""
    sizes = [file_size(path) for path in files]
    total = sum(sizes)

    def pieces() -> Iterator[Piece]:
        for index, path in enumerate(files):
            before = sum(sizes[:index])

            def show(read: int, before: int = before) -> None:
                progress("indexing", before + read, total)

            if path.suffix in _ROW_SUFFIXES:
                for where, key, value in read_rows(path, DOCUMENT_KEYS, show):
                    yield from _pieces_of_row(where, (key, value), tokenizer, vocab_size)
            else:
                yield from _pieces_of_text(path, show)
        progress("indexing", total, total)

    yield from _tokenised(pieces(), tokenizer)


def tokenise_rows(
    lines: Iterable[bytes], where: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Iterator[tuple[Tokens, bool]]:
    """Tokenised pieces of documents in JSON lines, one a row. Raises ConfigError, which names `where` and the line."""

    def pieces() -> Iterator[Piece]:
        for number, line in enumerate(lines, 1):
            if line.strip():
                key, value = _read_row(f"{where}:{number}", line, DOCUMENT_KEYS)
                yield from _pieces_of_row(f"{where}:{number}", (key, value), tokenizer, vocab_size)

    yield from _tokenised(pieces(), tokenizer)


def tokenise_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tokens, bool]]:
    """Tokenised pieces of one document."""
    yield from _tokenised(_pieces_of(io.StringIO(text)), tokenizer)


def read_rows(
    path: Path, keys: Sequence[str], on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[str, str, Any]]:
    """Rows of a file of JSON lines as (file:line, key, value), each with one of the keys. Raises ConfigError."""
    read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                read += len(line)
                if line.strip():
                    yield (f"{path}:{number}", *_read_row(f"{path}:{number}", line, keys))
                if on_bytes is not None:
                    on_bytes(read)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_row(where: str, line: bytes, keys: Sequence[str]) -> tuple[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):
            row = _without_lone_surrogates(row)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8 too
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    try:
        return content_of(row, keys)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def content_of(row: object, keys: Sequence[str]) -> tuple[str, Any]:
    """The key of a decoded row and its value, checked. Raises ValueError with a message for the user."""
    found = [key for key in keys if isinstance(row, dict) and key in row]
    if len(found) != 1 or not isinstance(row, dict):
        raise ValueError(f"a row needs exactly one of {', '.join(keys)}")
    key, value = found[0], row[found[0]]
    if key in ("text", "prompt"):
        valid, kind = is_text(value), "a text"
    elif key == "messages":
        valid, kind = isinstance(value, list) and all(map(_is_message, value)), "messages with role and content"
    else:
        valid, kind = isinstance(value, list) and all(type(token) is int for token in value), "integers"
    if not (valid and value):
        raise ValueError(f"{key} is {json.dumps(value)[:_SHOWN_CHARS]}; it must hold {kind}, at least one")
    return key, value


def _without_lone_surrogates(value: Any) -> Any:
    """Replace lone surrogates, left where text was cut, by U+FFFD: tokenizers reject them, and one such row should not
    fail a whole corpus."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(key): _without_lone_surrogates(item) for key, item in value.items()}
    return value


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        is_text(message.get(key), may_be_empty=True) for key in ("role", "content")
    )


def _pieces_of_row(
    where: str, row: tuple[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Iterator[Piece]:
    key, value = row
    if key in ("text", "prompt"):
        yield from _pieces_of(io.StringIO(value))
        return
    if key == "messages":
        try:
            value = tokenizer.apply_chat_template(value, tokenize=True, return_dict=False)
        except Exception as error:  # the template is the model's own program
            reason = " ".join(str(error).split())
            raise ConfigError(f"{where}: the chat template of the target fails: {reason}") from None
    for token in value:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{where}: {key} holds {token}; token ids are from 0 to {vocab_size - 1}")
    yield Piece(np.array(value, np.int32), True)


def _pieces_of_text(path: Path, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
    read = 0
    try:
        with path.open(encoding="utf-8") as file:
            for piece in _pieces_of(file):
                yield piece
                read += len(str(piece.content).encode())  # a pipe does not tell where it is
                on_bytes(read)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}") from None


def _pieces_of(file: TextIO) -> Iterator[Piece]:
    """One document."""
    text = _next_text(file)
    while text:
        following = _next_text(file)
        yield Piece(text, not following)
        text = following


def _next_text(file: TextIO) -> str:
    return file.read(_PIECE_CHARS) + file.readline(_PIECE_CHARS)


def _tokenised(pieces: Iterable[Piece], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tokens, bool]]:
    """Tokenise in batches, since tokenizers use all cores on a batch."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _BATCH_PIECES:
            yield from _tokenised_batch(batch, tokenizer)
            batch = []
    yield from _tokenised_batch(batch, tokenizer)


def _tokenised_batch(batch: list[Piece], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tokens, bool]]:
    texts = [piece.content for piece in batch if isinstance(piece.content, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
    for piece in batch:
        content = piece.content
        yield np.array(next(encoded), np.int32) if isinstance(content, str) else content, piece.ends_document


def file_size(path: Path) -> int:
    """Raises ConfigError for what is no file."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory; give files")
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
