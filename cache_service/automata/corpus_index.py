"""A corpus index on disk: a header in JSON and one file of flat arrays that is mapped, not read.

    DIR/header.json   format, model and tokenizer of the token ids, sizes, offset and dtype of every array
    DIR/arrays.bin    the arrays, each at a multiple of 64 bytes, little-endian

Nothing in it is code. Truncated, changed and foreign files are refused before their contents are used.
"""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.errors import CorpusError

FORMAT = "paceline-corpus"
VERSION = 1
HEADER_FILE = "header.json"
ARRAYS_FILE = "arrays.bin"

_MAX_HEADER_BYTES = 1 << 20
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class CorpusHeader:
    """The descriptive part of the header."""

    target: str  # name of the model whose tokenizer made the ids
    tokenizer_fingerprint: str
    vocab_size: int  # every id is below it
    num_documents: int  # each ends with a separator
    num_tokens: int  # without the separators, >= 1


@dataclass(frozen=True, slots=True)
class CorpusIndex:
    """An open index. Its arrays are mapped: only pages that are used take memory."""

    path: Path
    header: CorpusHeader
    automaton: StaticAutomaton


def write_index(directory: Path, header: CorpusHeader, automaton: StaticAutomaton) -> None:
    """Write both files into an existing directory, which the caller renames when it is complete. Raises OSError."""
    _require_little_endian()
    arrays: dict[str, dict[str, Any]] = {}
    checksum = 0
    with (directory / ARRAYS_FILE).open("wb") as file:
        for name, array in automaton.arrays.items():
            padding = b"\0" * (-file.tell() % _ALIGNMENT)
            file.write(padding)
            checksum = zlib.crc32(padding, checksum)
            arrays[name] = {"dtype": "int32", "shape": list(array.shape), "offset": file.tell()}
            file.write(array.data)
            checksum = zlib.crc32(array.data, checksum)
        size = file.tell()
    text = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(header),
        "arrays": arrays,
        "size_bytes": size,
        "crc32": checksum,
    }
    (directory / HEADER_FILE).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def open_index(directory: Path, tokenizer_fingerprint: str | None = None, *, verify: bool = True) -> CorpusIndex:
    """Map an index. Raises CorpusError, one line, for anything that `write_index` did not write.

    tokenizer_fingerprint: the tokenizer that token ids must come from; None: any. verify reads the whole file once,
    about a second a gigabyte; without it a damaged file may crash the process.
    """
    _require_little_endian()
    data = _read_header(directory)
    path = directory / HEADER_FILE
    header = CorpusHeader(
        target=_text(path, data, "target"),
        tokenizer_fingerprint=_text(path, data, "tokenizer_fingerprint"),
        vocab_size=_number(path, data, "vocab_size"),
        num_documents=_number(path, data, "num_documents"),
        num_tokens=_number(path, data, "num_tokens"),
    )
    if tokenizer_fingerprint is not None and header.tokenizer_fingerprint != tokenizer_fingerprint:
        raise CorpusError(
            f"{directory}: made with the tokenizer of {header.target!r} ({header.tokenizer_fingerprint}), not the "
            f"target's ({tokenizer_fingerprint}); make one with `paceline corpus build --target`"
        )
    arrays = _map_arrays(directory, data)
    if verify:
        found = _checksum(arrays["file"])
        if found != data.get("crc32"):
            raise CorpusError(f"{directory / ARRAYS_FILE}: the checksum is {found}, the header's {data.get('crc32')!r}")
    del arrays["file"]
    try:
        automaton = StaticAutomaton(arrays)
    except ValueError as error:
        raise CorpusError(f"{path}: {error}") from None
    if verify:
        fault = automaton.check_integrity()
        if fault is not None:
            raise CorpusError(f"{directory / ARRAYS_FILE}: {fault}")
    if len(arrays["root"]) > header.vocab_size or int(arrays["text"].max()) >= header.vocab_size:
        raise CorpusError(f"{path}: vocab_size is {header.vocab_size}; the text has token {int(arrays['text'].max())}")
    if header.num_tokens < 1 or header.num_documents + header.num_tokens != len(automaton):
        raise CorpusError(
            f"{path}: num_documents is {header.num_documents} and num_tokens {header.num_tokens}; with a separator "
            f"after each document there must be {len(automaton)} in all, and at least one token"
        )
    return CorpusIndex(directory, header, automaton)


def holds_index_alone(directory: Path) -> bool:
    """Whether a directory is empty or holds only an index, of any version, whole or damaged. Raises OSError for a
    directory that cannot be read."""
    if not directory.is_dir():
        return False
    names = {entry.name for entry in directory.iterdir()}
    if not names:
        return True
    try:
        _read_any_header(directory)
    except CorpusError:
        return False
    return names <= {HEADER_FILE, ARRAYS_FILE} and not (directory / ARRAYS_FILE).is_dir()


def _read_header(directory: Path) -> dict[str, Any]:
    data = _read_any_header(directory)
    if data.get("version") != VERSION:
        path = directory / HEADER_FILE
        raise CorpusError(f"{path}: version is {data.get('version')!r}; this Paceline reads version {VERSION}")
    return data


def _read_any_header(directory: Path) -> dict[str, Any]:
    """The header of an index of any version."""
    path = directory / HEADER_FILE
    if not path.is_file():
        reason = (
            f"holds no {HEADER_FILE}; it is no corpus index" if directory.is_dir() else "there is no such directory"
        )
        raise CorpusError(f"{directory}: {reason}")
    try:
        if path.stat().st_size > _MAX_HEADER_BYTES:
            raise CorpusError(f"{path}: larger than {_MAX_HEADER_BYTES} bytes; it is no header of a corpus index")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CorpusError(f"{path}: not the header of a corpus index")
    return data


def _map_arrays(directory: Path, data: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays that the header names, and the whole file as bytes under the name "file"."""
    path, header_path = directory / ARRAYS_FILE, directory / HEADER_FILE
    size = _number(header_path, data, "size_bytes")
    try:
        if path.stat().st_size != size:
            raise CorpusError(f"{path}: is {path.stat().st_size} bytes long; the header says {size}")
        file = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read: {error}") from None
    entries = data.get("arrays")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CorpusError(f"{header_path}: arrays is no table of arrays")
    arrays = {"file": file}
    for name, entry in entries.items():
        shape, offset = entry.get("shape"), entry.get("offset")
        valid = (
            name != "file"
            and entry.get("dtype") == "int32"
            and isinstance(shape, list)
            and 1 <= len(shape) <= 2
            and all(_is_count(count) for count in shape)
            and _is_count(offset)
            and offset % 4 == 0
        )
        # Python's own integers: a product of absurd sizes is large, not negative.
        if not valid or offset + 4 * shape[0] * (shape[1] if len(shape) == 2 else 1) > size:
            raise CorpusError(f"{header_path}: array {name!r} has no valid dtype, shape or offset")
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        arrays[name] = file[offset : offset + 4 * count].view(np.int32).reshape(shape)
    return arrays


def _checksum(data: npt.NDArray[np.uint8]) -> int:
    checksum = 0
    for begin in range(0, len(data), _CHUNK_BYTES):
        checksum = zlib.crc32(data[begin : begin + _CHUNK_BYTES].data, checksum)
    return checksum


def _text(path: Path, data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise CorpusError(f"{path}: {key} is {value!r}; it must be a text")
    return value


def _number(path: Path, data: dict[str, Any], key: str) -> int:
    value = data.get(key)
    if not _is_count(value):
        raise CorpusError(f"{path}: {key} is {value!r}; it must be a whole number from 0 to 2**53")
    return int(value)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise CorpusError("corpus indexes are little-endian, and this machine is not")
