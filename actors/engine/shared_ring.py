"""Messages from one process to several others of the same machine, through shared memory: a ring of bytes.

The writer copies a message in and then moves its place; a reader copies it out and then moves its own. Readers sleep
until the kernel wakes them (a futex, on Linux; elsewhere they look every 0.1 ms). Processors may show another process
the place before the bytes, so that every piece has a checksum.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

_DIRECTORY = Path("/dev/shm")
_LINE = 8  # words of 8 bytes in a cache line
_PIECE = struct.Struct("<IIQ")  # checksum, bytes, bytes of the message that follow in later pieces
_CHECKSUM_BYTES = 4
_ALIVE_CHECK_S = 0.5
_PAUSE_S = 1e-4
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None


class PeerGone(RuntimeError):
    """A process at the other end has ended."""


class _Ring:
    """Words: bytes ever written and the writer's process, then a line for each reader: bytes read and its process."""

    def __init__(self, file: int, readers: int, capacity: int) -> None:
        self._capacity = capacity
        header = (1 + readers) * _LINE * 8
        self._memory = mmap.mmap(file, header + capacity)
        words = np.frombuffer(self._memory, np.uint64, header // 8).reshape(1 + readers, _LINE)
        self._places, self._processes = words[:, 0], words[:, 1]
        self._bytes = np.frombuffer(self._memory, np.uint8, capacity, header)
        self._address = words.ctypes.data

    def _copy_in(self, place: int, data: bytes) -> None:
        first = place % self._capacity
        end = min(len(data), self._capacity - first)
        source = np.frombuffer(data, np.uint8)
        self._bytes[first : first + end] = source[:end]
        self._bytes[: len(data) - end] = source[end:]

    def _copy_out(self, place: int, size: int) -> bytes:
        first = place % self._capacity
        end = min(size, self._capacity - first)
        return self._bytes[first : first + end].tobytes() + self._bytes[: size - end].tobytes()

    def _wait(self, is_there: Callable[[], bool], place_seen: int, timeout_s: float, others: np.ndarray) -> None:
        """Until is_there, while the writer's place is `place_seen`. Raises TimeoutError and PeerGone."""
        until = time.monotonic() + timeout_s
        checked = time.monotonic()
        while not is_there():
            now = time.monotonic()
            if now > until:
                raise TimeoutError(f"the other end has done nothing for {timeout_s:g} s")
            if now - checked > _ALIVE_CHECK_S:
                check_alive(others)
                checked = now
            _sleep(self._address, place_seen)

    def close(self) -> None:
        """The memory goes with the last process that has it."""
        del self._places, self._processes, self._bytes
        self._memory.close()


class RingWriter(_Ring):
    def __init__(self, readers: int, capacity: int = 4 << 20) -> None:
        """capacity: bytes; larger messages wait until their first pieces are read."""
        directory = _DIRECTORY if _DIRECTORY.is_dir() else None
        file, path = tempfile.mkstemp(prefix="paceline-ring-", dir=directory)
        try:
            os.ftruncate(file, (1 + readers) * _LINE * 8 + capacity)
            super().__init__(file, readers, capacity)
        finally:
            os.close(file)
        self.path = Path(path)
        self._processes[0] = os.getpid()

    def hide(self) -> None:
        """Call it when all readers have opened the ring: unlinks it, so that no other process can open it and nothing
        is left behind."""
        self.path.unlink(missing_ok=True)

    def check_readers(self) -> None:
        """Raises PeerGone if a reader has ended."""
        check_alive(self._processes[1:])

    def write(self, message: bytes, timeout_s: float) -> None:
        """To all readers. Raises TimeoutError when one does not make room, PeerGone when it has ended."""
        most = self._capacity // 2 - _PIECE.size
        begin = 0
        while True:
            data = message[begin : begin + most]
            begin += len(data)
            self._write_piece(data, len(message) - begin, timeout_s)
            if begin >= len(message):
                return

    def _write_piece(self, data: bytes, left: int, timeout_s: float) -> None:
        size, place = _PIECE.size + len(data), int(self._places[0])
        free_at = place + size - self._capacity  # where the slowest reader must have come
        if int(self._places[1:].min()) < free_at:
            self._wait(lambda: int(self._places[1:].min()) >= free_at, -1, timeout_s, self._processes[1:])
        head = _PIECE.pack(0, len(data), left)[_CHECKSUM_BYTES:]
        self._copy_in(place, _checksum(place, head, data).to_bytes(_CHECKSUM_BYTES, "little") + head + data)
        self._places[0] = place + size
        _wake(self._address)


class RingReader(_Ring):
    def __init__(self, path: Path, index: int, readers: int, capacity: int = 4 << 20) -> None:
        """index: 0 .. readers - 1. Others as for the writer. Raises OSError."""
        file = os.open(path, os.O_RDWR)
        try:
            super().__init__(file, readers, capacity)
        finally:
            os.close(file)
        self._own = 1 + index
        self._processes[self._own] = os.getpid()

    def read(self, timeout_s: float) -> bytes:
        """The next message. Raises TimeoutError when none comes, PeerGone when the writer has ended."""
        pieces: list[bytes] = []
        while True:
            data, left = self._read_piece(timeout_s)
            pieces.append(data)
            if not left:
                return b"".join(pieces)

    def _read_piece(self, timeout_s: float) -> tuple[bytes, int]:
        place = int(self._places[self._own])
        found: tuple[bytes, int] | None = None

        def is_there() -> bool:
            nonlocal found
            if int(self._places[0]) == place:
                return False
            head = self._copy_out(place, _PIECE.size)
            checksum, size, left = _PIECE.unpack(head)
            if size > self._capacity:  # not yet the bytes that were written
                return False
            data = self._copy_out(place + _PIECE.size, size)
            if _checksum(place, head[_CHECKSUM_BYTES:], data) != checksum:
                return False
            found = data, left
            return True

        self._wait(is_there, place, timeout_s, self._processes[:1])
        assert found is not None
        self._places[self._own] = place + _PIECE.size + len(found[0])
        return found


def _checksum(place: int, head: bytes, data: bytes) -> int:
    """The checksum of a piece and its place, so that what lay there before does not pass for it."""
    return zlib.crc32(data, zlib.crc32(head, place & 0xFFFFFFFF))


def check_alive(processes: np.ndarray) -> None:
    """Raises PeerGone if one of these has ended. 0: not yet there."""
    for process in filter(None, processes.tolist()):
        try:
            has_ended = psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            has_ended = True
        if has_ended:
            raise PeerGone(f"process {process} has ended")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True) if _FUTEX_CALL is not None else None
_PATIENCE = _Timespec(0, 200_000_000)


def _sleep(address: int, seen: int) -> None:
    """Until the word at this address is no longer `seen`, or a little while; negative: a little while."""
    if _libc is None or seen < 0:
        time.sleep(_PAUSE_S)
        return
    word = ctypes.c_uint32(seen & 0xFFFFFFFF)
    _libc.syscall(_FUTEX_CALL, ctypes.c_void_p(address), _FUTEX_WAIT, word, ctypes.byref(_PATIENCE), None, 0)


def _wake(address: int) -> None:
    if _libc is not None:
        _libc.syscall(_FUTEX_CALL, ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYONE, None, None, 0)
