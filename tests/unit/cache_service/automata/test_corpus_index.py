"""Corpus indexes on disk: what was written is read, mapped and not loaded, and nothing else is ever followed."""

import json
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.automata.corpus_index import ARRAYS_FILE, HEADER_FILE, CorpusHeader, open_index, write_index
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import Cursor, SuffixAutomaton
from cache_service.errors import CorpusError
from paceline_testing.automata import continuations, occurrences


def header_of(tokens: np.ndarray) -> CorpusHeader:
    num_documents = int((tokens < 0).sum())
    return CorpusHeader("smollm2", "0123456789abcdef", 200_064, num_documents, len(tokens) - num_documents)


def write(directory: Path, tokens: np.ndarray) -> StaticAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens.astype(np.int32))
    static = StaticAutomaton.freeze(automaton)
    directory.mkdir()
    write_index(directory, header_of(tokens), static)
    return static


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus") / "index"
    write(directory, np.array([70_000, 2, 3, 70_000, 2, -1, 200_018, 5, 3, 70_000, 2, -1]))
    return directory


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "copy"
    directory.mkdir()
    for name in (HEADER_FILE, ARRAYS_FILE):
        (directory / name).write_bytes((index_dir / name).read_bytes())
    return directory


def fault(directory: Path) -> str:
    with pytest.raises(CorpusError) as caught:
        open_index(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert str(directory) in line
    return line


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, 5000)
    static = write(tmp_path / "index", tokens)
    index = open_index(tmp_path / "index", "0123456789abcdef")
    assert index.header == header_of(tokens)
    assert {name: array.tolist() for name, array in index.automaton.arrays.items()} == {
        name: array.tolist() for name, array in static.arrays.items()
    }


def test_ids_beyond_sixteen_bits_survive(index_dir: Path) -> None:
    automaton = open_index(index_dir).automaton
    cursor = automaton.advance(Cursor(), np.array([3, 70_000, 2], np.int32))
    assert (cursor.length, occurrences(automaton, cursor)) == (3, 2)
    assert continuations(automaton, automaton.advance(Cursor(), np.array([200_018], np.int32)))[0] == [5]


def test_arrays_are_mapped_and_cannot_be_written(index_dir: Path) -> None:
    for array in open_index(index_dir).automaton.arrays.values():
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_index_that_is_replaced_while_open_stays_what_it_was(copy: Path) -> None:
    automaton = open_index(copy).automaton
    before = automaton.arrays["text"].tolist()
    retired = copy.rename(copy.with_name("retired"))
    for path in retired.iterdir():
        path.unlink()
    assert automaton.arrays["text"].tolist() == before


def test_a_million_tokens_open_in_well_under_a_second(tmp_path: Path) -> None:
    write(tmp_path / "index", np.random.default_rng(0).zipf(1.3, 1_000_000) % 50_000)
    open_index(tmp_path / "index")  # compiles
    begin = time.process_time()
    open_index(tmp_path / "index", verify=False)
    mapped = time.process_time() - begin
    begin = time.process_time()
    open_index(tmp_path / "index")
    assert mapped < 0.2
    assert time.process_time() - begin < 2.0


def test_another_tokenizer_is_refused_by_name(index_dir: Path) -> None:
    with pytest.raises(CorpusError, match=r"tokenizer of 'smollm2' \(0123456789abcdef\), not the target's \(fedcba\)"):
        open_index(index_dir, "fedcba")


def test_directories_that_hold_no_index_say_so(tmp_path: Path) -> None:
    assert fault(tmp_path / "none").endswith("there is no such directory")
    assert fault(tmp_path).endswith(f"holds no {HEADER_FILE}; it is no corpus index")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"{" * 100_000, "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "not the header of a corpus index"),
        (b"{}", "not the header of a corpus index"),
        (b'{"format": "paceline-corpus"}', "version is None; this Paceline reads version 1"),
        (b" " * (1 << 21), "larger than"),
    ],
)
def test_a_header_of_something_else_is_refused(copy: Path, content: bytes, expected: str) -> None:
    (copy / HEADER_FILE).write_bytes(content)
    assert expected in fault(copy)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version is 2; this Paceline reads version 1"),
        ({"target": 3}, "target is 3"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": 100}, "vocab_size is 100; the text has token 200018"),
        ({"num_tokens": "many"}, "num_tokens is 'many'"),
        ({"num_tokens": 0, "num_documents": 12}, "num_documents is 12 and num_tokens 0"),
        ({"num_tokens": 11}, "num_documents is 2 and num_tokens 11; with a separator after each document there must"),
        ({"size_bytes": 7}, "the header says 7"),
        ({"crc32": 1}, "the checksum is"),
        ({"arrays": []}, "arrays is no table of arrays"),
        ({"arrays": {}}, "arrays are []"),
        ({"arrays": {"text": {"dtype": "object", "shape": [1], "offset": 0}}}, "array 'text' has no valid"),
        ({"arrays": {"text": {"dtype": "int32", "shape": [-1], "offset": 0}}}, "array 'text' has no valid"),
        ({"arrays": {"text": {"dtype": "int32", "shape": [2**40, 2**40], "offset": 0}}}, "array 'text' has no valid"),
        ({"arrays": {"text": {"dtype": "int32", "shape": [1], "offset": 2**50}}}, "array 'text' has no valid"),
        ({"arrays": {"text": {"dtype": "int32", "shape": [1], "offset": 3}}}, "array 'text' has no valid"),
        ({"arrays": {"file": {"dtype": "int32", "shape": [1], "offset": 0}}}, "array 'file' has no valid"),
    ],
)
def test_a_header_that_lies_is_refused(copy: Path, change: dict[str, object], expected: str) -> None:
    header = json.loads((copy / HEADER_FILE).read_text())
    (copy / HEADER_FILE).write_text(json.dumps(header | change))
    assert expected in fault(copy)


def test_arrays_that_are_cut_longer_gone_or_changed_are_refused(copy: Path) -> None:
    path = copy / ARRAYS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert "the header says" in fault(copy)
    path.write_bytes(whole + b"\0")
    assert "the header says" in fault(copy)
    path.unlink()
    assert "cannot be read" in fault(copy)
    for place in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "the checksum is" in fault(copy)


def test_a_matching_checksum_does_not_make_a_broken_structure_good(copy: Path) -> None:
    header = json.loads((copy / HEADER_FILE).read_text())
    data = bytearray((copy / ARRAYS_FILE).read_bytes())
    offset = header["arrays"]["links"]["offset"] + 4
    data[offset : offset + 4] = (2**30).to_bytes(4, "little")
    (copy / ARRAYS_FILE).write_bytes(data)
    (copy / HEADER_FILE).write_text(json.dumps(header | {"crc32": zlib.crc32(data)}))
    assert "a suffix link leads to no state" in fault(copy)


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=60)
def test_garbage_is_refused(tmp_path_factory: pytest.TempPathFactory, header: bytes, arrays: bytes) -> None:
    directory = tmp_path_factory.mktemp("garbage")
    (directory / HEADER_FILE).write_bytes(header)
    (directory / ARRAYS_FILE).write_bytes(arrays)
    fault(directory)
