"""The registry file: written atomically under a lock by the command line, followed by gateways."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.errors import ConfigError
from cluster.tenants.errors import RegistryUnusable
from cluster.tenants.registry import Registry, parse_registry

logger = logging.getLogger(__name__)

_CHECK_PERIOD_S = 1.0
_MODE = 0o600
_Signature = tuple[int, int, int]


def read_registry(path: Path) -> Registry | None:
    """None: there is no such file. Raises RegistryUnusable."""
    try:
        return parse_registry(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RegistryUnusable(f"{path}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of writers. Raises ConfigError if the directory cannot be written."""
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


def write_registry(path: Path, registry: Registry) -> None:
    """Replace the file atomically, with mode 0600. Raises ConfigError."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(registry.model_dump_json(indent=2).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


class RegistryFollower:
    """The last valid contents of a registry file; they stay if the file becomes unreadable or disappears."""

    def __init__(self, path: Path, on_failure: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """on_failure: called once for each unusable state of the file. Raises ConfigError if it is unusable now."""
        self._path = path
        self._on_failure = on_failure
        self._clock = clock
        self._signature = _signature(path)
        self._checked_at = clock()
        self._registry = read_registry(path)

    def current(self, afresh: bool = False) -> Registry | None:
        """Checks the file at most once a second, afresh: now. None: there has never been one."""
        now = self._clock()
        if not afresh and now - self._checked_at < _CHECK_PERIOD_S:
            return self._registry
        self._checked_at = now
        signature = _signature(self._path)  # before reading, so that a concurrent write is seen next time
        if signature == self._signature:
            return self._registry
        self._signature = signature
        try:
            registry = read_registry(self._path)
            if registry is None and self._registry is not None:
                raise ConfigError(f"{self._path}: is gone")
        except ConfigError as error:
            logger.error("%s; going on with the tenants read before", error)
            self._on_failure()
        else:
            self._registry = registry
        return self._registry


def _signature(path: Path) -> _Signature | None:
    """Identity of the file behind symbolic links: Kubernetes updates a mounted Secret by changing the link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
