"""Reads imports for the shared cache (text, JSON lines, exports) as documents in the target's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actors.models.catalog import Progress, silent
from actors.models.loader import ModelInfo, load_tokenizer, read_model_info
from actors.models.source import ModelSource
from cache_service.admin.importer import MAX_DOCUMENT_TOKENS
from cache_service.errors import FormatError
from cache_service.formats.documents import Piece, RecordKind, content_id
from cache_service.formats.export_format import MAX_LINE_BYTES, decode_header, decode_piece, is_export
from cluster.errors import ConfigError
from cluster.text.documents import Tokens, file_size, read_documents, tokenise_rows, tokenise_text


class ImportModel:
    """The model whose tokens an import uses. Loads the tokenizer on first use."""

    def __init__(self, source: ModelSource) -> None:
        """Raises ModelError."""
        self._source = source
        self.info: ModelInfo = read_model_info(source)

    @cached_property
    def tokenizer(self):  # type: ignore[no-untyped-def]
        return load_tokenizer(self._source)


class DocumentReader:
    """Yields pieces for `CacheAdministration.import_documents`. Methods raise ConfigError naming file and line."""

    def __init__(self, model: ImportModel) -> None:
        self._model = model

    def files(self, files: Sequence[Path], progress: Progress = silent) -> Iterator[Piece]:
        """Exports, recognised by their first line; JSON lines, one document a row; other files as one text each."""
        sizes = [file_size(path) for path in files]
        before, total = 0, sum(sizes)
        for path, size in zip(files, sizes, strict=True):

            def show(stage: str, done: int, _: int, before: int = before) -> None:
                progress("importing", before + done, total)

            if _begins_as_export(path):
                yield from self._export(path, show)
            else:
                yield from self._documents(
                    read_documents([path], self._model.tokenizer, self._model.info.vocab_size, show)
                )
            before += size
        progress("importing", total, total)

    def rows(self, lines: Iterable[bytes], where: str) -> Iterator[Piece]:
        """JSON lines, of documents or of an export."""
        rows = iter(lines)
        first = next(rows, b"")
        if is_export(first):
            yield from self._pieces(chain([first], rows), where)
        else:
            vocab_size = self._model.info.vocab_size
            yield from self._documents(tokenise_rows(chain([first], rows), where, self._model.tokenizer, vocab_size))

    def text(self, text: str) -> Iterator[Piece]:
        """One document."""
        yield from self._documents(tokenise_text(text, self._model.tokenizer))

    def token_ids(self, token_ids: npt.NDArray[np.int64]) -> Iterator[Piece]:
        """One document, shape [n]."""
        vocab_size = self._model.info.vocab_size
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise ConfigError(f"token_ids holds an id outside 0 to {vocab_size - 1}")
        yield from self._documents([(token_ids.astype(np.int32), True)])

    def _documents(self, parts: Iterable[tuple[Tokens, bool]]) -> Iterator[Piece]:
        for token_ids in whole_documents(parts, MAX_DOCUMENT_TOKENS):
            now_s = int(time.time())
            yield Piece(content_id(token_ids), 0, token_ids, kind=RecordKind.IMPORTED, time_s=now_s)

    def _export(self, path: Path, progress: Progress) -> Iterator[Piece]:
        read = 0

        def lines() -> Iterator[bytes]:
            nonlocal read
            with path.open("rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    read += len(line)
                    progress("importing", read, 0)
                    yield line

        try:
            yield from self._pieces(lines(), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None

    def _pieces(self, lines: Iterator[bytes], where: str) -> Iterator[Piece]:
        """Pieces of an export."""
        number, info = 1, self._model.info
        try:
            header = decode_header(next(lines))
            if header.tokenizer != info.tokenizer_fingerprint:
                raise ConfigError(
                    f"{where}: the export is in tokens of tokenizer {header.tokenizer}; model {info.name!r} has "
                    f"{info.tokenizer_fingerprint}: import it for its own model and use `paceline cache migrate`"
                )
            for number, line in enumerate(lines, 2):  # noqa: B007 (used in the error)
                if not line.strip():
                    continue
                piece = decode_piece(line)
                if int(piece.token_ids.max()) >= info.vocab_size:
                    limit = f"token ids are from 0 to {info.vocab_size - 1}"
                    raise FormatError("garbage", f"token_ids holds {int(piece.token_ids.max())}; {limit}")
                yield piece
        except FormatError as error:
            raise ConfigError(f"{where}:{number}: {error}") from None


def tokenizer_of(fingerprint: str) -> str:
    """The tokenizer's part of a model's fingerprint, as `ModelInfo.fingerprint` joins them."""
    return fingerprint.rpartition("-")[2]


def whole_documents(parts: Iterable[tuple[Tokens, bool]], max_tokens: int) -> Iterator[Tokens]:
    """Join pieces, (token ids, whether the document ends), into documents, cut at `max_tokens`."""
    held: list[Tokens] = []
    num_held = 0
    for token_ids, ends_document in parts:
        while num_held + len(token_ids) > max_tokens:
            room = max_tokens - num_held
            yield np.concatenate([*held, token_ids[:room]])
            held, num_held, token_ids = [], 0, token_ids[room:]
        held.append(token_ids)
        num_held += len(token_ids)
        if ends_document:
            if num_held:
                yield np.concatenate(held)
            held, num_held = [], 0
    if num_held:
        yield np.concatenate(held)


def _begins_as_export(path: Path) -> bool:
    if not path.is_file():  # a pipe cannot be read twice
        return False
    try:
        with path.open("rb") as file:
            return is_export(file.readline(4096))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
