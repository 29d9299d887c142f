"""A TCP proxy between a client and a server that fails as networks do."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_CHUNK_BYTES = 65536
_PAUSE_S = 0.01


class BadNetwork:
    """`port` leads to a server's port on loopback. Faults hold for all connections, old and new, until `mend`."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._answer_bytes: int | None = None  # bytes of each answer that pass before the connection is reset
        self._slow_bytes: int | None = None  # that come through at once, every `_PAUSE_S`
        self._is_silent = False
        self._is_started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="bad-network", daemon=True)
        self._thread.start()
        assert self._is_started.wait(20)

    def cut(self, answer_bytes: int = 0) -> None:
        """Reset every connection after so many bytes of an answer."""
        self._answer_bytes = answer_bytes

    def fall_silent(self) -> None:
        """Accept connections and what comes on them, and bring nothing anywhere: half-open connections."""
        self._is_silent = True

    def slow_down(self, chunk_bytes: int) -> None:
        """Let so few bytes through at once, with a pause after them."""
        self._slow_bytes = chunk_bytes

    def mend(self) -> None:
        self._answer_bytes = self._slow_bytes = None
        self._is_silent = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_started.set()
        self._loop.run_forever()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        server_writer = None
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._writers.add(server_writer)
            await asyncio.gather(
                self._carry(reader, server_writer, is_answer=False), self._carry(server_reader, writer, is_answer=True)
            )
        except OSError:
            pass
        finally:
            for end in (writer, server_writer):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        while data := await reader.read(self._slow_bytes or _CHUNK_BYTES):
            if self._is_silent:
                continue
            if self._answer_bytes is not None and is_answer:
                writer.write(data[: self._answer_bytes])
                await writer.drain()
                break
            writer.write(data)
            await writer.drain()
            if self._slow_bytes is not None:
                await asyncio.sleep(_PAUSE_S)
        raise ConnectionError


@contextlib.contextmanager
def bad_network(server_port: int) -> Iterator[BadNetwork]:
    network = BadNetwork(server_port)
    try:
        yield network
    finally:
        network.close()
