"""Built indexes as files that the processes of a node share: whoever needs one maps it, the first to need it builds it.

    DIRECTORY/<index>-<content>/   a corpus index; index: whose, as `index_name` has it, content: of which segments, 32
                                   hex digits each
    DIRECTORY/.building-*          one that is being written
    DIRECTORY/lock-*               locks of those who build

They hold decrypted tokens: the directory is its owner's alone and by default in memory, not on a disk. A file that has
been removed stays with those who have mapped it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cache_service.automata.corpus_index import CorpusHeader, open_index, write_index
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.errors import CorpusError
from cache_service.formats.store_keys import StoreKeys

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_BUILDING = ".building-"
_NUM_LOCKS = 64
_SHARED_MEMORY = Path("/dev/shm")


def default_directory() -> Path | None:
    """A directory of this user's in shared memory; None where there is no such thing."""
    return _SHARED_MEMORY / f"paceline-{os.getuid()}" if _SHARED_MEMORY.is_dir() else None


def index_name(keys: StoreKeys) -> str:
    """The directory name of a namespace's index."""
    return digest_of([keys.fingerprint, keys.namespace])


def digest_of(parts: list[str]) -> str:
    """32 hex digits."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class IndexFiles:
    """The files of one directory. No method raises for a fault of the file system: then nothing is shared."""

    def __init__(self, directory: Path | None) -> None:
        """directory: made if need be; one that others may enter is not used. None: nothing is shared."""
        self.directory = directory if directory is not None and _is_ours(directory) else None

    def open(self, index: str, content: str, *, verify: bool = True) -> StaticAutomaton | None:
        """The automaton of an index as it has been written, mapped; None if there is none.

        verify: check it first, about a second a gigabyte: for all but those who have just written it.
        """
        path = self._path(index, content)
        if path is None or not path.is_dir():
            return None
        try:
            return open_index(path, verify=verify).automaton
        except (CorpusError, OSError) as error:
            log.warning("the shared index %s cannot be used and is removed: %s", path, error)
            _remove(path)
            return None

    @contextlib.contextmanager
    def claim(self, index: str) -> Iterator[bool]:
        """Whether the caller may build an index now; False: another process does. Held until the context ends."""
        try:
            descriptor = None if self.directory is None else self._lock(self.directory, index)
        except OSError as error:
            log.warning("the index directory %s cannot be used: %s", self.directory, error)
            descriptor = None
        try:
            yield descriptor != -1
        finally:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)

    def write(self, index: str, content: str, header: CorpusHeader, automaton: StaticAutomaton) -> bool:
        """Let others have it. False if there is no room, or it cannot be written. Write only what you have claimed."""
        path, directory = self._path(index, content), self.directory
        if path is None or directory is None:
            return False
        building = None
        try:
            if 2 * automaton.memory_bytes > shutil.disk_usage(directory).free:
                log.info("an index of %d bytes stays private: no room in %s", automaton.memory_bytes, directory)
                return False
            building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=directory))
            write_index(building, header, automaton)
            building.rename(path)
            return True
        except OSError as error:
            log.warning("an index stays private: %s cannot be written: %s", directory, error)
            if building is not None:
                _remove(building)
            return False

    def keep(self, index: str, content: str | None) -> None:
        """Remove all files of an index but this one; None: all."""
        for path in self._entries():
            if path.name.startswith(f"{index}-") and path.name != f"{index}-{content}":
                _remove(path)

    def remove(self, index: str, content: str) -> None:
        path = self._path(index, content)
        if path is not None:
            _remove(path)

    def touch(self, index: str, content: str) -> None:
        """Say that it is in use."""
        path = self._path(index, content)
        if path is not None:
            with contextlib.suppress(OSError):
                os.utime(path)

    def sweep(self, unused_s: float) -> None:
        """Remove what nobody has touched for so long: what processes left behind that ended."""
        oldest = time.time() - unused_s
        for path in self._entries():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    _remove(path)

    def _path(self, index: str, content: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{index}-{content}"

    def _entries(self) -> list[Path]:
        """Directories that this class has made, whoever's they are."""
        if self.directory is None:
            return []
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        return [self.directory / name for name in names if _NAME.fullmatch(name) or name.startswith(_BUILDING)]

    def _lock(self, directory: Path, index: str) -> int:
        """A descriptor that holds the lock, or -1. One of a fixed number of locks: they leave no trace of names."""
        path = directory / f"lock-{int(index[:8], 16) % _NUM_LOCKS}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _is_ours(directory: Path) -> bool:
    """Whether a directory is there, made if need be, that nobody else can enter."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        log.warning("indexes are not shared: %s cannot be made: %s", directory, error)
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        log.warning("indexes are not shared: %s is not a directory that is this user's alone (mode 0700)", directory)
        return False
    return True


def _remove(path: Path) -> None:
    """First by name, so that nobody opens half of it."""
    with contextlib.suppress(OSError):
        if not path.name.startswith(_BUILDING):
            path = path.rename(path.with_name(f"{_BUILDING}removed-{os.getpid()}-{time.monotonic_ns()}"))
        shutil.rmtree(path)
