"""Request ids on their way into Serve's HTTP proxy, with the proxy's own middleware behind."""

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.datastructures import Headers

from actors.logs import request_id_of
from cluster.gateway.proxy_errors import middlewares


@pytest.fixture
async def call():
    """Send header lines through what stands before a replica: the answer, and the headers that Serve gets."""
    seen = []

    async def serve(scope, receive, send):
        headers = scope["headers"]
        assert all(value.decode() is not None for _, value in headers)  # as Serve reads those that it knows
        seen.append(Headers(scope=scope))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(_apply_middlewares(serve, middlewares()))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:

        async def send(*lines):
            answer = await client.get("/", headers=list(lines))
            return answer, seen[-1]

        yield send


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b""],
        [b"two words"],
        [b"k\xe9"],
        ["ключ".encode()],
        [b"x" * 10_000],
        [b'","level":"forged'] * 2,
        [b"one", b"other"],
    ],
)
async def test_an_id_that_is_not_fit_is_replaced_before_serve_sees_it(call, lines):
    answer, headers = await call(*((b"X-Request-ID", line) for line in lines))
    (found,) = headers.getlist("x-request-id")
    assert answer.headers.get_list("x-request-id") == [found]
    assert found.encode() not in lines
    assert request_id_of(found) == found


async def test_an_id_that_is_fit_stays(call):
    answer, headers = await call((b"x-request-id", b"Kunde-7/a"), (b"x-other", b"1"))
    assert answer.headers.get_list("x-request-id") == headers.getlist("x-request-id") == ["Kunde-7/a"]
    assert headers["x-other"] == "1"


@pytest.mark.parametrize("name", [b"serve_multiplexed_model_id", b"Serve-Multiplexed-Model-Id"])
async def test_a_client_cannot_steer_serve(call, name):
    _, headers = await call((name, b"k\xe9"))
    assert not [key for key in headers if "multiplexed" in key]
