"""Index files shared by the processes of a node: the first process that needs an index builds it, the others map it.

    DIRECTORY/<index>-<content>/   a corpus index; index: `index_name`, content: digest of its segments; 32 hex digits
    DIRECTORY/.building-*          being written
    DIRECTORY/lock-*               locks of builders

They hold decrypted tokens, so only the owner may enter the directory, and by default it is in memory, not on disk. A
removed file stays usable for processes that have mapped it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cache_service.automata.corpus_index import CorpusHeader, open_index, write_index
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.errors import CorpusError
from cache_service.formats.store_keys import StoreKeys
from cache_service.store.private_directory import is_private_directory

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_BUILDING = ".building-"
_NUM_LOCKS = 64
_SHARED_MEMORY = Path("/dev/shm")


def default_directory() -> Path | None:
    """A directory of this user in shared memory; None where there is no /dev/shm."""
    return _SHARED_MEMORY / f"paceline-{os.getuid()}" if _SHARED_MEMORY.is_dir() else None


def index_name(keys: StoreKeys) -> str:
    """The directory name of a namespace's index."""
    return digest_of([keys.fingerprint, keys.namespace])


def digest_of(parts: list[str]) -> str:
    """32 hex digits."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


class IndexFiles:
    """Index files in one directory. No method raises for a fault of the file system; then nothing is shared."""

    def __init__(self, directory: Path | None) -> None:
        """directory: created if missing; not used if other users may enter it. None: share nothing."""
        self.directory = directory if directory is not None and is_private_directory(directory) else None

    def open(self, index: str, content: str, *, verify: bool = True) -> StaticAutomaton | None:
        """The mapped automaton of an index; None if there is none.

        verify: check it first, about a second per gigabyte; only its writer need not.
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
        """True: the caller may build the index within the context. False: another process builds it."""
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
        """Share an index that the caller has claimed. False if there is no room or it cannot be written."""
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
        """Remove all other files of an index; None: all files."""
        for path in self._entries():
            if path.name.startswith(f"{index}-") and path.name != f"{index}-{content}":
                _remove(path)

    def remove(self, index: str, content: str) -> None:
        path = self._path(index, content)
        if path is not None:
            _remove(path)

    def touch(self, index: str, content: str) -> None:
        """Mark as used, see `sweep`."""
        path = self._path(index, content)
        if path is not None:
            with contextlib.suppress(OSError):
                os.utime(path)

    def sweep(self, unused_s: float) -> None:
        """Remove files not touched for `unused_s` seconds, which ended processes left behind."""
        oldest = time.time() - unused_s
        for path in self._entries():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    _remove(path)

    def _path(self, index: str, content: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{index}-{content}"

    def _entries(self) -> list[Path]:
        """Directories made by this class, in any process."""
        if self.directory is None:
            return []
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        return [self.directory / name for name in names if _NAME.fullmatch(name) or name.startswith(_BUILDING)]

    def _lock(self, directory: Path, index: str) -> int:
        """A descriptor that holds the lock, or -1. Indexes share a fixed number of locks, which reveal no names."""
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


def _remove(path: Path) -> None:
    """Rename before deleting, so that no process opens a partly deleted index."""
    with contextlib.suppress(OSError):
        if not path.name.startswith(_BUILDING):
            path = path.rename(path.with_name(f"{_BUILDING}removed-{os.getpid()}-{time.monotonic_ns()}"))
        shutil.rmtree(path)
