"""How much of a body Serve's HTTP proxy reads: nothing without a key, and no more than is allowed."""

import asyncio

import pytest

from cluster.gateway.request_bodies import LimitBodies

LIMIT = 1000
KEY = (b"authorization", b"Bearer pl-1")


class Proxy:
    """Reads a body to its end or to a disconnection, as Serve's proxy does, and answers 200 unless told otherwise."""

    def __init__(self, status=200):
        self.status = status
        self.read = []
        self.ended_by = None

    async def __call__(self, scope, receive, send):
        while True:
            message = await receive()
            self.read.append(len(message.get("body", b"")))
            if message["type"] == "http.disconnect" or not message["more_body"]:
                self.ended_by = message["type"]
                break
        if self.ended_by == "http.disconnect":
            return  # as Serve's does
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def ask(proxy, headers, parts, asks_for_keys=False):
    """(status, number of parts taken from the client)"""
    taken, sent = [], []

    async def receive():
        if len(taken) == len(parts):
            await asyncio.Event().wait()
        taken.append(parts[len(taken)])
        return {"type": "http.request", "body": taken[-1], "more_body": len(taken) < len(parts)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": headers}
    await asyncio.wait_for(LimitBodies(proxy, LIMIT, asks_for_keys)(scope, receive, send), 2)
    return sent[0]["status"], len(taken)


async def test_a_body_within_the_limit_passes():
    proxy = Proxy()
    assert await ask(proxy, [KEY], [b"x" * 500, b"x" * 500], asks_for_keys=True) == (200, 2)
    assert proxy.read == [500, 500]


async def test_a_declared_size_above_the_limit_is_refused_without_reading():
    assert await ask(Proxy(), [(b"content-length", b"1001")], [b"x" * 1001]) == (413, 0)


async def test_an_undeclared_size_is_refused_once_it_is_above_the_limit():
    proxy = Proxy()
    assert await ask(proxy, [(b"transfer-encoding", b"chunked")], [b"x" * 600] * 100) == (413, 2)
    assert (proxy.read, proxy.ended_by) == ([600, 0], "http.disconnect")


@pytest.mark.parametrize(
    "lines", [[], [(b"authorization", b"Basic YTpi")], [(b"authorization", b"Bearer")], [KEY, KEY]]
)
async def test_without_a_key_the_gateway_gets_an_empty_body_and_the_client_is_not_read(lines):
    proxy = Proxy(status=401)
    lines = [*lines, (b"content-length", b"900")]
    assert await ask(proxy, lines, [b"x" * 900], asks_for_keys=True) == (401, 0)
    assert (proxy.read, proxy.ended_by) == ([0], "http.request")
