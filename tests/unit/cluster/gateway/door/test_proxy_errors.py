"""Requests on their way into Serve's HTTP proxy, with the proxy's own middleware behind, and its errors on their way
out: request ids, closed routes, error objects."""

import json

import grpc
import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.http_util import _apply_middlewares
from starlette.datastructures import Headers

from actors.logs import request_id_of
from cluster.gateway.door import front_door, proxy_status
from cluster.gateway.door.front_door import FrontDoor
from cluster.gateway.door.proxy_errors import middlewares


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


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PLAIN = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"7")]


async def through(*messages, path="/v1/x", state=None, error=None):
    """What a client gets when Serve's proxy sends these messages."""
    sent = []

    async def serve(scope, receive, send):
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "state": state or {}}
    await _apply_middlewares(serve, middlewares())(scope, None, send)
    return sent


def error_in(sent):
    assert sent[-1].get("more_body", False) is False
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


async def test_a_stream_that_breaks_off_ends_with_an_error():
    sent = await through(START, {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 2
    assert sent[-1]["body"].startswith(b'data: {"error":{"message":"the answer broke off before its end;')
    assert json.loads(sent[-1]["body"][6:])["error"]["code"] == "unavailable"
    whole = [START, {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": False}]
    assert (await through(*whole))[-1] == whole[-1]


async def test_streams_and_answers_of_messages_end_with_anthropics_errors():
    open_body = {"type": "http.response.body", "body": b"event: ping\ndata: {}\n\n", "more_body": True}
    sent = await through(START, open_body, path="/v1/messages")
    name, data = sent[-1]["body"].decode().rstrip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    sent = await through(path="/v1/messages/count_tokens")
    assert json.loads(sent[1]["body"]) == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}


@pytest.mark.parametrize("error", [None, RuntimeError("secret")])
async def test_no_answer_is_an_error_object(error):
    sent = await through(error=error)
    assert error_in(sent) == (500, "internal_error")
    assert b"secret" not in sent[1]["body"]


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (404, (503, "unavailable")),
        (503, (503, "unavailable")),
        (429, (429, "overloaded")),
        (500, (500, "internal_error")),
    ],
)
async def test_plain_texts_of_the_proxy_become_error_objects(status, wanted):
    plain = {"type": "http.response.start", "status": status, "headers": PLAIN}
    parts = [{"type": "http.response.body", "body": part, "more_body": part == b"a"} for part in (b"a", b"/-/routes")]
    sent = await through(plain, *parts)
    assert error_in(sent) == wanted
    if status in (404, 500):
        assert b"/-/routes" not in sent[1]["body"]


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/-/routes", False),
        ("/-/healthz", True),
        ("/-/", False),
        ("/-/healthz/", False),
        ("/v1/models", True),
        ("*", False),  # of no application, which Serve says as it does before there is one
        ("", False),
    ],
)
async def test_serves_own_routes_are_closed_but_for_its_probe(path, is_open):
    answer = [{**START, "headers": []}, {"type": "http.response.body", "body": b"success"}]
    sent = await through(*answer, path=path)
    if is_open:
        assert sent[1]["body"] == b"success"
    else:
        assert error_in(sent) == (404, "not_found")


async def test_with_client_certificates_only_probes_are_answered_without_one(monkeypatch):
    tls = dict.fromkeys(("certificate_file", "key_file", "client_ca_file"), "/none")
    monkeypatch.setattr(front_door, "_installed", FrontDoor(tls=tls))
    answer = [{**START, "headers": []}, {"type": "http.response.body", "body": b"ok"}]
    assert error_in(await through(*answer)) == (403, "no_client_certificate")
    assert (await through(*answer, state={"has_client_certificate": True}))[1]["body"] == b"ok"
    for path in ("/readyz", "/livez", "/health", "/-/healthz"):
        assert (await through(*answer, path=path))[1]["body"] == b"ok"


class LostConnection(grpc.RpcError):
    pass


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("ray", None), LostConnection()])
def test_a_lost_gateway_is_told_without_rays_words(error, caplog):
    over_http = proxy_status.http_status(error, None, "id")
    over_grpc = proxy_status.grpc_status(error, None, "id")
    assert (over_http.code, over_grpc.code) == (503, grpc.StatusCode.UNAVAILABLE)
    assert (
        over_http.message == over_grpc.message == "the gateway that answered was lost; the same call may be sent again"
    )
    assert caplog.text == ""


def test_other_errors_of_a_grpc_call_are_internal_without_details():
    status = proxy_status.grpc_status(ValueError("secret"), None, "id")
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL, "internal error")
    assert proxy_status.grpc_status(TimeoutError(), 3.0, "id").code is grpc.StatusCode.DEADLINE_EXCEEDED
