"""Has the logs of all processes of a node read once.

The process that holds the lock has them read by a `LogPump` or `ClusterPump` and tells the others over a Unix socket.
When it ends, or loses the server, another one takes its place.

    DIRECTORY/feed-*.lock, feed-*.socket   one pair for each server, user and version of what is said

Only processes with the same credentials meet, and only the owner may enter the directory. Frames stay encrypted.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from cache_service.errors import CacheError, SettingError
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.cluster_pump import ClusterPump
from cache_service.log.log_pump import Followed, LogPump
from cache_service.log.log_tail import News
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.connection import ConnectionSettings
from cache_service.store.private_directory import is_private_directory
from cache_service.store.store import LogView

log = logging.getLogger(__name__)

_FORMAT = "paceline feed 1"
_SILENCE_S = 5.0  # of the process that reads; then this one asks the server itself
_RETRY_S = 0.1  # doubles up to _MAX_RETRY_S
_MAX_RETRY_S = 10.0
_MAX_LOGS = 4096  # of all processes of a node
_MAX_PEERS = 32
_MAX_REQUEST_BYTES = 4096
_MAX_NEWS_BYTES = 1 << 26
_MAX_UNREAD_BYTES = 1 << 23  # a process that leaves so much unread is dropped
_MAX_PATH_BYTES = 100  # of a Unix socket


class Follow(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Tell me of a log from an entry on. epoch, version: those known there."""

    fingerprint: str
    namespace: str
    area: str
    at_once: Annotated[int, msgspec.Meta(ge=0, le=2**16)]  # as in `Followed`
    every_s: Annotated[float, msgspec.Meta(gt=0)]
    epoch: str | None
    version: int
    cursor: str


class Forget(msgspec.Struct, array_like=True, tag=True, frozen=True):
    name: str


Request = Follow | Forget
_REQUESTS = msgspec.msgpack.Decoder(Request)
_NEWS = msgspec.msgpack.Decoder(News)
_FAULTS = (CacheError, OSError, EOFError, msgspec.MsgspecError, ValueError)


class Listener(Protocol):
    """Called from the feed's thread."""

    def opened(self) -> None:
        """Requests are taken from now on."""

    def told(self, news: News) -> None: ...

    def lost(self) -> bool:
        """Nothing requested is followed any more. Returns whether it was open."""


class NodeFeed:
    """A thread that reads for the node, or is told by the process that does. Faults are not raised."""

    def __init__(self, settings: ConnectionSettings, directory: Path | None, listener: Listener) -> None:
        """directory: created if missing; None: read for this process alone."""
        self._settings = settings
        self._directory = directory
        self._listener = listener
        self._lock = threading.Lock()  # guards the thread's start and end
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        # Used in the thread:
        self._take_request: Callable[[Request], None] | None = None
        self._pump: LogPump | ClusterPump | None = None  # while this process reads
        self._has_work = asyncio.Event()  # for the pump
        self._peers: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._followers: dict[str, dict[asyncio.StreamWriter | None, None]] = {}  # by log; None: this process

    def start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="cache-feed", daemon=True)
                self._thread.start()

    def request(self, request: Request) -> None:
        """Without effect while not open."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._forward, request)

    def close(self, timeout_s: float) -> bool:
        """End the thread; False if it still waits for the server after `timeout_s`."""
        with self._lock:
            self._is_closed = True
            thread, loop, task = self._thread, self._loop, self._task
        if thread is None:
            return True
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._work())

    async def _work(self) -> None:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        path = self._meeting_place()
        breaker = CircuitBreaker(1, _RETRY_S, _MAX_RETRY_S)
        while not self._is_closed:
            try:
                await self._read_or_listen(path)
            except _FAULTS as error:
                log.debug("logs are polled for now: %s", error)
            except Exception:
                log.exception("logs are polled for now")
            self._take_request = None
            if self._listener.lost():
                breaker.succeeded()
            breaker.failed(time.monotonic())
            await asyncio.sleep(breaker.wait_s(time.monotonic()))

    def _meeting_place(self) -> Path | None:
        """Path of lock and socket without their suffixes."""
        directory, settings = self._directory, self._settings
        if directory is None or not is_private_directory(directory):
            return None
        address = settings.address
        identity = [_FORMAT, address, address.password, settings.username, settings.password]
        identity += [settings.ca_file, settings.certificate_file, settings.key_file]
        path = directory / f"feed-{hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()}"
        if len(bytes(path)) > _MAX_PATH_BYTES:
            log.info("each process of this node reads the shared cache: %s is too long for a socket", path)
            return None
        return path

    async def _read_or_listen(self, path: Path | None) -> None:
        if path is None:
            await self._read(None)
            return
        socket = f"{path}.socket"
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await self._listen(socket)
        else:
            await self._read(socket)
        finally:
            os.close(lock)

    def _forward(self, request: Request) -> None:
        if self._take_request is not None:
            with suppress(SettingError):
                self._take_request(request)

    # --- told by the process that reads

    async def _listen(self, socket: str) -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    news = _NEWS.decode(await _frame(reader, _MAX_NEWS_BYTES))
                if self._take_request is None:
                    self._take_request = lambda request: _write(writer, _framed(request))
                    self._listener.opened()
                self._listener.told(news)
        finally:
            writer.transport.abort()

    # --- reading for the node

    async def _read(self, socket: str | None) -> None:
        """Ends with a fault of the server, or of a whole Cluster."""
        pump = (ClusterPump if self._settings.address.mode == "cluster" else LogPump)(self._settings)
        self._pump = pump
        loop, server, descriptor = asyncio.get_running_loop(), None, pump.fileno()
        try:
            loop.add_reader(descriptor, self._has_work.set)
            if socket is not None:
                _remove(socket)
                server = await asyncio.start_unix_server(self._serve, socket, limit=_MAX_REQUEST_BYTES)
            self._take_request = lambda request: self._take(request, None)
            self._listener.opened()
            while True:
                self._has_work.clear()
                for news in pump.news():
                    self._tell(news)
                await asyncio.sleep(0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pump.wait_s()):
                        await self._has_work.wait()
        finally:
            self._pump = None
            if server is not None and socket is not None:
                server.close()
                _remove(socket)
            self._followers.clear()
            loop.remove_reader(descriptor)
            pump.close()
            for peer in self._peers:
                peer.transport.abort()
            serving = [task for task in self._peers.values() if task is not None]
            if serving:
                await asyncio.wait(serving, timeout=_SILENCE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the requests of another process."""
        if self._pump is None or len(self._peers) >= _MAX_PEERS:
            writer.transport.abort()
            return
        self._peers[writer] = asyncio.current_task()
        try:
            self._send(News(""), [writer])
            while True:
                self._take(_REQUESTS.decode(await _frame(reader, _MAX_REQUEST_BYTES)), writer)
        except _FAULTS as error:
            log.debug("a process of this node listens no longer: %s", error)
        finally:
            self._peers.pop(writer, None)
            writer.transport.abort()
            for name in [name for name, followers in self._followers.items() if writer in followers]:
                self._drop(name, writer)

    def _take(self, request: Request, follower: asyncio.StreamWriter | None) -> None:
        if self._pump is None:
            return
        if isinstance(request, Forget):
            self._drop(request.name, follower)
            return
        keys = StoreKeys(request.fingerprint, request.namespace, request.area)
        followed = Followed(keys, request.at_once, request.every_s)
        if followed.name not in self._followers and len(self._followers) >= _MAX_LOGS:
            self._send(News(followed.name), [follower])
            return
        self._followers.setdefault(followed.name, {})[follower] = None
        known = self._pump.follow(followed, LogView(request.epoch, request.version, []), request.cursor)
        if known is not None:
            self._send(known, [follower])
        self._has_work.set()

    def _drop(self, name: str, follower: asyncio.StreamWriter | None) -> None:
        followers = self._followers.get(name, {})
        followers.pop(follower, None)
        if not followers:
            self._followers.pop(name, None)
            if self._pump is not None:
                self._pump.forget(name)

    def _tell(self, news: News) -> None:
        if not news.name:
            self._send(news, [None, *self._peers])
        elif news.after is None:
            self._send(news, self._followers.pop(news.name, {}))
        else:
            self._send(news, self._followers.get(news.name, {}))

    def _send(self, news: News, followers: Iterable[asyncio.StreamWriter | None]) -> None:
        frame = None
        for follower in followers:
            if follower is None:
                self._listener.told(news)
                continue
            frame = frame or _framed(news)
            _write(follower, frame)
            if follower.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                follower.transport.abort()


def _framed(message: Request | News) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.transport.is_closing():  # asyncio would log it
        writer.write(frame)


async def _frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    num_bytes = int.from_bytes(await reader.readexactly(4), "big")
    if num_bytes > max_bytes:
        raise ValueError(f"a frame of {num_bytes} bytes")
    return await reader.readexactly(num_bytes)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
