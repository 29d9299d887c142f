"""A primary, its replica and three sentinels that watch over them, all of them real processes."""

import contextlib
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import MAX_PORT, MIN_PORT, find_server_binary
from paceline_testing.cache_stores import until

SERVICE = "cache"
NUM_SENTINELS = 3
DOWN_AFTER_MS = 500

_PASSWORD, _SENTINEL_PASSWORD = "of the servers", "of the sentinels"


class Member:
    """A server or a sentinel. It can be killed and started again, as the configuration has it that it wrote last."""

    def __init__(self, binary: Path, directory: Path, lines: list[str], password: str, is_sentinel: bool) -> None:
        directory.mkdir(parents=True)
        self.port = _free_port()
        self._directory = directory
        self._file = directory / "server.conf"
        self._command = [str(binary), str(self._file), *(["--sentinel"] if is_sentinel else [])]
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f'dir "{directory}"',
            f'logfile "{directory / "server.log"}"',
            f'requirepass "{password}"',
            *lines,
        ]
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        # Once more: who becomes a primary, or ceases to be one, ends all connections.
        self.redis = redis.Redis(
            "127.0.0.1", self.port, password=password, socket_timeout=1.0, retry=Retry(NoBackoff(), 1)
        )
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert until(self.answers), (self._directory / "server.log").read_text(errors="replace")[-2000:]

    def answers(self) -> bool:
        try:
            return bool(self.redis.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def role(self) -> str:
        return str(self.redis.info("replication")["role"])

    def close(self) -> None:
        self.redis.close()
        self.kill()


class SentinelGroup:
    """`primary` and `replica` are what they are at first."""

    def __init__(self, directory: Path, binary: Path | None) -> None:
        binary = find_server_binary(binary)
        self._members: list[Member] = []
        server = [f'masterauth "{_PASSWORD}"', 'save ""', "appendonly yes", "repl-diskless-sync-delay 0"]
        try:
            self.primary = self._add(Member(binary, directory / "primary", server, _PASSWORD, False))
            follows = [*server, f"replicaof 127.0.0.1 {self.primary.port}"]
            self.replica = self._add(Member(binary, directory / "replica", follows, _PASSWORD, False))
            assert until(lambda: self.replica.redis.info("replication")["master_link_status"] == "up")
            watches = [
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 2",
                f'sentinel auth-pass {SERVICE} "{_PASSWORD}"',
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
                f'sentinel sentinel-pass "{_SENTINEL_PASSWORD}"',
            ]
            self.sentinels = [
                self._add(Member(binary, directory / f"sentinel{number}", watches, _SENTINEL_PASSWORD, True))
                for number in range(NUM_SENTINELS)
            ]
            assert until(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))
        except BaseException:
            self.close()
            raise

    @property
    def settings(self) -> ConnectionSettings:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return ConnectionSettings(
            f"redis+sentinel://{hosts}/{SERVICE}", password=_PASSWORD, sentinel_password=_SENTINEL_PASSWORD
        )

    def is_agreed(self, member: Member) -> bool:
        """Whether all sentinels take this one for the primary, and so does it."""
        ports = [int(sentinel.redis.sentinel_get_master_addr_by_name(SERVICE)[1]) for sentinel in self.sentinels]
        return member.answers() and set(ports) == {member.port} and member.role == "master"

    def close(self) -> None:
        for member in reversed(self._members):
            member.close()

    def _add(self, member: Member) -> Member:
        self._members.append(member)
        return member

    def _knows_all(self, sentinel: Member) -> bool:
        known = sentinel.redis.sentinel_master(SERVICE)
        return (known["num-other-sentinels"], known["num-slaves"]) == (NUM_SENTINELS - 1, 1)


@contextlib.contextmanager
def sentinel_group(directory: Path, binary: Path | None) -> Iterator[SentinelGroup]:
    group = SentinelGroup(directory, binary)
    try:
        yield group
    finally:
        group.close()


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(MIN_PORT, MAX_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
