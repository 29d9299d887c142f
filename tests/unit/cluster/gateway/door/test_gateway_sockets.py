"""Calls from a proxy to a gateway of its node: both ends of the socket, with an application of the test's."""

import asyncio
import socket
import time
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import pytest
from ray.serve._private.proxy_request_response import ASGIProxyRequest, ResponseStatus

from cluster.gateway.door import gateway_sockets, proxy_status
from cluster.gateway.door.frame_stream import FrameStream
from cluster.gateway.http.socket_listener import SocketListener

MB = 1 << 20


@pytest.fixture(autouse=True)
def _sockets_here(monkeypatch, tmp_path):
    monkeypatch.setattr(gateway_sockets, "socket_path", lambda id: tmp_path / id)


@asynccontextmanager
async def gateway(app, id="here"):
    listener = SocketListener(app, gateway_sockets.socket_path(id))
    await listener.open()
    try:
        yield listener
    finally:
        await asyncio.wait_for(listener.close(), 5)


def handle_of(*replicas):
    """A deployment handle of Serve that knows of (id, node)."""
    known = {id: SimpleNamespace(replica_id=SimpleNamespace(unique_id=id), node_id=node) for id, node in replicas}
    router = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=known))
    return SimpleNamespace(_router=SimpleNamespace(_asyncio_router=router))


def note_forgotten(handle):
    """The gateways whose queues Serve is to forget from now on."""
    forgotten, on_its_loop = [], []
    router = handle._router._asyncio_router

    def call_soon_threadsafe(call, *arguments):
        on_its_loop.append(call)
        call(*arguments)
        on_its_loop.pop()

    def on_replica_actor_unavailable(id):
        assert on_its_loop
        forgotten.append(id.unique_id)

    router._event_loop = SimpleNamespace(call_soon_threadsafe=call_soon_threadsafe)
    router._request_router.on_replica_actor_unavailable = on_replica_actor_unavailable
    return forgotten


HERE = handle_of(("here", "a"))
UNHEARD = SimpleNamespace(_router=SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=None)))


class Client:
    """Sends its body in parts, and stays until it is told to go."""

    def __init__(self, *parts):
        self._parts = list(parts or [b""])
        self.goes = asyncio.Event()
        self.pause_s = 0.0

    async def receive(self):
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        if self._parts:
            body = self._parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts)}
        await self.goes.wait()
        return {"type": "http.disconnect"}


def asked(client, handle=HERE, headers=()):
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/ä", "raw_path": b"/v1/%C3%A4", "query_string": b"", "headers": list(headers),
        "client": ("127.0.0.1", 4), "server": ("127.0.0.1", 8000), "state": {"any": object()},
    }  # fmt: skip
    proxy = SimpleNamespace(_node_id="a", request_timeout_s=None)
    return gateway_sockets.send_request(proxy, "id", "id", handle, ASGIProxyRequest(scope, client.receive, None))


async def whole(messages):
    found = [message async for message in messages]
    start = next((one for one in found if isinstance(one, dict) and one["type"].endswith("start")), None)
    body = b"".join(one["body"] for one in found if isinstance(one, dict) and one["type"].endswith("body"))
    return start, body, found[-1]


async def echo(scope, receive, send):
    assert (scope["path"], scope["client"]) == ("/v1/ä", ("127.0.0.1", 4))
    await send({"type": "http.response.start", "status": 201, "headers": [(b"x-is", dict(scope["headers"])[b"x"])]})
    more = True
    while more:
        message = await receive()
        more = message["more_body"]
        await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await send({"type": "http.response.body"})


async def test_calls_and_answers_pass_whole():
    async with gateway(echo):
        for parts in ([b""], [b"one", b"", b"two"], [b"x" * MB, b"y" * MB]):
            start, body, status = await whole(asked(Client(*parts), headers=[(b"x", b"5")]))
            assert (start["status"], [tuple(one) for one in start["headers"]]) == (201, [(b"x-is", b"5")])
            assert (body, status) == (b"".join(parts), ResponseStatus(code="201", is_error=False))


async def test_a_call_with_a_head_as_large_as_may_be_passes_and_ends():
    async with gateway(echo) as listener:
        client = Client(b"one", b"two")
        client.pause_s = 0.05  # the head comes alone
        start, body, _ = await whole(asked(client, headers=[(b"x", b"5"), (b"y", b"y" * 2 * MB)]))
        assert (start["status"], body) == (201, b"onetwo")
        await asyncio.sleep(0.05)
        assert not listener._calls


async def test_headers_of_one_name_and_bytes_of_any_kind_pass_in_their_order():
    headers = [(b"x", b"\xff\xe9"), (b"y", b"1"), (b"x", b""), (b"y", b"2")]

    async def mirror(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": scope["headers"]})
        await send({"type": "http.response.body"})

    async with gateway(mirror):
        start, body, _ = await whole(asked(Client(), headers=headers))
        assert (start["status"], body) == (204, b"")
        assert [tuple(one) for one in start["headers"]] == headers


class Endless:
    """An application that sends as much as is taken."""

    def __init__(self):
        self.num_sent, self.ended = 0, asyncio.Event()

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
                self.num_sent += 1
        finally:
            self.ended.set()


async def test_an_answer_that_nobody_reads_is_not_made():
    app = Endless()
    async with gateway(app), aclosing(asked(Client())) as messages:
        await anext(messages)
        await asyncio.sleep(0.1)
        sent = app.num_sent
        await asyncio.sleep(0.1)
        assert app.num_sent == sent < 2000
        for _ in range(50):
            await anext(messages)
        await asyncio.sleep(0.1)
        assert app.num_sent > sent
    await asyncio.wait_for(app.ended.wait(), 5)


async def waits(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.Event().wait()


async def test_a_client_that_goes_ends_the_call():
    app, client = Endless(), Client()
    async with gateway(app):
        messages = asked(client)
        await anext(messages)
        client.goes.set()
        *_, status = [message async for message in messages]
        assert (status.code, status.is_error) == ("200", False)  # as Serve tells what has begun
        await asyncio.wait_for(app.ended.wait(), 5)


async def test_a_lost_gateway_and_a_time_limit_are_told_as_serve_tells_them():
    async def fails(scope, receive, send):
        raise ValueError("broken")

    async with gateway(fails):
        start, body, status = await whole(asked(Client()))
        assert (start["status"], body.decode(), status.code) == (503, proxy_status.LOST, 503)

    async def never(scope, receive, send):
        await asyncio.Event().wait()

    async with gateway(never):
        start, _, status = await whole(asked(Client(), headers=[(b"x-request-timeout-seconds", b"0.05")]))
        assert (start["status"], status.code) == (408, 408)


async def test_an_answer_to_a_body_that_nobody_has_read_arrives_though_the_application_fails_after_it():
    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"internal"})
        raise ValueError("broken")

    async with gateway(fails):
        start, body, _ = await whole(asked(Client(*[b"x" * 300_000] * 10)))
        assert (start["status"], body) == (500, b"internal")


async def test_an_answer_that_an_application_breaks_off_looks_broken():
    async def breaks_off(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("broken")

    async with gateway(breaks_off):
        messages = [message async for message in asked(Client())]
        assert [one["more_body"] for one in messages if isinstance(one, dict) and "body" in one] == [True]


@pytest.mark.parametrize("value", [b"\xff", b"nan", b"inf", b"1e400", b"-1", b"0", b"", b"soon"])
async def test_no_time_limit_leaves_a_connection_behind(value):
    async with gateway(echo) as listener:
        start, *_ = await whole(asked(Client(), headers=[(b"x", b"5"), (b"x-request-timeout-seconds", value)]))
        assert start["status"] == 201
        await asyncio.sleep(0.05)
        assert not listener._calls


async def test_a_gateway_that_ends_takes_no_call_and_waits_for_those_it_has():
    goes_on = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"end"})

    async with gateway(app) as listener:
        messages = asked(Client())
        await anext(messages)
        ending = asyncio.create_task(listener.close())
        await asyncio.sleep(0.05)
        assert await gateway_sockets._connect(["here"]) is None
        assert not ending.done()
        goes_on.set()
        assert (await whole(messages))[1] == b"end"
        await asyncio.wait_for(ending, 5)


async def test_a_call_that_has_connected_when_a_gateway_ends_is_answered(monkeypatch):
    async with gateway(echo) as listener:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(gateway_sockets.socket_path("here")))
        ending = asyncio.create_task(listener.close())  # before the loop has accepted it

        async def connected(path):
            connection.setblocking(False)
            return (await asyncio.get_running_loop().create_unix_connection(FrameStream, sock=connection))[1]

        monkeypatch.setattr(gateway_sockets, "_connected", connected)
        start, body, _ = await whole(asked(Client(b"z"), headers=[(b"x", b"5")]))
        assert (start["status"], body) == (201, b"z")
        await asyncio.wait_for(ending, 5)


async def test_serve_carries_what_no_gateway_of_the_node_takes(monkeypatch):
    async def through_serve(self, request_id, internal_id, handle, request, is_java):
        yield ResponseStatus(code="through Serve")

    monkeypatch.setattr(gateway_sockets, "_through_serve", through_serve)
    async with gateway(echo):
        for handle in (handle_of(), handle_of(("here", "b")), handle_of(("gone", "a"))):
            assert (await whole(asked(Client(), handle)))[2].code == "through Serve"
        handle = handle_of(("gone", "a"), ("here", "a"))
        assert (await whole(asked(Client(b"z"), handle, headers=[(b"x", b"5")])))[1] == b"z"


async def test_calls_go_to_the_gateway_with_the_fewest():
    apps = {"one": Endless(), "two": Endless()}
    async with gateway(apps["one"], "one"), gateway(apps["two"], "two"):
        both = handle_of(("one", "a"), ("two", "a"))
        first, second = asked(Client(), both), asked(Client(), both)
        await anext(first)
        await anext(second)
        await asyncio.sleep(0.05)
        assert all(app.num_sent for app in apps.values())
        await first.aclose()
        await second.aclose()
    assert not gateway_sockets._open_calls


class Hanging:
    """A socket whose gateway accepts no connection, as a process that is stopped."""

    def __init__(self, id):
        self._path = gateway_sockets.socket_path(id)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen(100)

    async def go_on(self, app):
        listener = SocketListener(app, self._path)
        listener._server = await asyncio.get_running_loop().create_unix_server(
            lambda: FrameStream(listener._begin), sock=self._socket
        )
        return listener

    def die(self):
        self._path.unlink()
        self._socket.close()


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("returns", [True, False], ids=["it goes on", "it dies"])
async def test_calls_pass_by_a_gateway_that_hangs_until_it_goes_on(monkeypatch, returns):
    monkeypatch.setattr(gateway_sockets, "_TAKEN_WITHIN_S", 0.2)
    hanging = Hanging("hangs")
    both = handle_of(("hangs", "a"), ("works", "a"))
    loop = asyncio.get_running_loop()

    async def ask():
        began = loop.time()
        start, body, _ = await whole(asked(Client(b"z"), both, headers=[(b"x", b"5")]))
        assert (start["status"], body) == (201, b"z")
        return loop.time() - began

    async with gateway(echo, "works"):
        assert sorted(await asyncio.gather(ask(), ask()))[1] >= 0.2  # the other one has the one that works
        assert gateway_sockets._gateways_here(both, "a") == ["works"]
        assert max([await ask() for _ in range(5)]) < 0.2
        if returns:
            listener = await hanging.go_on(echo)
            await until(lambda: not gateway_sockets._silent)
            assert gateway_sockets._gateways_here(both, "a") == ["hangs", "works"]
            await ask()
            await listener.close()
        else:
            hanging.die()
            await until(lambda: not gateway_sockets._silent)
            await ask()
    assert not gateway_sockets._open_calls


async def test_a_client_that_goes_while_its_gateway_hangs_leaves_nothing_behind():
    hanging = Hanging("here")
    call = asyncio.create_task(whole(asked(Client())))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not gateway_sockets._open_calls
    assert not gateway_sockets._silent
    hanging.die()


async def test_serve_carries_a_call_that_no_gateway_of_the_node_takes_in_time(monkeypatch):
    async def through_serve(self, request_id, internal_id, handle, request, is_java):
        yield ResponseStatus(code="through Serve")

    monkeypatch.setattr(gateway_sockets, "_through_serve", through_serve)
    monkeypatch.setattr(gateway_sockets, "_TAKEN_WITHIN_S", 0.05)
    hanging = Hanging("here")
    handle = handle_of(("here", "a"), ("elsewhere", "b"))
    forgotten = note_forgotten(handle)
    for _ in range(2):
        assert (await whole(asked(Client(), handle)))[2].code == "through Serve"
    assert forgotten == ["here", "here"]
    assert (await whole(asked(Client(), UNHEARD)))[2].code == "through Serve"
    hanging.die()
    await until(lambda: not gateway_sockets._silent)


def test_a_proxy_that_is_held_up_does_not_take_its_gateway_to_hang(monkeypatch):
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(gateway_sockets, "_TAKEN_WITHIN_S", 0.2)

    class HoldingUp(asyncio.Protocol):
        def data_received(self, data):
            time.sleep(0.3)

    async def ask():
        loop = asyncio.get_running_loop()
        hanging = Hanging("here")
        mine, others = socket.socketpair()
        transport, _ = await loop.create_connection(HoldingUp, sock=mine)
        call = asyncio.create_task(whole(asked(Client(b"z"), headers=[(b"x", b"5")])))
        await asyncio.sleep(0.02)
        listener = await hanging.go_on(echo)
        others.send(b"!")
        start, body, _ = await call
        assert (start["status"], body, gateway_sockets._silent) == (201, b"z", {})
        transport.abort()
        others.close()
        await listener.close()

    uvloop.run(ask())  # as in Ray's actors: timers that are due come before data that has arrived


async def test_serve_forgets_what_it_knows_of_a_gateway_that_hangs_before_it_carries_a_grpc_call(monkeypatch):
    async def through_serve(self, request_id, internal_id, handle, request, is_java):
        yield list(forgotten)

    monkeypatch.setattr(gateway_sockets, "_grpc_through_serve", through_serve)
    monkeypatch.setattr(gateway_sockets, "_TAKEN_WITHIN_S", 0.2)
    monkeypatch.setattr(gateway_sockets, "_HEARD_FOR_S", 0.0)
    both = handle_of(("hangs", "a"), ("works", "a"), ("elsewhere", "b"))
    forgotten = note_forgotten(both)
    proxy = SimpleNamespace(_node_id="a")

    async def ask(handle=both):
        return [one async for one in gateway_sockets.send_grpc_request(proxy, "id", "id", handle, None)]

    hanging = Hanging("hangs")
    async with gateway(echo, "works") as listener:
        assert await ask() == [["hangs"]]
        assert await ask() == [["hangs", "hangs"]]
        assert await ask(UNHEARD) == [["hangs", "hangs"]]
        await until(lambda: not listener._calls)
        gone_on = await hanging.go_on(echo)
        await until(lambda: not gateway_sockets._silent)
        assert await ask() == [["hangs", "hangs"]]
        await gone_on.close()
    assert not gateway_sockets._open_calls


async def test_grpc_calls_at_the_same_time_ask_a_gateway_once(monkeypatch):
    async def through_serve(self, request_id, internal_id, handle, request, is_java):
        yield "answer"

    monkeypatch.setattr(gateway_sockets, "_grpc_through_serve", through_serve)
    monkeypatch.setattr(gateway_sockets, "_HEARD_FOR_S", 0.0)
    proxy = SimpleNamespace(_node_id="a")

    async def ask():
        return [one async for one in gateway_sockets.send_grpc_request(proxy, "id", "id", HERE, None)]

    async with gateway(echo) as listener:
        num_asked = 0
        begin = listener._begin

        def count(stream):
            nonlocal num_asked
            num_asked += 1
            begin(stream)

        monkeypatch.setattr(listener, "_begin", count)
        listener._server.close()
        await listener.open()
        calls = [asyncio.create_task(ask()) for _ in range(100)]
        await asyncio.sleep(0)
        calls[0].cancel()  # the others do not depend on it
        assert await asyncio.gather(*calls[1:]) == [["answer"]] * 99
        await until(lambda: not listener._calls)
        assert num_asked == 1
    assert not gateway_sockets._asking
