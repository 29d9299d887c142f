"""The cache's server that belongs to a cluster: routers learn where it is, nobody sees its password, and it lasts.

Covers also `cache_service.store.server_watch`.
"""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cache_service.errors import ServerError
from cache_service.store.connection import open_client
from cache_service.store.embedded_server import EmbeddedServer, running_server
from cluster.cache.access import connection_settings
from cluster.cache.embedded_cache import cluster_cache
from cluster.config import CacheConfig
from cluster.errors import ConfigError
from paceline_testing.cache_stores import until


def private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def child_of(lines: list[str]) -> psutil.Process:
    """The server that was told of."""
    port = int(lines[-1].rpartition(":")[2])
    children = psutil.Process().children(recursive=True)
    (server,) = (
        one
        for one in children
        if one.status() != psutil.STATUS_ZOMBIE
        and any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in one.net_connections("inet"))
    )
    return server


def test_routers_are_given_the_address_and_a_file_with_the_password_and_the_data_outlast_it(tmp_path):
    told: list[str] = []
    config = CacheConfig(directory=tmp_path / "cache", max_memory_bytes=16 * 2**20)
    for value in (None, b"kept"):
        with cluster_cache(config, told.append) as cache:
            settings = connection_settings(cache)
            client = open_client(settings)
            assert client.get("a") == value
            assert client.config_get("maxmemory") == {"maxmemory": str(16 * 2**20)}
            client.set("a", "kept")
            client.close()
            assert running_server(tmp_path / "cache") == settings
            assert private(tmp_path / "cache")
            assert private(cache.password_file)
            for text in (repr(cache), *told, *child_of(told).cmdline(), *child_of(told).environ().values()):
                assert settings.password not in text
        assert running_server(tmp_path / "cache") is None
        assert not cache.password_file.exists()
    assert all(line.startswith(f"{tmp_path / 'cache'}, ") for line in told)
    logs = (tmp_path / "cache" / "server.log").read_text()
    assert settings.password not in logs


def test_a_server_that_is_killed_is_started_again_at_its_place_with_its_password(tmp_path):
    told: list[str] = []
    with cluster_cache(CacheConfig(directory=tmp_path), told.append) as cache:
        client = open_client(connection_settings(cache))
        client.config_set("appendfsync", "always")
        client.set("a", "kept")
        for _ in range(2):
            first = child_of(told)
            first.kill()
            assert until(lambda gone=first: not gone.is_running() or gone.status() == psutil.STATUS_ZOMBIE)
            assert until(lambda: answers(client))
            assert child_of(told).pid != first.pid
        assert client.get("a") == b"kept"
        client.close()


def answers(client) -> bool:
    try:
        return bool(client.ping())
    except Exception:
        return False


def test_without_a_server_of_its_own_a_cluster_goes_on_and_says_why(tmp_path, monkeypatch):
    told: list[str] = []
    config = CacheConfig(directory=tmp_path)
    with EmbeddedServer(tmp_path), cluster_cache(config, told.append) as cache:
        assert cache.url == "none"
    assert told[-1].startswith(f"none: {tmp_path} is in use by the server of process {os.getpid()}")
    (tmp_path / "file").write_text("")
    with cluster_cache(CacheConfig(directory=tmp_path / "file"), told.append) as cache:
        assert cache.url == "none"
    monkeypatch.setenv("PACELINE_REDIS_SERVER", str(tmp_path / "absent"))
    with cluster_cache(config, told.append) as cache:
        assert cache.url == "none"
    assert "absent" in told[-1]


def test_a_server_that_does_not_let_us_in_is_told_of_without_the_password(tmp_path):
    told: list[str] = []
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-password")
    with EmbeddedServer(tmp_path / "cache") as server:
        for password_file in (server.password_file, wrong):
            config = CacheConfig(url=server.url, password_file=password_file)
            with cluster_cache(config, told.append) as cache:
                assert cache == config
        assert told[0] == str(server.settings)
        with open_client(server.settings) as client:
            client.execute_command("ACL", "SETUSER", "meek", "on", ">not-the-password", "~*", "+get")
        with cluster_cache(CacheConfig(url=server.url, username="meek", password_file=wrong), told.append):
            assert told[2] == str(server.settings)
    assert "AuthenticationError" in told[1]
    assert "not-the-password" not in told[1]


def test_a_server_of_somebody_else_is_not_started(tmp_path):
    told: list[str] = []
    config = CacheConfig(url="redis://127.0.0.1:1", directory=tmp_path / "cache")
    with cluster_cache(config, told.append) as cache:
        assert cache == config
    with cluster_cache(CacheConfig(url="none"), told.append) as cache:
        assert cache.url == "none"
    assert told[0].startswith("single 127.0.0.1:1; there is none until it can be used: Redis is unavailable: ")
    assert told[1:] == ["none"]
    assert not (tmp_path / "cache").exists()
    wrong = CacheConfig(url="redis://127.0.0.1:1", password_file=tmp_path / "absent")
    with pytest.raises(ConfigError, match="password_file"), cluster_cache(wrong, told.append):
        pass
    wrong = CacheConfig(directory=tmp_path / "cache", encryption_file=tmp_path / "absent")
    with pytest.raises(ConfigError, match="encryption_file"), cluster_cache(wrong, told.append):
        pass


def test_a_directory_whose_server_outlives_its_process_is_waited_for(tmp_path):
    """Two servers would write the same files."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cache_service.store.embedded_server import EmbeddedServer\n"
        "print(EmbeddedServer(Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = psutil.Process(int(parent.stdout.readline()))
        left.send_signal(signal.SIGSTOP)
        try:
            parent.kill()
            parent.wait()
            assert running_server(tmp_path) is None
            with pytest.raises(ServerError, match=f"process {parent.pid}"):
                EmbeddedServer(tmp_path, start_timeout_s=0.2)
            threading.Timer(0.3, left.send_signal, [signal.SIGCONT]).start()
            began = time.monotonic()
            with EmbeddedServer(tmp_path) as server:
                assert server.is_running
                assert time.monotonic() - began >= 0.25
        finally:
            if left.is_running():
                left.send_signal(signal.SIGCONT)
