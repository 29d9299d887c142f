"""`paceline cache` on a real server: what it prints, what it refuses, and what is left behind.

Covers `cluster.cli.cache.app`, `cluster.cli.cache.documents`, `cluster.cli.cache.namespaces`,
`cluster.cli.cache.options`, `cluster.cli.output` and `cache_service.store.server_disk`.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from actors.home import paceline_home
from actors.models.catalog import resolve_model
from actors.models.loader import read_model_info
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.namespaces import namespace_of, namespace_of_group
from cache_service.formats.store_keys import StoreKeys
from cache_service.store.embedded_server import EmbeddedServer, running_server
from cluster.cache.admin.documents import whole_documents
from cluster.cache.admin.migration import Migration
from cluster.cache.admin.names import Names
from cluster.cli import main as cli
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.registry_file import read_registry
from paceline_testing.cache_stores import Namespace, piece, until
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fingerprint(target):
    return read_model_info(resolve_model(str(target), paceline_home())).fingerprint


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture
def run(monkeypatch, capfd, server, tmp_path):
    """Run `paceline cache` in this process against the server: (exit status, stdout, stderr)."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    Namespace(server.settings).redis.flushall()

    def call(*arguments, directory=server.directory):
        monkeypatch.setattr(sys, "argv", ["paceline", "cache", *map(str, arguments), "--directory", str(directory)])
        status = 0
        try:
            cli.main()
        except SystemExit as exit:
            status = exit.code or 0
        out, err = capfd.readouterr()
        return status, out, err

    return call


def ids(text):
    return list(make_byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


def held(server, fingerprint, name):
    namespace = Namespace(server.settings, name)
    object.__setattr__(namespace.keys, "fingerprint", fingerprint)
    documents, _ = namespace.read()
    return sorted(documents.contents.values())


def test_import_export_and_import_again(run, server, target, fingerprint, tmp_path):
    note, rows, out = tmp_path / "note.txt", tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    note.write_text("Grüße\nand more")
    message = {"role": "user", "content": "hi"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in [{"messages": [message]}, {"token_ids": [3, 4]}]))
    chat = make_byte_tokenizer().apply_chat_template([message], tokenize=True, return_dict=False)
    files = ("import", note, rows, "--target", target)
    status, printed, err = run(*files, "--namespace", "docs")
    assert (status, printed) == (0, ""), err
    assert err.startswith("3 documents, ")
    documents = sorted([ids("Grüße\nand more"), chat, [3, 4]])
    assert held(server, fingerprint, "open.docs") == documents
    status, printed, _ = run(*files, "--namespace", "open.docs", "--json")
    assert json.loads(printed)["known_documents"] == 3
    assert run("export", "-n", "docs", "--out", out, "--text", "--target", target)[0] == 0
    assert out.stat().st_mode & 0o777 == 0o600
    header, *lines = map(json.loads, out.read_text().splitlines())
    assert (header["paceline_cache_export"], header["namespace"]) == (1, "open.docs")
    assert sorted(line["token_ids"] for line in lines) == documents
    assert "Grüße\nand more" in [line["text"] for line in lines]
    status, printed, _ = run("export", "-n", "docs", "--out", "-")
    assert len(printed.splitlines()) == 4
    assert run("import", out, "-n", "copy", "--target", target)[0] == 0
    assert held(server, fingerprint, "open.copy") == documents
    listed = json.loads(run("list", "--json")[1])
    assert [each["namespace"] for each in listed] == ["open.copy", "open.docs"]
    assert {each["fingerprint"] for each in listed} == {fingerprint}
    (stats,) = json.loads(run("stats", "-n", "docs", "--json")[1])
    assert (stats["documents"], stats["tokens"]) == (3, sum(map(len, documents)))
    for command in (("list",), ("stats", "-n", "docs")):
        assert "open.docs" in run(*command)[1]
    assert run("compact", "-n", "docs")[0] == 0
    assert "0 problems" in run("verify")[2]


def test_an_export_goes_where_it_is_sent_and_replaces_files_alone(run, server, tmp_path):
    """Not the device or the pipe that a path leads to, or whoever writes to /dev/null next fills the disk."""
    Namespace(server.settings, "open").append(piece("a", 0, [1]))
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run("export", "-n", "open", "--out", pipe)[0] == 0
    received = os.read(reader, 65_536)
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(file)
    file.write_text("old")
    assert run("export", "-n", "open", "--out", link)[0] == 0
    assert link.is_symlink()
    assert file.read_bytes() == received
    assert file.stat().st_mode & 0o777 == 0o600
    assert received.count(b"\n") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "home", "link", "pipe"]
    for out in (tmp_path, tmp_path / ("x" * 300)):
        status, printed, err = run("export", "-n", "open", "--out", out)
        assert (status, printed, err.count("\n")) == (2, "", 1)
        assert f"--out {out}: cannot be written: " in err


def test_an_export_tells_what_it_could_not_read(run, server, tmp_path):
    out = tmp_path / "out.jsonl"
    secret = Namespace(server.settings, "open", ring=KeyRing({1: b"1" * 32}))
    for number in range(3):
        secret.append(piece(str(number), 0, [1, number]))
    status, printed, err = run("export", "-n", "open", "--out", out)
    assert (status, printed, err.count("\n"), out.exists()) == (2, "", 1, False)
    assert "nothing in namespace open can be read, none of 3 objects" in err
    Namespace(server.settings, "open").append(piece("plain", 0, [7]))
    status, _, err = run("export", "-n", "open", "--out", out)
    assert (status, len(out.read_text().splitlines())) == (1, 2)
    assert "3 objects of open could not be read and were left out" in err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"token_ids": [1, 259]}', "token_ids holds 259; token ids are from 0 to 258"),
        ("no JSON", "not valid JSON"),
        ('{"text": ""}', 'text is ""; it must hold a text'),
    ],
)
def test_what_comes_before_a_bad_row_stays(run, server, target, fingerprint, tmp_path, row, reason):
    rows = tmp_path / "rows.jsonl"
    good = [json.dumps({"token_ids": [number]}) for number in range(70)]  # more than are tokenised at once
    rows.write_text("\n".join([*good, row]))
    status, printed, err = run("import", rows, "-n", "docs", "--target", target)
    assert (status, printed, err.count("\n")) == (2, "", 1)
    assert f"rows.jsonl:71: {reason}" in err
    assert held(server, fingerprint, "open.docs") == [[number] for number in range(64)]
    rows.write_text("\n".join(good))
    result = json.loads(run("import", rows, "-n", "docs", "--target", target, "--json")[1])
    assert (result["documents"], result["known_documents"]) == (6, 64)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"paceline_cache_export": 2, "other": "fields"}, ":1: the export has format 2; this side reads 1\n"),
        ({"paceline_cache_export": 1, "fingerprint": "a-b", "tokenizer": "b", "namespace": "open"}, "cache migrate"),
        ({"paceline_cache_export": 1, "fingerprint": "a-b", "tokenizer": "c", "namespace": "open"}, "tokenizer c"),
    ],
)
def test_an_export_of_a_later_format_or_of_other_tokens_is_not_imported(run, target, tmp_path, header, reason):
    out = tmp_path / "export.jsonl"
    out.write_text(json.dumps(header) + "\n")
    status, _, err = run("import", out, "-n", "docs", "--target", target)
    assert status == 2
    assert reason in err


def on_disk(server):
    """All that the server keeps there."""
    return b"".join(path.read_bytes() for path in server.directory.glob("appendonly*/*") if path.is_file())


def test_purges_want_a_yes_and_say_what_is_gone(run, server, target, fingerprint, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"token_ids": [1]}\n')
    run("import", rows, "-n", "docs", "--target", target)
    status, _, err = run("purge", "-n", "docs")
    assert status == 2
    assert "say so with --yes" in err
    assert run("purge", "-n", "docs", "--until", "1h", "--yes")[2].startswith("purged 0 tokens of open.docs")
    assert run("purge", "-n", "docs", "--since", "1h", "--yes")[2].startswith("purged 1 tokens of open.docs")
    run("import", rows, "-n", "docs", "--target", target)
    key = StoreKeys(fingerprint, "open.docs").manifest
    assert until(lambda: key.encode() in on_disk(server))
    (purged,) = json.loads(run("purge", "-n", "docs", "--yes", "--json")[1])
    assert (purged["fingerprint"], purged["tokens"]) == (fingerprint, None)
    left = [key for key in Namespace(server.settings).redis.scan_iter() if not key.endswith(b":purges")]
    assert left == []
    assert until(lambda: key.encode() not in on_disk(server))
    status, _, err = run("purge", "-n", "docs", "--yes")
    assert (status, err) == (2, "paceline: there is no namespace 'open.docs' in the cache\n")
    audited = [json.loads(line) for line in (paceline_home() / "cache-audit.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in audited if line["action"] == "purge"] == ["begun", "done"] * 3
    assert {line["actor"].split()[0] for line in audited} == {"cli"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("import", __file__, "-n", "public"), "nothing but the promotion gate writes to it"),
        (("stats",), "--namespace is missing; name one, or a --tenant"),
        (("stats", "-n", "Not A Name"), "namespace is 'Not A Name'"),
        (("stats", "-n", "absent"), "there is no namespace 'open.absent'"),
        (("stats", "--tenant", "acme"), "there are no tenants"),
        (("purge", "-n", "docs", "--since", "yesterday", "--yes"), "--since is 'yesterday'; write a time"),
        (("list", "--set", "cache.url=none", "--url", "none"), "give --url or --directory"),
        (("serve-admin",), "give --credential-file, or set $PACELINE_CACHE_ADMIN_TOKEN"),
        (("serve-admin", "--key-file", "x"), "--certificate-file and --key-file go together"),
        (("import", "/absent.txt", "-n", "docs"), "/absent.txt: cannot be read: No such file"),
        (("export", "-n", "absent", "--out", "/absent/x"), "there is no namespace"),
        (("stats", "-n", "absent", "--fingerprint", "\x1b[31m\udcff"), r"of model '\x1b[31m\udcff' in the cache"),
    ],
)
def test_what_cannot_be_is_one_line(run, target, arguments, reason):
    if arguments[0] == "import":
        arguments = (*arguments, "--target", target)
    status, printed, err = run(*arguments)
    assert (status, printed) == (2, "")
    assert err.startswith("paceline: ")
    assert reason in err
    assert err.count("\n") == 1


def test_verify_ends_with_1_where_something_is_damaged(run, server):
    namespace = Namespace(server.settings, "open")
    namespace.append(piece("a", 0, [1]))
    namespace.redis.xadd(namespace.keys.log, {b"e": b"garbage"})
    status, printed, err = run("verify")
    assert status == 1
    assert "open of model: log: entry " in printed
    assert "1 problems" in err


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:secret@127.0.0.1:1", "url names a user or a password"),
        ("redis://127.0.0.1:1", "Redis is unavailable"),
        (
            "redis+sentinel://127.0.0.1:1,[::1]:1/s",
            "No master found for 's' : network:ConnectionError, network:ConnectionError",
        ),
    ],
)
def test_a_server_that_is_away_is_one_line(monkeypatch, capfd, url, reason):
    monkeypatch.setattr(sys, "argv", ["paceline", "cache", "list", "--url", url])
    with pytest.raises(SystemExit):
        cli.main()
    err = capfd.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert "<redis" not in err


def test_without_a_running_cluster_its_data_are_served_for_the_while(run, tmp_path):
    directory = tmp_path / "stopped"
    with EmbeddedServer(directory) as stopped:
        Namespace(stopped.settings, "open").append(piece("a", 0, [1]))
    assert "open" in run("list", directory=directory)[1]
    assert running_server(directory) is None


@pytest.mark.parametrize(
    "command", [["list"], ["stats", "-n", "docs"], ["verify"], ["export", "-n", "x", "--out", "y"]]
)
def test_where_there_is_no_cache_it_is_said_and_nothing_is_written(run, tmp_path, command):
    status, out, err = run(*command, directory=tmp_path / "absent")
    assert (status, out) == (2, "")
    assert err.startswith(f"paceline: there is no cache in {tmp_path / 'absent'}; name another with --url, ")
    assert list(tmp_path.iterdir()) == []


def test_list_says_where_it_looked(run, server):
    assert run("list")[2] == f"0 namespaces in {server.directory}\n"


def test_an_interrupted_import_goes_on(server, target, fingerprint, tmp_path):
    Namespace(server.settings).redis.flushall()
    rows = tmp_path / "rows.jsonl"
    os.mkfifo(rows)
    command = [sys.executable, "-m", "cluster.cli.main", "cache", "import", rows, "-n", "docs"]
    command += ["--target", target, "--directory", server.directory]
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path / "home")}
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment) as process:
        with rows.open("w") as pipe:
            for row in range(70):  # more than a batch of texts to tokenise
                pipe.write(json.dumps({"text": f"row {row}"}) + "\n")
            pipe.flush()
            time.sleep(0.1)
            deadline = time.monotonic() + 60
            while not (tmp_path / "home" / "cache-audit.jsonl").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert "the same command goes on from there" in process.stderr.read()
    assert "Traceback" not in (tmp_path / "home" / "cache-audit.jsonl").read_text()
    lines = (tmp_path / "home" / "cache-audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["begun", "interrupted"]


def test_a_tenants_namespaces_are_found_by_its_name_and_purged_with_all_their_parts(run, server, tmp_path):
    home = tmp_path / "home"
    tenants = TenantAdministration(home / "tenants.json")
    acme = tenants.add("acme", {}).tenant
    tenants.add("globex", {"policy": "group", "group": "trust"})
    key = bytes.fromhex(read_registry(home / "tenants.json").server_key)
    own, salt = namespace_of(key, acme.id), "0" * 32
    for name in (own, f"{own}.docs", f"{own}-{salt}", f"{own}-{salt}.docs", "open", namespace_of_group(key, "trust")):
        Namespace(server.settings, name).append(piece("a", 0, [1]))
    assert json.loads(run("stats", "--tenant", "acme", "--json")[1])[0]["namespace"] == own
    assert json.loads(run("stats", "--tenant", "acme", "-n", "docs", "--json")[1])[0]["namespace"] == f"{own}.docs"
    status, _, err = run("purge", "--tenant", "globex", "--yes")
    assert status == 0
    assert namespace_of_group(key, "trust") in err
    assert "there was nothing" in err
    tenants.remove("acme")
    assert "there is no such tenant" in run("purge", "--tenant", "acme", "--yes")[2]
    purged = json.loads(run("purge", "--tenant", acme.id, "--yes", "--json")[1])
    assert sorted(each["namespace"] for each in purged) == sorted(
        [own, f"{own}.docs", f"{own}-{salt}", f"{own}-{salt}.docs"]
    )
    left = [each["namespace"] for each in json.loads(run("list", "--json")[1])]
    assert sorted(left) == sorted(["open", namespace_of_group(key, "trust")])


def test_names_that_are_listed_are_themselves_and_others_are_parts():
    names = Names()
    own = "0123456789abcdef" * 2
    for whole in ("open", "public", own, f"{own}-{own}", f"{own}.docs", f"{own}-{own}.docs", "open.docs"):
        assert names.one(whole, None) == whole
    assert (names.one("docs", None), names.one("open-source", None)) == ("open.docs", "open.open-source")


def test_migration_keeps_the_text(run, server, target, fingerprint, tmp_path):
    other = save_tiny_model(tmp_path / "other")
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "another": 1}))
    rows = tmp_path / "rows.jsonl"
    message = {"role": "user", "content": "a question that is long enough"}
    rows.write_text(json.dumps({"messages": [message]}) + "\n" + json.dumps({"text": "some text of a document"}) + "\n")
    run("import", rows, "-n", "docs", "--target", target)
    status, printed, err = run("migrate", "-n", "docs", "--from", target, "--target", other, "--json")
    assert status == 0, err
    result = json.loads(printed)
    new = read_model_info(resolve_model(str(other), paceline_home())).fingerprint
    kept = held(server, new, "open.docs")
    assert sorted(make_byte_tokenizer().decode(tokens) for tokens in kept) == sorted(
        ["user\na question that is long enough", "some text of a document"]
    )
    assert result["migration"]["special_tokens"] == 2
    assert result["migration"]["left_out_tokens"] == 1, "the line break behind the message"
    again = json.loads(run("migrate", "-n", "docs", "--from", target, "--target", other, "--json")[1])
    assert (again["documents"], again["known_documents"]) == (0, 2)
    assert "it is the target itself" in run("migrate", "-n", "docs", "--from", target, "--target", target)[2]


def test_stretches_that_begin_or_end_inside_a_character_are_trimmed():
    tokenizer = make_byte_tokenizer()
    text = "ü and enough text behind it ü"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    migration = Migration(tokenizer, tokenizer)
    (part,) = migration.pieces([piece("a", 5, tokens[1:-1], 9)])
    assert tokenizer.decode(part.token_ids) == text[1:-1]
    assert (part.offset, part.time_s) == (0, 9)


def test_documents_that_are_too_long_are_cut():
    parts = [(np.arange(5), False), (np.arange(5, 12), True), (np.arange(3), True), (np.arange(4), False)]
    found = [tokens.tolist() for tokens in whole_documents(parts, 4)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2], [0, 1, 2, 3]]
