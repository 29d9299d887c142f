"""The registry file: changes are appended to it under a lock by the command line, and followed by gateways.

It is rewritten atomically when more than half of it is out of date, or if it has the first format.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster.errors import ConfigError
from cluster.tenants.errors import RegistryUnusable
from cluster.tenants.registry import (
    Changes,
    Registry,
    change_lines,
    is_first_format,
    parse_changes,
    parse_registry,
    registry_lines,
)

logger = logging.getLogger(__name__)

_CHECK_PERIOD_S = 1.0
_IDLE_S = 3.0  # without a question: what is known may be old, and whoever asks now waits for the file
_MUCH_BYTES = 128 * 1024  # some 5 ms to read
_MODE = 0o600
_SPARE_LINES = 1000  # outdated lines that a small file may have before it is rewritten
_ENDING_BYTES = 4096  # last bytes read, kept to recognise the same file
_Signature = tuple[int, int, int]


def read_registry(path: Path) -> Registry | None:
    """None: there is no such file. Raises RegistryUnusable."""
    return RegistryFile(path).read()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of writers, beside the file itself: others may have another link to it. Raises ConfigError if the
    directory cannot be written."""
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class _Read:
    """What has been read of a file, and how to recognise it."""

    registry: Registry
    inode: tuple[int, int] | None  # None: nothing is ever appended to this file
    changed_ns: int  # when the file was changed last
    num_bytes: int
    num_lines: int
    ending: bytes  # the last bytes that were read

    def goes_on_in(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Whether it is the same file with at most lines appended. Any other change means that it was edited."""
        if self.inode != (status.st_dev, status.st_ino) or status.st_size < self.num_bytes:
            return False
        if status.st_size == self.num_bytes and status.st_ctime_ns != self.changed_ns:
            return False
        file.seek(self.num_bytes - len(self.ending))
        return file.read(len(self.ending)) == self.ending


class RegistryFile:
    """Reads a whole file once, and later what has been appended to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: _Read | None = None

    def read(self) -> Registry | None:
        """None: there is no such file. Raises RegistryUnusable."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._last is not None and self._last.goes_on_in(file, status):
                    self._last = self._with_lines(self._last, file.read(), status)
                else:
                    file.seek(0)
                    self._last = self._whole(file.read(), status)
        except (FileNotFoundError, NotADirectoryError):
            self._last = None
            return None
        except OSError as error:
            raise RegistryUnusable(f"{self._path}: cannot be read: {error.strerror}") from None
        return self._last.registry

    def has_much_to_read(self) -> bool:
        """Whether the next `read` takes long."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_known = self._last is not None and self._last.goes_on_in(file, status)
        except OSError:
            return False
        return status.st_size - (self._last.num_bytes if self._last and is_known else 0) > _MUCH_BYTES

    def write(self, changes: Changes) -> None:
        """Append changes to what was read, or rewrite the file. The caller must hold the writers' lock. Raises
        ConfigError."""
        last = self._last
        registry = (Registry() if last is None else last.registry).changed(changes)
        if last is None or last.inode is None or last.num_lines > 2 * len(registry) + _SPARE_LINES:
            write_registry(self._path, registry)
            return
        try:
            _append(self._path, last.num_bytes, change_lines(changes))
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from None

    def _whole(self, data: bytes, status: os.stat_result) -> _Read:
        """The next change rewrites a file whose last line is incomplete."""
        registry = parse_registry(data, str(self._path))
        is_whole = data.endswith(b"\n") and not is_first_format(data)
        inode = (status.st_dev, status.st_ino) if is_whole else None
        return _Read(registry, inode, status.st_ctime_ns, len(data), data.count(b"\n"), data[-_ENDING_BYTES:])

    def _with_lines(self, last: _Read, data: bytes, status: os.stat_result) -> _Read:
        """data: what follows. A line that is being written is left for the next time."""
        data = data[: data.rfind(b"\n") + 1]
        if not data:
            return last
        lines = data.splitlines()
        try:
            registry = last.registry.changed(parse_changes(lines, str(self._path)))
        except ValueError as error:
            raise RegistryUnusable(f"{self._path}: {error}") from None
        num_bytes, num_lines = last.num_bytes + len(data), last.num_lines + len(lines)
        return _Read(
            registry, last.inode, status.st_ctime_ns, num_bytes, num_lines, (last.ending + data)[-_ENDING_BYTES:]
        )


def write_registry(path: Path, registry: Registry) -> None:
    """Replace the file atomically, also behind a symbolic link. It keeps its owner and mode as far as this user may set
    them; else it has this user's, and mode 0600. Raises ConfigError."""
    temporary, path = None, path.resolve()
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 0600
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                former = path.stat()
                os.fchown(descriptor, former.st_uid, former.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(former.st_mode))
            file.write(registry_lines(registry))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _append(path: Path, num_bytes: int, lines: bytes) -> None:
    """Write lines behind the first `num_bytes`: what a writer that was killed left there is cut off. All or nothing."""
    with path.open("r+b", buffering=0) as file:
        file.truncate(num_bytes)
        file.seek(num_bytes)
        try:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(num_bytes)
            raise


class RegistryFollower:
    """The last valid contents of a registry file; they stay if the file becomes unreadable or disappears."""

    def __init__(self, path: Path, on_failure: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """on_failure: called once for each unusable state of the file. Raises ConfigError if it is unusable now."""
        self._path = path
        self._on_failure = on_failure
        self._clock = clock
        self._signature = _signature(path)
        self._checked_at = clock()
        self._file = RegistryFile(path)
        self._registry = self._file.read()
        self._reading: threading.Thread | None = None

    def current(self, afresh: bool = False) -> Registry | None:
        """Checks the file at most once a second, afresh: now. None: there has never been one.

        An event loop may ask, so a thread reads much that is new, and until it has, the answer is the former one. After
        a while without a question the answer is what the file says now."""
        now = self._clock()
        if self._reading is not None and self._reading.is_alive():
            return self._registry
        idle_s = now - self._checked_at
        if not afresh and idle_s < _CHECK_PERIOD_S:
            return self._registry
        self._checked_at = now
        signature = _signature(self._path)  # before reading, so that a concurrent write is seen next time
        if signature == self._signature:
            return self._registry
        self._signature = signature
        if idle_s < _IDLE_S and self._file.has_much_to_read():
            self._reading = threading.Thread(target=self._read, name="tenants", daemon=True)
            self._reading.start()
        else:
            self._read()
        return self._registry

    def _read(self) -> None:
        try:
            registry = self._file.read()
            if registry is None and self._registry is not None:
                raise ConfigError(f"{self._path}: is gone")
        except ConfigError as error:
            logger.error("%s; going on with the tenants read before", error)
            self._on_failure()
        else:
            self._registry = registry


def _signature(path: Path) -> _Signature | None:
    """Identity of the file behind symbolic links: Kubernetes updates a mounted Secret by changing the link. The time is
    also of changes to owner and mode, by which a file becomes readable."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino
