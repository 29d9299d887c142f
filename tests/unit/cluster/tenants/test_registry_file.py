"""The registry's file: what is appended, read on and written anew, against a dictionary; its first format; damage."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.tenants import registry_file
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.registry import Registry, StoredKey, StoredTenant
from cluster.tenants.registry_file import RegistryFile, RegistryFollower, read_registry, write_registry
from paceline_testing.clock import Clock

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def tenant_of(number: int, name: str = "", version: int = 0, **fields: object) -> StoredTenant:
    key = StoredKey(id=f"{version:08x}", sha256=f"{number:032x}{version:032x}", last4="0000", created=CREATED)
    return StoredTenant(id=f"{number:08x}", name=name or f"t{number}", created=CREATED, keys=(key,), **fields)  # type: ignore[arg-type]


def known(registry: Registry | None) -> dict[str, StoredTenant]:
    return {} if registry is None else {tenant.id: tenant for tenant in registry.tenants}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0)),
        st.tuples(st.sampled_from(("read", "copy", "tear")), st.integers(0, 1), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_whoever_reads_at_any_time_knows_what_a_dictionary_knows(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("registry") / "tenants.json"
    writer, reader, oracle = RegistryFile(path), RegistryFile(path), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_file, "_SPARE_LINES", 3)
        patch.setattr(os, "fsync", lambda _: None)
        for step, number, version in steps:
            writer.read()
            if step == "put":
                oracle[f"{number:08x}"] = tenant_of(number, version=version)
                writer.write({f"{number:08x}": oracle[f"{number:08x}"]})
            elif step == "remove":
                oracle.pop(f"{number:08x}", None)
                writer.write({f"{number:08x}": None})
            elif step == "read":
                assert known(reader.read()) == oracle
            elif step == "copy" and path.exists():  # another file in its place
                path.with_suffix(".new").write_bytes(path.read_bytes())
                os.replace(path.with_suffix(".new"), path)
            elif step == "tear" and path.exists():
                if reader.read() is not None:
                    with path.open("ab") as file:
                        file.write(b'{"id":"000')
                    assert known(reader.read()) == known(read_registry(path)) == oracle
                    if number:  # the writer begins with it, too
                        writer = RegistryFile(path)
                writer.read()
                writer.write({"0000000f": None})
    assert known(reader.read()) == known(read_registry(path)) == oracle
    for tenant in oracle.values():
        digest = bytes.fromhex(tenant.keys[0].sha256)
        assert reader.read().find(digest) == (tenant.keys[0], tenant)
    if path.exists():
        assert path.read_bytes().count(b"\n") <= 2 * len(oracle) + 3 + 2 + 1


def test_a_change_is_one_more_line_and_a_reader_reads_it_alone(tmp_path, monkeypatch):
    path = tmp_path / "tenants.json"
    write_registry(path, Registry(tenant_of(number) for number in range(300)))
    reader, before = RegistryFile(path), path.read_bytes()
    reader.read()
    TenantAdministration(path).add("another", {})
    after = path.read_bytes()
    assert after.startswith(before)
    assert after[len(before) :].count(b"\n") == 1
    monkeypatch.setattr(registry_file, "parse_registry", None)  # would read all of it
    assert len(reader.read()) == 301


def test_the_first_format_is_read_and_the_next_change_replaces_it(tmp_path):
    path, tenant = tmp_path / "tenants.json", tenant_of(1, policy="group", group="g")
    stored = {"id": tenant.id, "name": "t1", "created": "2026-01-01T00:00:00Z", "policy": "group", "group": "g"}
    keys = [{"id": "00000000", "sha256": tenant.keys[0].sha256, "last4": "0000", "created": "2026-01-01T00:00:00Z"}]
    document = {"format": 1, "server_key": "ab" * 32, "tenants": [{**stored, "limits": {}, "keys": keys}]}
    for indent in (2, None):
        path.write_text(json.dumps(document, indent=indent) + "\n")
        old = read_registry(path)
        assert (old.tenants, old.server_key) == ((tenant,), "ab" * 32)
    issued = TenantAdministration(path).add("a", {})
    new = read_registry(path)
    assert (set(new.tenants), new.server_key) == ({tenant, issued.tenant}, old.server_key)
    assert path.read_bytes().startswith(b'{"format":2,')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], "before its 3 tenants do"),
        (lambda data: b"".join(data.splitlines(keepends=True)[:-1]), "before its 3 tenants do"),
        (lambda data: data.replace(b'"name":"t1"', b'"name":"t2"'), "a tenant name occurs twice"),
        (lambda data: data.replace(b'"name":"t1"', b'"name":"T"'), "name: it must match"),
        (lambda data: data.replace(f"{1:032x}".encode(), f"{2:032x}".encode()), "a key digest occurs twice"),
        (lambda data: data.replace(b'"format":2', b'"format":7'), "format: it must be 2"),
        (lambda data: b"", "Invalid JSON"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "tenants.json"
    write_registry(path, Registry(tenant_of(number) for number in range(3)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        read_registry(path)


@pytest.mark.parametrize("name", [b'"t1","disabled":true', b'"z1"'])  # the last one is as long as before
def test_a_file_that_was_edited_in_place_is_read_anew(tmp_path, name):
    path = tmp_path / "tenants.json"
    write_registry(path, Registry(tenant_of(number) for number in range(100)))
    reader, before = RegistryFile(path), path.stat()
    reader.read()
    edited = path.read_bytes().replace(b'"t1"', name)
    until_it_has_changed(path, path.touch)
    with path.open("r+b") as file:
        file.write(edited)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known(reader.read()) == known(read_registry(path))


def until_it_has_changed(path: Path, change: Callable[[], None]) -> None:
    """Times of a file system are those of its clock's last tick."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        change()


def test_a_change_that_lacks_only_the_end_of_its_line_counts_and_is_kept_by_the_next_one(tmp_path):
    path = tmp_path / "tenants.json"
    admin = TenantAdministration(path)
    admin.add("a", {})
    admin.change("a", {"disabled": True})
    path.write_bytes(path.read_bytes()[:-1])  # as some editors and secret stores do
    assert [tenant.disabled for tenant in read_registry(path).tenants] == [True]
    TenantAdministration(path).add("b", {})
    assert {tenant.name: tenant.disabled for tenant in read_registry(path).tenants} == {"a": True, "b": False}


def test_a_file_written_anew_keeps_its_mode_and_place(tmp_path, monkeypatch):
    path, link = tmp_path / "shared" / "tenants.json", tmp_path / "tenants.json"
    path.parent.mkdir()
    link.symlink_to(path)
    monkeypatch.setattr(registry_file, "_SPARE_LINES", -10)
    admin = TenantAdministration(link)
    admin.add("a", {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)  # the gateways run as another user
    inode = path.stat().st_ino
    admin.add("b", {})
    assert (stat.S_IMODE(path.stat().st_mode), link.is_symlink()) == (0o640, True)
    assert path.stat().st_ino != inode
    assert len(read_registry(path)) == 2
    assert path.with_name("tenants.json.lock").exists()  # whoever writes to it by another name waits, too
    assert not link.with_name("tenants.json.lock").exists()


def test_a_mounted_secret_that_is_exchanged_is_read_whole(tmp_path):
    path, clock = tmp_path / "tenants.json", Clock()
    path.symlink_to("..data/tenants.json")

    def mount(version: str, names: list[str]) -> None:
        (tmp_path / version).mkdir()
        listed = (tenant_of(number, name) for number, name in enumerate(names))
        write_registry(tmp_path / version / "tenants.json", Registry(listed, "ab" * 32))
        (tmp_path / "..new").symlink_to(version)
        os.replace(tmp_path / "..new", tmp_path / "..data")

    mount("1", ["a"])
    follower = RegistryFollower(path, lambda: None, clock)
    for version, names in {"2": ["b", "c", "d"], "3": ["c"]}.items():
        mount(version, names)
        clock.now += 2.0
        assert [tenant.name for tenant in follower.current().tenants] == names


def test_much_that_is_new_is_read_while_others_ask(tmp_path, monkeypatch):
    path, clock, may_end = tmp_path / "tenants.json", Clock(), threading.Event()
    write_registry(path, Registry([tenant_of(0, "first")], "ab" * 32))
    follower = RegistryFollower(path, lambda: None, clock)
    many = [tenant_of(number, f"tenant-{number}") for number in range(1000)]
    parse = registry_file.parse_registry
    monkeypatch.setattr(registry_file, "parse_registry", lambda *what: may_end.wait(20) and parse(*what))
    until_it_has_changed(path, lambda: write_registry(path, Registry(many, "ab" * 32)))
    assert path.stat().st_size > 128 * 1024
    for _ in range(3):
        clock.now += 1.5
        assert len(follower.current()) == 1  # at once
    may_end.set()
    follower._reading.join(20)
    assert len(follower.current()) == 1000


def test_after_a_while_without_a_question_the_answer_is_not_the_former_one(tmp_path):
    """A key that was taken back meanwhile must not be good for one more call."""
    path, clock = tmp_path / "tenants.json", Clock()
    many = [tenant_of(number, f"tenant-{number}") for number in range(1000)]
    write_registry(path, Registry(many, "ab" * 32))
    follower = RegistryFollower(path, lambda: None, clock)
    until_it_has_changed(path, lambda: write_registry(path, Registry(many[1:], "ab" * 32)))
    clock.now += 60.0
    assert len(follower.current()) == 999


def test_a_file_that_becomes_readable_is_read(tmp_path, monkeypatch):
    path, clock = tmp_path / "tenants.json", Clock()
    TenantAdministration(path).add("a", {})
    follower = RegistryFollower(path, lambda: None, clock)
    TenantAdministration(path).add("b", {})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        clock.now += 2.0
        assert len(follower.current()) == 1
    until_it_has_changed(path, lambda: path.chmod(0o640))
    clock.now += 2.0
    assert len(follower.current()) == 2


def refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_ids_that_are_taken_are_not_given_again(tmp_path, monkeypatch):
    ids = iter(["aaaaaaaa", "00000001", "aaaaaaaa", "bbbbbbbb", "00000001"])
    monkeypatch.setattr("cluster.tenants.administration._random_id", lambda: next(ids))
    admin = TenantAdministration(Path(tmp_path / "tenants.json"))
    assert [admin.add(name, {}).tenant.id for name in ("a", "b")] == ["aaaaaaaa", "bbbbbbbb"]
