"""Links: two processes, real sockets, real keys; bad peers, dead peers and silent peers.

Covers `actors.links.gate` and `actors.links.stats`, too.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from actors.errors import LinkError
from actors.links.client import AsyncLink
from actors.links.codec import MAGIC, FrameError, pack
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import LinkServer, Peer
from actors.links.settings import LinkSettings
from actors.messages import (
    DraftBatch,
    DraftItem,
    DraftResult,
    Failure,
    Hello,
    Message,
    SequenceDelta,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)

INFO = WorkerInfo("target", 7, 100, 2048, 16, 64)
ROUTER_KEYS = LinkKeys.generate()
PATIENCE_S = 20.0  # how long a busy machine may take for what should be immediate

Handler = Callable[[LinkServer, Peer, Message], None]


def answer(server: LinkServer, peer: Peer, message: Message) -> None:
    if isinstance(message, Hello):
        server.send(peer, INFO)
    elif isinstance(message, VerifyBatch):
        server.send(peer, VerifyResult(message.round_id, [], rows=len(message.items)))
    elif isinstance(message, DraftBatch):
        server.send(peer, DraftResult(message.round_id, [item.delta.seq_id for item in message.items], []))


@contextmanager
def working(
    handler: Handler = answer, settings: LinkSettings | None = None, allowed: tuple[bytes, ...] = (ROUTER_KEYS.public,)
) -> Iterator[LinkServer]:
    """A server whose loop runs in a thread; the block ends with the loop alive, or the test fails."""
    server = LinkServer(LinkKeys.generate(), allowed, settings=settings)
    stop = threading.Event()
    failures: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                read = server.recv(0.02)
                if read is not None:
                    handler(server, *read)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()
        server.close()
    assert not failures


@contextmanager
def linked(
    address: LinkAddress, keys: LinkKeys = ROUTER_KEYS, settings: LinkSettings | None = None
) -> Iterator[AsyncLink]:
    link = AsyncLink(address, keys, settings)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def raw_peer(address: LinkAddress, keys: LinkKeys | None = ROUTER_KEYS) -> Iterator[zmq.Socket[bytes]]:
    """A client that sends what it likes. keys None: no encryption at all."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    if keys is not None:
        peer.curve_publickey, peer.curve_secretkey = keys.public, keys.secret
        peer.curve_serverkey = address.server_public_key
    peer.connect(address.endpoint)
    try:
        yield peer
    finally:
        peer.close()
        context.term()


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    """Waits for a condition; returns how many seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "waited in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - started


async def test_requests_get_their_answers() -> None:
    with working() as server, linked(server.address) as link:
        assert await link.call(Hello(), PATIENCE_S) == INFO
        assert link.is_alive
        delta = SequenceDelta(5, 0, np.arange(3, dtype=np.int32))
        drafted = await link.call(DraftBatch(9, [DraftItem(delta, 4)]), PATIENCE_S)
        assert isinstance(drafted, DraftResult)
        assert (drafted.round_id, drafted.seq_ids) == (9, [5])
        assert link.stats.sent == link.stats.received == 2
        assert link.stats.dropped == server.stats.dropped == {}


async def test_answers_out_of_order_find_their_requests() -> None:
    held: list[tuple[Peer, VerifyBatch]] = []

    def answer_backwards(server: LinkServer, peer: Peer, message: Message) -> None:
        assert isinstance(message, VerifyBatch)
        held.append((peer, message))
        if len(held) == 10:
            for holder, batch in reversed(held):
                server.send(holder, VerifyResult(batch.round_id, [], rows=batch.round_id * 2))

    with working(answer_backwards) as server, linked(server.address) as link:
        results = await asyncio.gather(*(link.call(VerifyBatch(index, []), PATIENCE_S) for index in range(10)))
        assert [(result.round_id, result.rows) for result in results if isinstance(result, VerifyResult)] == [
            (index, index * 2) for index in range(10)
        ]
        assert link.in_flight == 0


async def test_several_routers_are_served_by_one_worker() -> None:
    with working() as server:
        links = [AsyncLink(server.address, ROUTER_KEYS) for _ in range(4)]
        calls = [link.call(VerifyBatch(index, []), PATIENCE_S) for link in links for index in range(20)]
        results = await asyncio.gather(*calls)
        assert [result.round_id for result in results if isinstance(result, VerifyResult)] == [*range(20)] * 4
        assert server.stats.admitted == 4
        for link in links:
            link.close()


async def test_a_large_message_passes_whole() -> None:
    tokens = np.arange(2_000_000, dtype=np.int32)
    seen: list[bool] = []

    def look(server: LinkServer, peer: Peer, message: Message) -> None:
        assert isinstance(message, DraftBatch)
        seen.append(bool(np.array_equal(message.items[0].delta.token_ids, tokens)))
        server.send(peer, DraftResult(message.round_id, [], []))

    with working(look) as server, linked(server.address) as link:
        await link.call(DraftBatch(1, [DraftItem(SequenceDelta(1, 0, tokens), 0)]), PATIENCE_S)
        assert seen == [True]


async def test_a_failure_of_the_worker_is_an_answer() -> None:
    def fail(server: LinkServer, peer: Peer, message: Message) -> None:
        assert isinstance(message, VerifyBatch)
        server.send(peer, Failure(message.round_id, "out of memory"))

    with working(fail) as server, linked(server.address) as link:
        assert await link.call(VerifyBatch(3, []), PATIENCE_S) == Failure(3, "out of memory")


async def test_links_work_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public], host="::1") as server, linked(server.address) as link:
        call = asyncio.create_task(link.call(Hello(), PATIENCE_S))
        read = await asyncio.to_thread(server.recv, PATIENCE_S)
        assert read is not None
        server.send(read[0], INFO)
        assert await call == INFO


async def test_a_call_without_an_answer_ends_in_time_and_its_late_answer_is_dropped() -> None:
    held: list[tuple[Peer, Message]] = []

    def hold(server: LinkServer, peer: Peer, message: Message) -> None:
        held.append((peer, message))
        if len(held) == 2:
            for holder, batch in held:
                answer(server, holder, batch)

    with working(hold) as server, linked(server.address) as link:
        await until(lambda: link.is_alive)
        with pytest.raises(LinkError, match=r"no answer .* within 0\.1 s"):
            await link.call(VerifyBatch(1, []), 0.1)
        assert link.in_flight == 0
        result = await link.call(VerifyBatch(2, []), PATIENCE_S)
        assert isinstance(result, VerifyResult)
        assert result.round_id == 2
        assert (link.stats.timeouts, link.stats.dropped) == (1, {"late": 1})


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    with working(lambda *_: None) as server, linked(server.address) as link:
        calls = [asyncio.create_task(link.call(request, PATIENCE_S)) for request in (Hello(), VerifyBatch(1, []))]
        await until(lambda: link.in_flight == 2)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert link.in_flight == 0


async def test_an_answer_of_the_wrong_kind_is_dropped() -> None:
    def confuse(server: LinkServer, peer: Peer, message: Message) -> None:
        server.send(peer, DraftResult(1, [], []))
        server.send(peer, Hello())
        answer(server, peer, message)

    with working(confuse) as server, linked(server.address) as link:
        assert isinstance(await link.call(VerifyBatch(1, []), PATIENCE_S), VerifyResult)
        assert link.stats.dropped == {"unexpected": 2}


async def test_one_round_id_cannot_be_in_flight_twice() -> None:
    with working(lambda *_: None) as server, linked(server.address) as link:
        first = asyncio.create_task(link.call(VerifyBatch(1, []), PATIENCE_S))
        await until(lambda: link.in_flight == 1)
        with pytest.raises(LinkError, match="round_id 1 is already in flight"):
            await link.call(VerifyBatch(1, []), PATIENCE_S)
        first.cancel()


async def test_garbage_from_a_worker_is_dropped_by_the_client() -> None:
    def babble(server: LinkServer, peer: Peer, message: Message) -> None:
        server._socket.send_multipart([peer, b"nonsense"])
        server._socket.send_multipart([peer, b"two", b"parts"])
        answer(server, peer, message)

    with working(babble) as server, linked(server.address) as link:
        assert await link.call(Hello(), PATIENCE_S) == INFO
        assert link.stats.dropped == {"garbage": 2}


async def test_a_full_queue_refuses_the_next_call_at_once() -> None:
    with working(lambda *_: None) as server, linked(server.address, settings=LinkSettings(queue_messages=4)) as link:
        calls = [asyncio.create_task(link.call(VerifyBatch(index, []), PATIENCE_S)) for index in range(4)]
        await until(lambda: link.in_flight == 4)
        with pytest.raises(LinkError, match="takes no more requests; 4 are in flight, the limit is 4"):
            await link.call(Hello(), PATIENCE_S)
        assert link.stats.dropped == {"full": 1}
        for call in calls:
            call.cancel()


async def test_a_client_that_does_not_read_loses_answers_and_holds_up_nobody() -> None:
    settings = LinkSettings(queue_messages=4)
    large = Failure(0, "x" * 1_000_000)
    refused: list[bool] = []

    def flood(server: LinkServer, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello):
            server.send(peer, INFO)
        else:
            refused.extend(not server.send(peer, large) for _ in range(200))

    with working(flood, settings) as server, raw_peer(server.address) as deaf, linked(server.address) as link:
        deaf.send(pack(VerifyBatch(1, [])))
        await until(lambda: len(refused) == 200)
        assert server.stats.dropped == {"full": sum(refused)}
        assert sum(refused) > 0
        assert await link.call(Hello(), PATIENCE_S) == INFO


async def test_what_is_not_a_message_is_dropped_counted_and_not_answered() -> None:
    settings = LinkSettings(max_frame_bytes=1000)
    frame = pack(Hello())
    with working(settings=settings) as server, raw_peer(server.address) as peer, linked(server.address) as link:
        for bad in (b"", b"garbage", frame[:-1], b"\x91" * 900, os.urandom(500)):
            peer.send(bad)
        peer.send_multipart([frame, frame])
        peer.send(MAGIC + b"\xff\xff" + frame[6:])
        peer.send(frame + b"x" * 1000)
        expected = {"garbage": 6, "version": 1, "oversize": 1}
        await until(lambda: server.stats.dropped == expected)
        assert await link.call(Hello(), PATIENCE_S) == INFO
        assert not peer.poll(0)
        assert server.stats.received == 1


async def test_a_frame_far_over_the_limit_costs_the_sender_its_connection() -> None:
    settings = LinkSettings(max_frame_bytes=1000)
    with working(settings=settings) as server, raw_peer(server.address) as peer, linked(server.address) as link:
        peer.send(b"x" * 1_000_000)
        await until(lambda: server.stats.closed == 1)
        assert await link.call(Hello(), PATIENCE_S) == INFO
        assert server.stats.received == 1


async def test_one_recv_does_not_work_off_a_whole_flood_of_garbage() -> None:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server, raw_peer(server.address) as peer:
        for _ in range(50):
            peer.send(b"garbage")
        peer.send(pack(Hello()))
        await asyncio.sleep(0.5)  # until it has all come
        assert server.recv(0.0) is None
        assert server.stats.dropped.get("garbage", 0) <= 1
        read = server.recv(PATIENCE_S)
        assert read is not None
        assert read[1] == Hello()


@pytest.mark.parametrize("keys", [LinkKeys.generate(), None], ids=["another key", "no encryption"])
async def test_a_peer_without_the_clusters_key_is_not_heard(keys: LinkKeys | None) -> None:
    with working() as server, raw_peer(server.address, keys) as stranger:
        stranger.send(pack(Hello()))
        reason = "unauthenticated" if keys else "handshake"
        await until(lambda: server.stats.dropped.get(reason, 0) >= 1)
        assert not stranger.poll(200)
        assert server.stats.admitted == server.stats.received == 0
        with linked(server.address) as link:
            assert await link.call(Hello(), PATIENCE_S) == INFO


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 64, b""])
async def test_a_stranger_on_the_port_does_no_harm(data: bytes) -> None:
    with working() as server:
        port = int(server.address.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            await until(lambda: server.stats.accepted == 1)
            with linked(server.address) as link:
                assert await link.call(Hello(), PATIENCE_S) == INFO
        await until(lambda: server.stats.closed >= 1)
        assert server.stats.accepted - server.stats.admitted == 1


async def test_a_client_that_expects_another_server_key_does_not_connect() -> None:
    with working() as server:
        other = LinkAddress(server.address.endpoint, LinkKeys.generate().public)
        with linked(other) as link:
            with pytest.raises(LinkError, match="no connection"):
                await link.call(Hello(), 0.5)
            assert not link.is_alive
        assert server.stats.received == 0


async def test_a_client_refused_at_first_gets_in_once_its_key_is_admitted() -> None:
    with working(allowed=()) as server, linked(server.address) as link:
        await until(lambda: link.stats.dropped.get("unauthenticated", 0) >= 1)
        assert not link.is_alive
        server.allow([ROUTER_KEYS.public])
        assert await link.call(Hello(), PATIENCE_S) == INFO


async def test_a_key_withdrawn_keeps_new_connections_out_and_old_ones_in() -> None:
    with working() as server, linked(server.address) as link:
        await link.call(Hello(), PATIENCE_S)
        server.allow([LinkKeys.generate().public])
        assert await link.call(Hello(), PATIENCE_S) == INFO
        with linked(server.address) as late:
            await until(lambda: late.stats.dropped.get("unauthenticated", 0) >= 1)
            assert not late.is_alive


async def test_a_client_connects_while_the_worker_computes() -> None:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server, linked(server.address) as link:
        await until(lambda: link.is_alive)  # nobody calls recv here


WORKER = """
import sys
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import Hello, WorkerInfo
server = LinkServer(LinkKeys(*(key.encode() for key in sys.argv[1:3])), [sys.argv[3].encode()])
print(server.address.endpoint, flush=True)
while True:
    read = server.recv(1.0)
    if read is not None and isinstance(read[1], Hello):
        server.send(read[0], WorkerInfo("target", 7, 100, 2048, 16, server.stats.received))
"""


@contextmanager
def worker_process() -> Iterator[tuple[subprocess.Popen[str], LinkAddress]]:
    keys = LinkKeys.generate()
    arguments = [keys.public, keys.secret, ROUTER_KEYS.public]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, *(key.decode() for key in arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, LinkAddress(process.stdout.readline().strip(), keys.public)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_killed_worker_is_noticed_at_once_and_fails_the_calls_in_flight() -> None:
    with worker_process() as (process, address), linked(address) as link:
        await link.call(Hello(), PATIENCE_S)
        call = asyncio.create_task(link.call(VerifyBatch(1, []), PATIENCE_S))  # this worker never answers it
        await until(lambda: link.in_flight == 1)
        started = time.monotonic()
        process.kill()
        with pytest.raises(LinkError, match="was lost"):
            await call
        assert time.monotonic() - started < 2.0
        assert not link.is_alive


async def test_a_worker_that_dies_between_the_look_for_room_and_the_sending_is_a_link_error(monkeypatch) -> None:
    with worker_process() as (process, address), linked(address) as link:
        await link.call(Hello(), PATIENCE_S)
        look = link._socket.get

        def look_and_lose_the_worker(option: int) -> int:
            seen = look(option)
            if option == zmq.EVENTS:
                process.kill()
                process.wait()
                time.sleep(1.0)  # the connection's own thread takes it down meanwhile
            return seen

        monkeypatch.setattr(link._socket, "get", look_and_lose_the_worker)
        with pytest.raises(LinkError, match="takes no more requests"):
            await link.call(DraftBatch(1, []), PATIENCE_S)
        assert link.in_flight == 0


async def test_a_worker_that_freezes_is_noticed_within_two_seconds_and_found_again() -> None:
    with worker_process() as (process, address), linked(address) as link:
        await link.call(Hello(), PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        try:
            assert await until(lambda: not link.is_alive) < 3.0  # 1.6 s and some for a busy machine
        finally:
            process.send_signal(signal.SIGCONT)
        assert isinstance(await link.call(Hello(), PATIENCE_S), WorkerInfo)
        assert link.stats.admitted == 2


async def test_requests_that_a_lost_connection_has_not_carried_are_not_sent_again() -> None:
    tokens = np.zeros(6_000_000, dtype=np.int32)  # more than the buffers of the connection hold
    with worker_process() as (process, address), linked(address) as link:
        await link.call(Hello(), PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        batches = [DraftBatch(index, [DraftItem(SequenceDelta(1, 0, tokens), 0)]) for index in range(3)]
        calls = [link.call(batch, PATIENCE_S) for batch in batches]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        process.send_signal(signal.SIGCONT)
        assert [str(outcome) for outcome in outcomes] == [f"the link to {address.endpoint} was lost"] * 3
        info = await link.call(Hello(), PATIENCE_S)
        assert isinstance(info, WorkerInfo)
        assert info.total_blocks == 2  # this worker counts there what it received: the two Hello


async def test_a_worker_busy_for_longer_than_the_heartbeat_limit_stays_alive() -> None:
    def compute(server: LinkServer, peer: Peer, message: Message) -> None:
        time.sleep(2.5)
        answer(server, peer, message)

    with working(compute) as server, linked(server.address) as link:
        assert await link.call(Hello(), PATIENCE_S) == INFO
        assert link.stats.admitted == 1


async def test_a_call_to_nobody_fails_in_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = LinkAddress(f"tcp://127.0.0.1:{unused.getsockname()[1]}", LinkKeys.generate().public)
        with linked(address) as link:
            with pytest.raises(LinkError, match=r"no connection .* within 0\.2 s"):
                await link.call(Hello(), 0.2)
            assert link.stats.timeouts == 1


async def test_an_answer_to_a_client_that_has_left_is_dropped() -> None:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        with raw_peer(server.address) as client:
            client.send(pack(Hello()))
            read = server.recv(PATIENCE_S)
            assert read is not None
        await until(lambda: server.stats.closed == 1)
        assert server.recv(0.1) is None
        assert not server.send(read[0], INFO)
        assert server.stats.dropped == {"gone": 1}


async def test_closing_a_link_fails_its_calls_and_every_later_one() -> None:
    with working(lambda *_: None) as server:
        link = AsyncLink(server.address, ROUTER_KEYS)
        call = asyncio.create_task(link.call(Hello(), PATIENCE_S))
        await until(lambda: link.in_flight == 1)
        link.close()
        link.close()
        with pytest.raises(LinkError, match="was closed"):
            await call
        with pytest.raises(LinkError, match="is closed"):
            await link.call(Hello(), PATIENCE_S)
        assert not link.is_alive


async def test_closing_a_link_that_never_connected_ends_the_wait() -> None:
    link = AsyncLink(LinkAddress("tcp://127.0.0.1:9", LinkKeys.generate().public), ROUTER_KEYS)
    call = asyncio.create_task(link.call(Hello(), PATIENCE_S))
    await asyncio.sleep(0.05)
    link.close()
    with pytest.raises(LinkError, match="is closed"):
        await call


async def test_opening_and_closing_leaks_neither_threads_nor_descriptors() -> None:
    async def cycle() -> None:
        with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server, linked(server.address) as link:
            await until(lambda: link.is_alive)

    process = psutil.Process()
    await cycle()  # the shared client context comes into being
    await asyncio.sleep(0.2)
    threads, descriptors = process.num_threads(), process.num_fds()
    for _ in range(10):
        await cycle()
    await until(lambda: process.num_threads() <= threads and process.num_fds() <= descriptors)
    assert not [thread for thread in threading.enumerate() if thread.name == "link-gate"]


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        ("0.0.0.0", "not a wildcard"),
        ("::", "not a wildcard"),
        ("localhost", "must be an IP address"),
        ("192.0.2.1", "cannot listen on 192.0.2.1"),
    ],
)
def test_a_host_that_cannot_be_served_is_refused(host: str, complaint: str) -> None:
    with pytest.raises(LinkError, match=complaint):
        LinkServer(LinkKeys.generate(), [], host=host)
    assert not [thread for thread in threading.enumerate() if thread.name == "link-gate"]


def test_an_answer_that_cannot_go_on_the_wire_is_the_callers_error() -> None:
    settings = LinkSettings(max_frame_bytes=50)
    with (
        LinkServer(LinkKeys.generate(), [], settings=settings) as server,
        pytest.raises(FrameError, match="limit is 50"),
    ):
        server.send(Peer(b"anyone"), Failure(1, "x" * 100))


def test_keys_hide_their_secret_and_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    keys = LinkKeys.generate()
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%r %s", keys, keys)
    assert keys.public.decode() in caplog.text
    assert keys.secret.decode() not in caplog.text
    with pytest.raises(LinkError, match="does not belong"):
        LinkKeys(LinkKeys.generate().public, keys.secret)
    for wrong in (b"", b"short", b"\xff" * 40, b"x" * 41):
        with pytest.raises(LinkError, match="40 characters of Z85"):
            LinkKeys(wrong, keys.secret)
        with pytest.raises(LinkError, match="40 characters of Z85"):
            LinkAddress("tcp://127.0.0.1:1", wrong)
