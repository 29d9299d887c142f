"""How much of a body Serve's HTTP proxy reads: nothing without a known key, and no more than is allowed."""

import asyncio
from datetime import timedelta

import pytest

from cluster.gateway.door.request_bodies import LimitBodies
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.known_keys import KnownKeys

LIMIT = 1000
KEY = (b"authorization", b"Bearer pl-1")
ANY_KEY = KnownKeys(None)


class Proxy:
    """Reads a body to its end or to a disconnection, as Serve's proxy does, and answers 200 unless told otherwise."""

    def __init__(self, status=200):
        self.status = status
        self.read = []
        self.headers = []
        self.ended_by = None

    async def __call__(self, scope, receive, send):
        self.headers = scope["headers"]
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


async def ask(proxy, headers, parts, keys=None, path="/v1/completions"):
    """(status, number of parts taken from the client)"""
    taken, sent = [], []

    async def receive():
        if len(taken) == len(parts):
            await asyncio.Event().wait()
        taken.append(parts[len(taken)])
        return {"type": "http.request", "body": taken[-1], "more_body": len(taken) < len(parts)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    await asyncio.wait_for(LimitBodies(proxy, LIMIT, keys)(scope, receive, send), 2)
    return sent[0]["status"], len(taken)


async def test_a_body_within_the_limit_passes():
    proxy = Proxy()
    assert await ask(proxy, [KEY], [b"x" * 500, b"x" * 500], ANY_KEY) == (200, 2)
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
    assert await ask(proxy, lines, [b"x" * 900], ANY_KEY) == (401, 0)
    assert (proxy.read, proxy.ended_by) == ([0], "http.request")


MADE_UP = "pl-1-" + "0" * 64


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/v1/completions", (b"authorization", f"Bearer {MADE_UP}".encode())),
        ("/v1/messages", (b"x-api-key", MADE_UP.encode())),
    ],
)
async def test_with_an_unknown_key_the_client_is_not_read_and_the_gateway_refuses_it(tmp_path, path, line):
    TenantAdministration(tmp_path / "tenants.json").add("first", {})
    proxy = Proxy(status=401)
    assert await ask(proxy, [line], [b"x" * 900], KnownKeys(tmp_path / "tenants.json"), path) == (401, 0)
    assert proxy.read == [0]
    assert [value for name, value in proxy.headers if name == b"authorization"] == [b"Bearer unknown"]


async def test_with_an_expired_key_the_client_is_not_read(tmp_path):
    admin = TenantAdministration(tmp_path / "tenants.json")
    line = (b"authorization", f"Bearer {admin.add('first', {}).key}".encode())
    admin.rotate("first", keep_old_for=timedelta(hours=1))
    expires = admin.tenants()[0].keys[0].expires
    for now, status, taken in ((expires - timedelta(seconds=1), 200, 1), (expires, 401, 0)):
        keys = KnownKeys(tmp_path / "tenants.json", clock=lambda now=now: now)
        proxy = Proxy(status)
        assert await ask(proxy, [line], [b"x" * 900], keys) == (status, taken)
    assert [value for name, value in proxy.headers if name == b"authorization"] == [b"Bearer unknown"]


async def test_a_disabled_tenant_is_not_read_and_told_why(tmp_path):
    admin = TenantAdministration(tmp_path / "tenants.json")
    line = (b"authorization", f"Bearer {admin.add('first', {}).key}".encode())
    keys = KnownKeys(tmp_path / "tenants.json")
    assert await ask(Proxy(), [line], [b"x" * 900], keys) == (200, 1)
    admin.change("first", {"disabled": True})
    keys._current(afresh=True)
    assert await ask(Proxy(), [line], [b"x" * 900], keys) == (403, 0)
    admin.change("first", {"disabled": False})
    assert await ask(Proxy(), [line], [b"x" * 900], keys) == (200, 1)  # at once


async def test_a_cluster_that_is_open_until_there_is_a_registry_reads_keyless_bodies_until_then(tmp_path):
    keys = KnownKeys(tmp_path / "tenants.json", may_be_open=True)
    assert await ask(Proxy(), [], [b"x" * 900], keys) == (200, 1)
    TenantAdministration(tmp_path / "tenants.json").add("first", {})
    keys._current(afresh=True)
    assert await ask(Proxy(status=401), [], [b"x" * 900], keys) == (401, 0)


async def test_a_key_is_known_as_soon_as_it_is_in_the_registry(tmp_path):
    admin = TenantAdministration(tmp_path / "tenants.json")
    admin.add("first", {})
    keys = KnownKeys(tmp_path / "tenants.json")
    line = (b"authorization", f"Bearer {admin.add('second', {}).key}".encode())
    proxy = Proxy()
    assert await ask(proxy, [line], [b"x" * 900], keys) == (200, 1)
    assert proxy.headers == [line]


async def test_without_a_registry_that_can_be_read_any_key_passes(tmp_path):
    (tmp_path / "damaged.json").write_text("{")
    for name in ("none.json", "damaged.json"):
        assert await ask(Proxy(), [KEY], [b"x" * 900], KnownKeys(tmp_path / name)) == (200, 1)
