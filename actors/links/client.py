"""The router's end of a link to one worker: asynchronous calls, several in flight, over one encrypted connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from actors.errors import LinkError
from actors.links.codec import FrameError, pack, unpack
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.settings import LinkSettings, milliseconds
from actors.links.stats import LinkStats, count_event, open_monitor
from actors.messages import (
    DraftBatch,
    DraftResult,
    Failure,
    Hello,
    MasksSource,
    Message,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)

Request = Hello | DraftBatch | VerifyBatch | VerifyAhead
Answer = WorkerInfo | DraftResult | VerifyResult | Failure

_ROUND_ANSWER: dict[type, type] = {DraftBatch: DraftResult, VerifyBatch: VerifyResult, VerifyAhead: VerifyResult}
_READS_PER_TURN = 64  # messages read before other work of the event loop gets its turn
_serial = itertools.count()


class AsyncLink:
    """One connection to one worker. Belongs to the event loop it was made in.

    Answers are matched by `round_id`, a `WorkerInfo` with the oldest waiting `Hello`. A lost connection fails the calls
    in flight at once and reconnects by itself. Nothing is resent: a request is sent once or not at all. The event loop
    reads the socket in callbacks, so a call costs one future and one timer, and no task.
    """

    def __init__(self, address: LinkAddress, client_keys: LinkKeys, settings: LinkSettings | None = None) -> None:
        """Starts connecting and returns at once."""
        self.address = address
        self.stats = LinkStats()
        self._settings = settings or LinkSettings()
        self._loop = asyncio.get_running_loop()
        self._rounds: dict[int, tuple[type, asyncio.Future[Answer]]] = {}  # round id -> kind of answer, its future
        self._hellos: deque[asyncio.Future[Answer]] = deque()
        self._up = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

        # All links of a process share one context, hence one I/O thread.
        self._socket: zmq.Socket[bytes] = zmq.Socket(zmq.Context.instance(), zmq.DEALER)
        self._settings.apply(self._socket)
        self._socket.ipv6 = "[" in address.endpoint
        self._socket.immediate = True  # nothing is queued for a worker that is not there
        self._socket.reconnect_ivl = milliseconds(self._settings.reconnect_s)
        self._socket.reconnect_ivl_max = milliseconds(self._settings.reconnect_max_s)
        self._socket.curve_serverkey = address.server_public_key
        self._socket.curve_publickey = client_keys.public
        self._socket.curve_secretkey = client_keys.secret
        self._monitor = open_monitor(self._socket, f"link-monitor-{next(_serial)}")
        try:
            self._socket.connect(address.endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise LinkError(f"cannot connect to {address.endpoint!r}: {error}") from None
        self._readers = (self._socket.fileno(), self._monitor.fileno())
        self._loop.add_reader(self._readers[0], self._read_answers)
        self._loop.add_reader(self._readers[1], self._read_events)
        self._loop.call_soon(self._read_events)  # events before add_reader wake nobody

    @property
    def is_alive(self) -> bool:
        """Whether the connection is up. A vanished worker is noticed within heartbeat_s + dead_after_s."""
        return self._up.is_set() and not self._closed

    @property
    def in_flight(self) -> int:
        """Calls that wait for their answer."""
        return len(self._rounds) + len(self._hellos)

    async def call(self, message: Request, timeout_s: float, masks: MasksSource | None = None) -> Answer:
        """Send a request and wait for its answer; `timeout_s` includes the wait for a connection that is not up.

        masks: called when the request is on its way; what it gives is sent behind it. What it raises ends the call.
        Raises LinkError if there is no answer in time, the connection is lost, the queue is full, or a round of that
        id is already in flight; `FrameError` if the message cannot go on the wire. A `Failure` is returned.
        """
        frame = pack(message, self._settings.max_frame_bytes)
        started = self._loop.time()
        if not self._up.is_set():
            await self._wait_until_up(timeout_s)
        if self._closed:
            raise LinkError(f"the link to {self.address.endpoint} is closed")
        if self.in_flight >= self._settings.queue_messages:
            self._refuse_full()
        round_id = None if isinstance(message, Hello) else message.round_id
        if round_id in self._rounds:
            raise LinkError(f"round_id {round_id} is already in flight to {self.address.endpoint}")
        self._send(frame)

        future: asyncio.Future[Answer] = self._loop.create_future()
        if round_id is None:
            self._hellos.append(future)
        else:
            self._rounds[round_id] = (_ROUND_ANSWER[type(message)], future)
        timer = self._loop.call_at(started + timeout_s, self._expire, future, timeout_s)
        try:
            if masks is not None:
                self._send(pack(masks(), self._settings.max_frame_bytes))
            self._read_answers()  # sending may have used up the wake-up of an answer that has arrived
            return await future
        finally:
            timer.cancel()
            if round_id is not None:
                self._rounds.pop(round_id, None)
            elif future in self._hellos:
                self._hellos.remove(future)

    def close(self) -> None:
        """Fail the calls in flight and close the connection. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        for reader in self._readers:
            self._loop.remove_reader(reader)
        self._up.set()  # wakes callers that wait for the connection; they find the link closed
        self._fail_all("was closed")
        self._close_sockets()

    async def _wait_until_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            self.stats.timeouts += 1
            raise LinkError(f"no connection to {self.address.endpoint} within {timeout_s:g} s") from None

    def _send(self, frame: bytes) -> None:
        # Reading EVENTS updates the socket's state. It may notice a lost connection only when it sends.
        has_room = bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)
        try:
            if has_room:
                self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            has_room = False
        if not has_room:
            self._read_answers()  # asking may have used up the wake-up of an answer that has arrived
            self._refuse_full()
        self.stats.sent += 1
        self.stats.sent_bytes += len(frame)

    def _refuse_full(self) -> None:
        self.stats.drop("full")
        raise LinkError(
            f"{self.address.endpoint} takes no more requests; {self.in_flight} are in flight, "
            f"the limit is {self._settings.queue_messages}"
        )

    def _expire(self, future: asyncio.Future[Answer], timeout_s: float) -> None:
        if not future.done():
            self.stats.timeouts += 1
            future.set_exception(LinkError(f"no answer from {self.address.endpoint} within {timeout_s:g} s"))

    def _read_answers(self) -> None:
        # Reads until the socket is empty: the descriptor signals changes, not unread messages.
        if self._closed:
            return
        for _ in range(_READS_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._read(frames)
        self._loop.call_soon(self._read_answers)

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            self.stats.drop("garbage")
            return
        try:
            message = unpack(frames[0], self._settings.max_frame_bytes)
        except FrameError as error:
            self.stats.drop(error.reason)
            return
        self.stats.received += 1
        self.stats.received_bytes += len(frames[0])
        self._deliver(message)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, WorkerInfo):
            future = self._hellos.popleft() if self._hellos else None
        elif isinstance(message, DraftResult | VerifyResult | Failure):
            kind, future = self._rounds.get(message.round_id, (Failure, None))
            if future is not None and not isinstance(message, kind | Failure):
                self.stats.drop("unexpected")
                return
        else:
            self.stats.drop("unexpected")
            return
        if future is None or future.done():
            self.stats.drop("late")
        else:
            future.set_result(message)

    def _read_events(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                return
            count_event(self.stats, event)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up.set()
            elif event == zmq.EVENT_DISCONNECTED:
                self._read_answers()  # answers that arrived before the disconnection
                self._up.clear()
                self._fail_all("was lost")
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._connect_again_later()

    def _connect_again_later(self) -> None:
        # ZeroMQ never retries a refused connection, but the worker may just not know our key yet.
        if self._retry is None:
            self._retry = self._loop.call_later(self._settings.reconnect_max_s, self._connect_again)

    def _connect_again(self) -> None:
        self._retry = None
        if self._up.is_set():
            return
        with contextlib.suppress(zmq.ZMQError):  # it may have forgotten the endpoint already
            self._socket.disconnect(self.address.endpoint)
        self._socket.connect(self.address.endpoint)
        self._read_events()

    def _fail_all(self, why: str) -> None:
        for future in [*self._hellos, *(future for _, future in self._rounds.values())]:
            if not future.done():
                future.set_exception(LinkError(f"the link to {self.address.endpoint} {why}"))

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
