"""Limits of HTTP connections, on a real listener: headers, time-outs, framing, and what is not HTTP."""

import asyncio
import json
import socket

import pytest
import uvicorn

from cluster.gateway.door import http_limits
from cluster.gateway.door.http_limits import MAX_HEADER_BYTES, MAX_HEADERS, LimitedHttpProtocol
from paceline_testing.echo_gateway import until

POST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture
async def seen():
    """Bodies that the application has read, as far as they came."""
    return []


@pytest.fixture
async def released():
    """Set when answers on the path /waits may end."""
    return asyncio.Event()


@pytest.fixture
async def connect(seen, released):
    """Opens connections to a server that answers with the number of bytes it has read."""

    async def app(scope, receive, send):
        body = b""
        if scope["path"] == "/refused":
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"1")]})
            await send({"type": "http.response.body", "body": b"r"})
            return
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        seen.append((body, message["type"]))
        text = str(len(body)).encode()
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in range(40):
                await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": part < 39})
            seen.append("large")
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        if scope["path"] == "/waits":
            await released.wait()
        await send({"type": "http.response.body", "body": text})

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=LimitedHttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=60)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    writers = []

    async def connect():
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()
    await server.shutdown(sockets=[listener])


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(http_limits, "HEADERS_WITHIN_S", 0.1)
    monkeypatch.setattr(http_limits, "BODY_PERIOD_S", 0.1)


async def refusal(reader):
    """(status, code of the error object) of an answer after which the connection ends."""
    answer = await asyncio.wait_for(reader.read(), 5)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def answer(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(size)


async def test_requests_within_the_limits_are_answered_one_after_the_other(connect):
    reader, writer = await connect()
    lines = b"".join(b"X-%d: y\r\n" % index for index in range(MAX_HEADERS - 1))
    for large in (lines, b"X-A: " + b"y" * (MAX_HEADER_BYTES - 1024) + b"\r\n", b""):
        writer.write(b"POST / HTTP/1.1\r\n" + large + b"Content-Length: 3000000\r\n\r\n" + b"z" * 3_000_000)
        assert await answer(reader) == (200, b"3000000")
    writer.write(POST + b"z" * 100 + POST + b"z" * 100)  # the second before the first is answered
    assert [await answer(reader), await answer(reader)] == [(200, b"100")] * 2


async def test_beyond_the_limit_of_connections_the_one_that_waited_longest_gives_way(connect, released, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "max_connections", 3)
    idle, unfinished, sending = [await connect() for _ in range(3)]
    unfinished[1].write(b"POST / HTTP/1.1\r\nHost: a\r\n")
    sending[1].write(POST + b"z")
    idle[1].write(b"GET / HTTP/1.1\r\n\r\n")
    assert await answer(idle[0]) == (200, b"0")  # and it waits from now on
    for gone in (unfinished, idle, sending):  # of a body something has come
        _, writer = await connect()
        writer.write(b"GET /waits HTTP/1.1\r\n\r\n")
        if gone is idle:
            assert await asyncio.wait_for(idle[0].read(), 5) == b""
        else:
            assert await refusal(gone[0]) == (503, "too_many_connections")
    released.set()


async def test_connections_that_are_being_answered_do_not_give_way(connect, released, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "max_connections", 2)
    busy = [await connect() for _ in range(2)]
    for reader, writer in busy:
        writer.write(b"GET /waits HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    for _ in range(3):
        reader, writer = await connect()
        head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert "gateway.max_connections" in json.loads(body)["error"]["message"]
        writer.close()
    released.set()
    for reader, _ in busy:
        assert await asyncio.wait_for(reader.readexactly(1), 5) == b"0"


async def test_a_body_in_tiny_chunks_is_read(connect):
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nz\r\n" * 100_000 + b"0\r\n\r\n")
    assert await answer(reader) == (200, b"100000")


@pytest.mark.parametrize(
    "headers",
    [
        b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"X: y\r\n" * 20_000 + b"\r\n",
        b"X: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"X: " + b"y" * 1_000_000,  # and no end
        b"X" * 1_000_000,
    ],
)
async def test_too_many_or_too_large_headers_end_the_connection(connect, seen, headers):
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\n" + headers)
    assert await refusal(reader) == (431, "headers_too_large")
    assert seen == []


async def test_a_long_path_counts_as_a_header(connect):
    reader, writer = await connect()
    writer.write(b"GET /" + b"a" * 1_000_000)
    assert await refusal(reader) == (431, "headers_too_large")


@pytest.mark.parametrize("framing", [b"1;" + b"e" * 1_000_000, b"0\r\nX: " + b"t" * 1_000_000])
async def test_framing_that_does_not_end_is_not_held(connect, framing):
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + framing)
    assert await refusal(reader) == (400, "invalid_http")


@pytest.mark.parametrize(
    "garbage", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n"]
)
async def test_what_is_not_http_gets_an_error_object(connect, garbage):
    reader, writer = await connect()
    writer.write(garbage)
    assert await refusal(reader) == (400, "invalid_http")


async def test_a_client_that_did_not_wait_for_100_continue_is_refused_without_an_error_of_the_application(
    connect, seen
):
    reader, writer = await connect()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"1\r\nz\r\nffffffffffffffffff\r\n")
    assert await refusal(reader) == (400, "invalid_http")
    await until(lambda: seen)
    assert seen[0][1] == "http.disconnect"


async def test_headers_that_come_byte_by_byte_have_a_time_limit(connect, hurry):
    reader, writer = await connect()
    trickle = asyncio.create_task(trickling(writer, b"GET / HTTP/1.1\r\nX: " + b"y" * 200))
    assert await refusal(reader) == (408, "request_timeout")
    trickle.cancel()


async def trickling(writer, data):
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)


async def test_a_connection_that_says_nothing_is_closed(connect, hurry):
    reader, _ = await connect()
    assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_second_request_has_the_same_time_limit_and_an_idle_connection_none(connect, hurry):
    reader, writer = await connect()
    for _ in range(2):
        writer.write(POST + b"z" * 100)
        assert await answer(reader) == (200, b"100")
        await asyncio.sleep(0.25)
    writer.write(b"GET / HTTP/1.1\r\nX")
    assert await refusal(reader) == (408, "request_timeout")


@pytest.mark.parametrize("trickles", [False, True])
async def test_a_body_that_stalls_or_trickles_ends_the_connection(connect, hurry, seen, trickles):
    reader, writer = await connect()
    writer.write(POST)
    trickle = asyncio.create_task(trickling(writer, b"z" * 99 if trickles else b"z"))
    assert await refusal(reader) == (408, "request_timeout")
    trickle.cancel()
    await until(lambda: seen)
    assert seen[0][1] == "http.disconnect"  # so that nobody waits for the rest


async def test_an_answer_may_take_longer_than_the_time_limits(connect, hurry):
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + b"z" * 150_000)
    await asyncio.sleep(0.15)
    writer.write(b"z" * 150_000)
    assert await answer(reader) == (200, b"300000")


async def test_a_client_that_sends_on_after_its_refusal_sees_it_and_may_not_go_on_for_ever(connect, monkeypatch):
    reader, writer = await connect()
    writer.write(b"POST /refused HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n" + b"z" * 3_000_000)
    assert await answer(reader) == (413, b"r")
    writer.write(POST + b"z" * 100)
    assert await answer(reader) == (200, b"100")
    monkeypatch.setattr(http_limits, "_MAX_DROPPED_BYTES", 2_000_000)
    writer.write(b"POST /refused HTTP/1.1\r\nContent-Length: 900000000\r\n\r\n")
    assert await answer(reader) == (413, b"r")
    with pytest.raises(ConnectionError):
        await flood(writer)


async def flood(writer):
    for _ in range(1000):
        writer.write(b"z" * 300_000)
        await writer.drain()


async def test_a_client_that_does_not_read_its_answer_loses_the_connection(connect, seen, monkeypatch):
    monkeypatch.setattr(http_limits, "READ_PERIOD_S", 0.2)
    reader, writer = await connect()
    writer.write(b"GET /large HTTP/1.1\r\n\r\n")
    await until(lambda: "large" in seen)  # which no longer waits for the client
    size = 0
    while part := await asyncio.wait_for(reader.read(1 << 20), 5):
        size += len(part)
    assert size < 30_000_000  # what was on the way


async def test_a_client_that_reads_slowly_gets_its_whole_answer(connect, monkeypatch):
    monkeypatch.setattr(http_limits, "READ_PERIOD_S", 0.5)
    reader, writer = await connect()
    writer.write(b"GET /large HTTP/1.1\r\n\r\n")
    size, begun = 0, asyncio.get_running_loop().time()
    while part := await asyncio.wait_for(reader.read(1 << 20), 5):
        size += len(part)
        if part.endswith(b"0\r\n\r\n"):
            break
        await asyncio.sleep(0.005)
    assert size > 40_000_000
    assert asyncio.get_running_loop().time() - begun > 0.6  # longer than an answer may wait


@pytest.mark.parametrize("early", [b"\r\n", b"GET / HTTP/1.1\r\nX"])
async def test_what_comes_while_an_answer_is_being_sent_does_not_cut_it(connect, hurry, seen, released, early):
    reader, writer = await connect()
    writer.write(b"GET /waits HTTP/1.1\r\n\r\n")
    await until(lambda: seen)
    writer.write(early)
    await asyncio.sleep(0.15)
    released.set()
    assert await answer(reader) == (200, b"0")
    if early == b"\r\n":  # no request
        assert await asyncio.wait_for(reader.read(), 5) == b""
    else:
        assert await refusal(reader) == (408, "request_timeout")


async def test_a_pipelined_body_that_stalls_does_not_cut_the_answer_before_it(connect, hurry, seen, released):
    reader, writer = await connect()
    writer.write(b"GET /waits HTTP/1.1\r\n\r\n")
    await until(lambda: seen)
    writer.write(POST + b"z")
    await asyncio.sleep(0.15)
    released.set()
    assert await answer(reader) == (200, b"0")
    assert await refusal(reader) == (408, "request_timeout")


@pytest.mark.parametrize("body", [b"", b"Content-Length: 4\r\n\r\nbody"])
async def test_an_upgrade_to_websocket_is_refused(connect, seen, body):
    reader, writer = await connect()
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + upgrade + (body or b"\r\n"))
    assert await refusal(reader) == (400, "upgrade_not_supported")
    assert seen == []


async def test_another_upgrade_is_ignored_unless_the_request_has_a_body(connect, seen):
    """Java's client asks for h2c with its first request."""
    reader, writer = await connect()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n" + upgrade + b"\r\n")
        assert await answer(reader) == (200, b"0")
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\n" + upgrade + b"Content-Length: 4\r\n\r\nbody")
    assert await refusal(reader) == (400, "upgrade_not_supported")
    assert len(seen) == 2
