"""`paceline corpus`: what becomes a document, what is refused and how; an index appears whole or not at all."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from actors.home import paceline_home
from actors.models.catalog import resolve_model, silent
from actors.models.loader import read_model_info
from cache_service.automata.corpus_index import ARRAYS_FILE, HEADER_FILE, CorpusIndex, open_index
from cache_service.automata.suffix_automaton import Cursor
from cluster.errors import ConfigError
from cluster.offline.corpus import build_corpus
from cluster.text.documents import _PIECE_CHARS, read_documents
from paceline_testing.tiny_models import START_OF_TURN, make_byte_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(run, target, tmp_path):
    """Build an index of files that must succeed."""

    def call(*arguments, out: Path | None = None) -> CorpusIndex:
        out = out or tmp_path / "index"
        status, printed, err = run("corpus", "build", *arguments, "--out", out, "--target", target)
        assert (status, printed) == (0, f"{out}\n"), err
        assert " bytes a token)" in err
        return open_index(out)

    return call


@pytest.fixture
def fail(refuse, target, tmp_path):
    """Build an index that must fail: the one line that says why. Nothing new is left at --out."""

    def call(*arguments, out: Path | None = None) -> str:
        out = out or tmp_path / "index"
        is_there = out.exists()
        line = refuse("corpus", "build", *arguments, "--out", out, "--target", target)
        assert is_there or not out.exists()
        assert not list(tmp_path.glob(".*.new-*"))
        return str(line)

    return call


def ids(text: str) -> list[int]:
    return list(make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


def documents_of(index: CorpusIndex) -> list[list[int]]:
    text = index.automaton.arrays["text"].tolist()
    assert text[0] == text[-1] == -1
    documents: list[list[int]] = [[]]
    for token in text[1:]:
        if token < 0:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents[:-1]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_file_and_every_row_is_a_document_of_its_own(build, tmp_path, target):
    note = tmp_path / "note.txt"
    note.write_text("Grüße\nand more")
    rows = write(
        tmp_path / "rows.jsonl",
        {"text": "plain"},
        {"prompt": "asked"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [3, 4, 258]},
        {"token_ids": [258, 0], "more": "is left alone"},
    )
    rows.write_text(rows.read_text() + "\n  \n")
    index = build(note, rows)
    tokenizer = make_byte_tokenizer()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True, return_dict=False)
    assert chat[0] == START_OF_TURN
    documents = documents_of(index)
    assert documents == [
        ids("Grüße\nand more"), ids("plain"), ids("asked"), chat, [3, 4, 258], [258, 0],
    ]  # fmt: skip
    assert (index.header.num_documents, index.header.num_tokens) == (6, sum(map(len, documents)))
    assert (index.header.target, index.header.vocab_size) == (target.name, 259)


def test_long_text_is_one_document_whatever_pieces_it_is_read_in(build, tmp_path):
    lines = "".join(f"line {number}\n" for number in range(_PIECE_CHARS // 4))
    note = tmp_path / "note.md"
    note.write_text(lines)
    rows = write(tmp_path / "rows.jsonl", {"text": lines})
    assert len(lines) > 2 * _PIECE_CHARS
    assert documents_of(build(note, rows)) == [ids(lines)] * 2


def test_text_without_lines_is_tokenised_in_pieces(tmp_path):
    text = "a b " * (3 * _PIECE_CHARS // 4) + "ü"
    note = tmp_path / "note.txt"
    note.write_text(text)
    sources = [note, write(tmp_path / "rows.jsonl", {"text": text})]
    shown = []
    pieces = list(read_documents(sources, make_byte_tokenizer(), 259, lambda *step: shown.append(step)))
    assert [ends for _, ends in pieces] == [False, True] * 2
    assert [len(tokens) for tokens, _ in pieces] == [2 * _PIECE_CHARS, _PIECE_CHARS + 2] * 2
    total = sum(source.stat().st_size for source in sources)
    assert shown == [
        ("indexing", 2 * _PIECE_CHARS, total),
        ("indexing", len(text.encode()), total),
        ("indexing", total, total),
        ("indexing", total, total),
    ]


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl"])
def test_a_pipe_is_read_like_a_file(build, tmp_path, name):
    os.mkfifo(tmp_path / name)
    text = "line\n" * 30_000
    content = json.dumps({"text": text}) if name.endswith("l") else text
    writer = threading.Thread(target=(tmp_path / name).write_text, args=(content,))
    writer.start()
    index = build(tmp_path / name)
    writer.join()
    assert documents_of(index) == [ids(text)]


def test_half_characters_in_rows_are_replaced(build, tmp_path):
    rows = tmp_path / "rows.jsonl"
    message = r'{"role": "user", "content": "\udfff", "x": {"\ud800": 1}}'
    rows.write_text(r'{"text": "a\ud83d b\uDE00\ud83d\ude00"}' + f'\n{{"messages": [{message}]}}')
    first, second = documents_of(build(rows))
    assert first == ids("a\ufffd b\ufffd\U0001f600")
    assert "".join(map(chr, ids("\ufffd"))) in "".join(map(chr, second))


def test_a_match_never_crosses_a_border(build, tmp_path):
    for name, text in (("a", "one two"), ("b", "three four")):
        (tmp_path / name).write_text(text)
    automaton = build(tmp_path / "a", tmp_path / "b").automaton
    cursor = automaton.advance(Cursor(), np.array(ids("one twothree"), np.int32))
    assert cursor.length == len("three")


@pytest.mark.parametrize(
    "pieces", [[([1, 2], False)], [([1], True), ([2], False)], [([1], True), ([], False), ([2], True)]]
)
def test_the_last_document_ends_with_the_last_piece(tmp_path, target, pieces):
    info = read_model_info(resolve_model(str(target), tmp_path))
    index = build_corpus(((np.array(tokens, np.int32), ends) for tokens, ends in pieces), info, tmp_path / "index")
    assert index.header.num_tokens == 2
    assert index.header.num_documents == int((index.automaton.arrays["text"][1:] < 0).sum()) >= 1
    assert index.automaton.arrays["text"][-1] == -1


def test_an_index_is_replaced_and_nothing_else_is(build, fail, refuse, target, tmp_path):
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    build(tmp_path / "a")
    assert documents_of(build(tmp_path / "b")) == [ids("second")]
    (tmp_path / "index" / "thesis.tex").write_text("years of work")
    assert fail(tmp_path / "a").endswith("exists and is no corpus index; choose another directory")
    assert documents_of(open_index(tmp_path / "index")) == [ids("second")]
    (tmp_path / "file").write_text("")
    refuse("corpus", "build", tmp_path / "a", "--out", tmp_path / ("x" * 300), "--target", target)
    for entry in (HEADER_FILE, ARRAYS_FILE, "thesis.tex"):
        (tmp_path / "index" / entry).unlink()
    (tmp_path / "index").rmdir()
    assert "is no corpus index" in fail(tmp_path / "a", out=tmp_path / "file")


def test_a_link_stays_and_the_directory_behind_it_is_replaced(build, tmp_path):
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "index")
    for name, text in (("a", "first"), ("b", "second")):
        assert documents_of(build(tmp_path / name, out=tmp_path / "link")) == [ids(text)]
    assert (tmp_path / "link").is_symlink()
    assert documents_of(open_index(tmp_path / "far" / "index")) == [ids("second")]
    assert {entry.name for entry in (tmp_path / "far").iterdir()} == {"index", ".index.lock"}


@pytest.mark.parametrize(
    "files",
    [
        {HEADER_FILE: '{"my": "own"}'},
        {HEADER_FILE: '["paceline-corpus"]', ARRAYS_FILE: ""},
        {ARRAYS_FILE: "mine"},
        {HEADER_FILE: '{"format": "paceline-corpus"}', "notes.txt": ""},
        {HEADER_FILE: '{"format": "paceline-corpus"}', f"{ARRAYS_FILE}/notes.txt": ""},
    ],
    ids=str,
)
def test_files_of_others_are_never_taken_for_an_index(fail, tmp_path, files):
    out = tmp_path / "out"
    for name, content in files.items():
        (out / name).parent.mkdir(exist_ok=True, parents=True)
        (out / name).write_text(content)
    (tmp_path / "a").write_text("some text")
    expected = f"--out {out}: exists and is no corpus index; choose another directory"
    assert fail(tmp_path / "a", out=out) == expected
    assert {name: (out / name).read_text() for name in files} == files


def test_an_index_of_another_version_or_a_damaged_one_is_replaced(build, tmp_path):
    (tmp_path / "a").write_text("some text")
    index = build(tmp_path / "a")
    header = index.path / HEADER_FILE
    header.write_text(header.read_text().replace('"version": 1', '"version": 0'))
    (index.path / ARRAYS_FILE).unlink()
    assert documents_of(build(tmp_path / "a")) == [ids("some text")]


def test_a_file_that_appears_during_the_build_is_kept(target, tmp_path):
    info = read_model_info(resolve_model(str(target), paceline_home(), silent))
    out = tmp_path / "out"
    out.mkdir()

    def documents():
        yield np.arange(5, dtype=np.int32), True
        (out / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="exists and is no corpus index"):
        build_corpus(documents(), info, out)
    assert [path.read_text() for path in out.iterdir()] == ["years of work"]
    assert not list(tmp_path.glob(".out.new-*"))


def test_what_can_be_no_directory_is_named(fail, tmp_path):
    (tmp_path / "a").write_text("some text")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    circle = tmp_path / "circle"
    assert fail(tmp_path / "a", out=circle).startswith(f"--out '{circle}': is no path: ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "a"}\n{"text": ', ":2: not valid JSON"),
        (b'{"text": "\xff"}', ":1: not valid JSON"),
        (b'{"text": "\xed\xa0\xbd"}', ":1: not valid JSON"),
        (b"[" * 100_000, ":1: not valid JSON"),
        (b"[]", ":1: a row needs exactly one of text, prompt, messages"),
        (b'{"text": "a", "prompt": "b"}', ":1: a row needs exactly one of"),
        (b'{"text": ""}', ':1: text is ""; it must hold a text, at least one'),
        (b'{"text": 3}', ":1: text is 3; it must hold a text"),
        (b'{"messages": [{"role": "user"}]}', "it must hold messages with role and content"),
        (b'{"token_ids": []}', ":1: token_ids is []; it must hold integers, at least one"),
        (b'{"token_ids": [true]}', ":1: token_ids is [true]; it must hold integers"),
        (b'{"token_ids": [1, 259]}', ":1: token_ids holds 259; token ids are from 0 to 258"),
        (b'{"token_ids": [-1]}', ":1: token_ids holds -1; token ids are from 0 to 258"),
    ],
)
def test_a_broken_row_is_named_with_its_line(fail, tmp_path, content, expected):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    line = fail(path)
    assert line.startswith(str(path))
    assert expected in line


def test_files_that_cannot_be_read_are_named(fail, tmp_path):
    assert fail(tmp_path / "none.txt") == f"{tmp_path / 'none.txt'}: cannot be read: No such file or directory"
    assert fail(tmp_path) == f"{tmp_path}: is a directory; give files"
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    assert fail(tmp_path / "latin1.txt").startswith(f"{tmp_path / 'latin1.txt'}: not UTF-8 text")
    (tmp_path / "empty.txt").write_text("")
    assert fail(tmp_path / "empty.txt") == "the corpus has no tokens; give files with text in them"
    assert fail() == "give files to index, or --from-responses"
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in fail(tmp_path / "file", out=tmp_path / "file" / "index")


def test_files_are_looked_at_before_the_model_which_may_take_a_while_to_prepare(refuse, tmp_path):
    command = ["corpus", "build", tmp_path / "none.txt", "--out", tmp_path / "index", "--target", "/no/such/model"]
    assert refuse(*command) == f"{tmp_path / 'none.txt'}: cannot be read: No such file or directory"


def test_answers_of_the_target_are_indexed_after_their_prompts(build, fail, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", {"prompt": "abc"}, {"prompt_token_ids": [1, 2, 3]})
    index = build("--from-responses", prompts, "--max-new-tokens", 9, "--device", "cpu")
    first, second = documents_of(index)
    assert first[:3] == ids("abc")
    assert second[:3] == [1, 2, 3]
    assert len(first) == len(second) == 12


def test_prompts_and_sampling_are_checked_before_a_model_is_loaded(fail, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", {"text": "abc"})
    assert "a row needs exactly one of prompt, messages, prompt_token_ids" in fail("--from-responses", prompts)
    prompts.write_text("")
    assert fail("--from-responses", prompts).endswith("it must have at least one row")
    write(prompts, {"prompt": "abc"})
    assert fail("--from-responses", prompts, "--temperature", 3).startswith("--temperature is 3.0")
    assert fail("--from-responses", prompts, "--max-new-tokens", 0).startswith("--max-new-tokens is 0")


def test_info_says_what_an_index_holds_and_what_is_wrong_with_it(build, run, refuse, tmp_path, target):
    (tmp_path / "a").write_text("some text")
    index = build(tmp_path / "a")
    status, out, _ = run("corpus", "info", index.path)
    assert status == 0
    assert out.startswith("1 documents, 9 tokens, ")
    assert out.endswith(f"target {target.name}, tokenizer {index.header.tokenizer_fingerprint}\n")
    data = bytearray((index.path / ARRAYS_FILE).read_bytes())
    data[0] ^= 1
    (index.path / ARRAYS_FILE).write_bytes(data)
    assert "the checksum is" in refuse("corpus", "info", index.path)


def test_generate_names_a_corpus_that_it_cannot_use(build, refuse, tmp_path, target):
    (tmp_path / "a").write_text("some text")
    index = build(tmp_path / "a")
    header = index.path / HEADER_FILE
    header.write_text(header.read_text().replace(index.header.tokenizer_fingerprint, "another"))
    arguments = ["generate", "--model", target, "--device", "cpu", "--prompt", "some", "--draft-model", "none"]
    arguments += ["--corpus", index.path]
    assert refuse(*arguments).startswith(f"corpus {index.path}: made with the tokenizer of ")
    assert "drafters must include retrieval to use it" in refuse(*arguments, "--drafter", "suffix")
