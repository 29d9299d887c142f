"""Builds corpus indexes: tokenised documents in one static automaton."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from actors.models.catalog import Progress, silent
from actors.models.loader import ModelInfo
from actors.models.staging import directory_lock, staged_directory
from cache_service.automata.corpus_index import CorpusHeader, CorpusIndex, holds_index_alone, open_index, write_index
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import SEPARATOR, SuffixAutomaton
from cluster.errors import ConfigError
from cluster.text.documents import Tokens


def build_corpus(
    documents: Iterable[tuple[Tokens, bool]], info: ModelInfo, out: Path, progress: Progress = silent
) -> CorpusIndex:
    """Index pieces of documents, (token ids, whether the document ends), and write the index to `out` atomically.

    The last piece always ends its document. An existing index is replaced, also behind a symbolic link. Raises
    ConfigError if the corpus cannot be indexed or `out` holds anything else, ModelError if `out` cannot be written.
    """
    out = _resolved(out)
    _require_index_or_nothing(out)
    with directory_lock(out):
        automaton, num_documents = SuffixAutomaton(), 0
        separator = np.array([SEPARATOR], np.int32)
        ends_document = True
        try:
            for token_ids, ends_document in documents:
                automaton.extend(token_ids)
                if ends_document:
                    automaton.extend(separator)
                    num_documents += 1
            if not ends_document:
                automaton.extend(separator)
                num_documents += 1
            num_tokens = len(automaton) - num_documents
            if num_tokens == 0:
                raise ConfigError("the corpus has no tokens; give files with text in them")
            progress("counting occurrences", 0, 1)
            static = StaticAutomaton.freeze(automaton)
            progress("counting occurrences", 1, 1)
        except ValueError as error:  # more tokens than an automaton can hold
            raise ConfigError(f"the corpus cannot be indexed: {error}") from None
        header = CorpusHeader(
            target=info.name,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            vocab_size=info.vocab_size,
            num_documents=num_documents,
            num_tokens=num_tokens,
        )
        with staged_directory(out) as staging:
            progress("writing", 0, 1)
            write_index(staging, header, static)
            progress("writing", 1, 1)
            _require_index_or_nothing(out)  # the build may have taken hours
    return open_index(out, info.tokenizer_fingerprint)


def _resolved(out: Path) -> Path:
    """The path with links resolved. Raises ConfigError."""
    try:
        return out.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # the last two: a loop of links, a null character
        raise ConfigError(f"--out {str(out)!r}: is no path: {error}") from None


def _require_index_or_nothing(out: Path) -> None:
    """Raises ConfigError if `out` exists and is not an index: writing replaces the directory."""
    try:
        is_other = out.exists() and not holds_index_alone(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be read: {error.strerror or error}") from None
    if is_other:
        raise ConfigError(f"--out {out}: exists and is no corpus index; choose another directory")
