"""The gateway on a real Ray Serve: both protocols through Serve's proxies, over an echoing router."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import httpx
import numpy as np
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ray import serve

from actors.errors import LinkError, Overloaded, Unavailable
from actors.messages import GenerationRequest, SamplingParams
from cluster.gateway.deployment import gateway_application, start_proxies
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.gateway.router_client import RouterClient
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from paceline_testing.deployed import end_application
from paceline_testing.echo_router import ECHO_OPTIONS, EchoRouter
from paceline_testing.scraped import value_of
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids("<|end|>")
FOX = "the quick brown fox"
SOON_S = 10.0  # on a busy machine; nothing that a test asks for would end so soon by itself
COUNT = len(TOKENIZER.backend_tokenizer.encode(FOX).ids)


@pytest.fixture(scope="module")
def served(ray_here, ports, tmp_path_factory):
    """(config, handle of the router)"""
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    config = GatewayConfig(**ports, max_body_bytes=20_000, max_new_tokens=2000, request_timeout_s=30)
    model = ServedModel("toy", max_model_len=4096, vocab_size=len(TOKENIZER), eos_token_ids=(EOS,), created=1)
    start_proxies(config)
    router = serve.deployment(EchoRouter).options(name="Router", **ECHO_OPTIONS)
    serve.run(gateway_application(router.bind(), str(directory), model, config), name="paceline")
    yield config, serve.get_deployment_handle("Router", "paceline")
    end_application()


class Knobs:
    """The router behind the gateway, seen from the test."""

    def __init__(self, handle):
        self._handle = handle

    def set(self, **values):
        self._handle.configure.remote(**values).result()

    @property
    def running(self):
        return self._handle.observed.remote().result()[0]

    @property
    def last_request(self):
        return self._handle.observed.remote().result()[2]

    def wait_running(self, count, limit_s):
        deadline = time.monotonic() + limit_s
        while self.running != count:
            assert time.monotonic() < deadline, f"{self.running} are running, not {count}"
            time.sleep(0.02)


@pytest.fixture
def router(served):
    knobs = Knobs(served[1])
    knobs.set()
    yield knobs
    knobs.wait_running(0, SOON_S)


@pytest.fixture
def url(served):
    return f"http://127.0.0.1:{served[0].http_port}"


def wait_ready(url, status):
    """Probes go by what the router has lately said."""
    deadline = time.monotonic() + 20
    while httpx.get(f"{url}/readyz", timeout=30).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def channel(served):
    with grpc.insecure_channel(f"127.0.0.1:{served[0].grpc_port}") as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def ask(**fields):
    return inference_pb2.GenerateRequest(**{"prompt": FOX, "temperature": 0, "max_tokens": COUNT, **fields})


def failure(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


# --- HTTP ------------------------------------------------------------------------------------------------------------


def test_both_ports_listen_on_the_configured_address_only(served):
    config, _ = served
    for port in (config.http_port, config.grpc_port):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_official_client_streams_through_serve(url, router):
    client = openai.OpenAI(api_key="-", base_url=f"{url}/v1", max_retries=0)
    stream = client.completions.create(model="toy", prompt=FOX, temperature=0, max_tokens=COUNT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == FOX
    answer = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hello"}], temperature=0)
    assert answer.choices[0].message.content == "user\nhello"
    stream = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hello 😀"}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "user\nhello 😀"


def test_chunks_arrive_as_they_are_made(url, router):
    router.set(delay_s=0.1)
    body = {"prompt": FOX, "max_tokens": 15, "stream": True}
    arrivals = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
    assert len(arrivals) == 5
    assert arrivals[-1] - arrivals[0] > 0.3


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_http_client_closes_the_routers_stream(url, router, stream):
    router.set(delay_s=0.05)
    body = {"prompt": FOX, "max_tokens": 2000, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert router.running == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.7)
    router.wait_running(0, SOON_S)


def test_many_clients_that_go_away_in_mid_stream_leave_nothing_behind(url, router):
    router.set(delay_s=0.002, chunk_tokens=1)

    def leave(index):
        body = {"prompt": FOX, "max_tokens": 2000, "stream": True}
        with httpx.Client() as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(1 + index % 7):
                next(lines)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(24)))
    router.wait_running(0, SOON_S)


def test_errors_of_the_router_cross_two_processes_as_themselves(url, router):
    body = {"prompt": FOX, "max_tokens": 30}
    router.set(max_running=0)
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "overloaded"
    router.set(failures=[(0, Unavailable("draining"))])
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
    router.set(failures=[(6, LinkError("broken"))])
    streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True})
    assert streamed.text.rstrip().splitlines()[-1].startswith('data: {"error":{"message":"broken"')
    router.set(failures=[(6, Unavailable("moving"))])
    resumed = httpx.post(f"{url}/v1/completions", json={**body, "temperature": 0}).json()
    assert resumed["choices"][0]["text"].startswith(FOX)


def test_a_deadline_is_told_as_an_error_object(url, router):
    router.set(delay_s=0.05)
    response = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": FOX, "max_tokens": 1000},
        headers={"x-request-timeout-seconds": "0.5"},
    )
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < router.last_request.timeout_s < 0.5


@pytest.mark.parametrize("limit_s", ["0.001", "0.000001"])
def test_a_time_limit_that_passes_in_serves_proxy_is_told_as_an_error_object(url, router, limit_s):
    router.set(delay_s=0.05)
    for _ in range(5):  # whoever is first, proxy or gateway
        response = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": FOX, "max_tokens": 1000},
            headers={"x-request-timeout-seconds": limit_s},
        )
        assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("timeout_error", "deadline_exceeded", None)


def test_the_limit_of_the_router_is_the_gateways(url, router):
    def wait_limit(limit):
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] != limit:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    router.set(max_model_len=32)
    wait_limit(32)
    body = {"messages": [{"role": "user", "content": "hello " * 40}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    router.set(max_model_len=4096)
    wait_limit(4096)
    assert httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 1}).status_code == 200


async def test_a_full_queue_before_a_router_is_told_as_overloaded(served):
    slow = serve.deployment(EchoRouter).options(
        name="Slow", **{**ECHO_OPTIONS, "max_ongoing_requests": 1, "max_queued_requests": 2}
    )
    handle = serve.run(slow.bind(delay_s=0.1), name="slow", route_prefix=None)
    client = RouterClient(handle)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(seed=0, temperature=0.0),
        max_new_tokens=9,
    )

    async def tokens() -> int:
        async with aclosing(client.generate(request)) as chunks:
            return sum([len(chunk.token_ids) async for chunk in chunks])

    try:
        assert await tokens() == 9
        answers = await asyncio.gather(*(tokens() for _ in range(8)), return_exceptions=True)
        refused = [answer for answer in answers if answer != 9]
        assert 0 < len(refused) < 8
        assert all(isinstance(one, Overloaded) and one.retry_after_s == 1.0 for one in refused), refused
    finally:
        serve.delete("slow", _blocking=False)


def test_head_through_the_proxy_has_the_status_and_no_body(url, router):
    wait_ready(url, 200)
    for path in ("/readyz", "/livez", "/version"):
        answer = httpx.head(f"{url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    router.set(ready=False)
    wait_ready(url, 503)
    assert httpx.head(f"{url}/readyz").status_code == 503
    assert httpx.get(f"{url}/livez").json() == {"status": "live"}  # on the connection's next request, too


def test_grpc_requests_that_cannot_be_read_count_as_failures(url, stub, router):
    def failures():
        page = httpx.get(f"{url}/metrics").text
        return value_of(page, "paceline_request_failure_total", reason="invalid_value")

    before = failures()
    assert failure(lambda: stub.Generate(ask(temperature=3)))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert failure(lambda: stub.Generate(inference_pb2.GenerateRequest()))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert failures() == before + 2


def test_operational_routes_answer_through_the_proxy(url, router):
    assert httpx.get(f"{url}/livez").status_code == 200
    wait_ready(url, 200)
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "toy"
    metrics = httpx.get(f"{url}/metrics").text
    assert "paceline_num_requests_running" in metrics
    assert 'echo_running{router="echo"} 0' in metrics
    router.set(ready=False)
    wait_ready(url, 503)
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["code"] == "not_found"
    large = httpx.post(f"{url}/v1/completions", json="x" * 30_000)
    assert large.json()["error"]["code"] == "body_too_large"


# --- gRPC ------------------------------------------------------------------------------------------------------------


def test_unary_and_stream_say_the_same_as_http(url, stub, router):
    whole = stub.Generate(ask(speculation=inference_pb2.Speculation(stats=True)))
    assert (whole.text, whole.finish_reason, whole.model) == (FOX, inference_pb2.FINISH_REASON_LENGTH, "toy")
    assert whole.usage == inference_pb2.Usage(
        prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=2 * COUNT, cached_tokens=COUNT // 2
    )
    assert whole.speculation.rounds == -(-COUNT // 3)
    assert whole.speculation.accepted_tokens["echo"] == whole.speculation.draft_tokens > 0
    chunks = list(stub.GenerateStream(ask(speculation=inference_pb2.Speculation(stats=True))))
    assert [chunk.sequence_number for chunk in chunks] == list(range(len(chunks)))
    assert "".join(chunk.text for chunk in chunks) == FOX
    assert (chunks[-1].usage, chunks[-1].speculation) == (whole.usage, whole.speculation)
    assert not any(chunk.HasField("usage") for chunk in chunks[:-1])
    body = {"prompt": FOX, "seed": -3, "max_tokens": 9}
    over_http = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert stub.Generate(ask(seed=-3, temperature=1, max_tokens=9)).text == over_http


def test_conversations_token_ids_and_stop_strings_work_over_grpc(stub, router):
    message = inference_pb2.Message(role="user", content="hello")
    conversation = inference_pb2.Conversation(messages=[message])
    request = inference_pb2.GenerateRequest(conversation=conversation, temperature=0)
    answer = stub.Generate(request)
    assert (answer.text, answer.finish_reason) == ("user\nhello", inference_pb2.FINISH_REASON_STOP)
    ids = inference_pb2.TokenIds(ids=TOKENIZER.backend_tokenizer.encode(FOX).ids)
    stats = inference_pb2.Speculation(stats=True)
    request = inference_pb2.GenerateRequest(prompt_token_ids=ids, temperature=0, stop=["brown"], speculation=stats)
    answer = stub.Generate(request)
    assert answer.text == "the quick "
    num_tokens = answer.usage.completion_tokens
    assert answer.speculation.rounds == -(-num_tokens // 3)
    assert answer.speculation.accepted_tokens["echo"] == num_tokens - num_tokens // 3


def test_models_are_listed_over_grpc(stub, router):
    models = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert [(model.id, model.max_model_len) for model in models] == [("toy", 4096)]


def test_status_codes_and_details_name_what_is_wrong(stub, router):
    def unary(**fields):
        return failure(lambda: stub.Generate(ask(**fields)))

    def stream(**fields):
        return failure(lambda: list(stub.GenerateStream(ask(**fields))))

    for call in (unary, stream):
        code, details = call(temperature=3)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert details == "temperature is 3.0; it must be at most 2"
        assert call(model="other")[0] == grpc.StatusCode.NOT_FOUND
        assert call(prompt="")[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert call(max_tokens=5000)[0] == grpc.StatusCode.INVALID_ARGUMENT
        code, details = call(prompt="x" * 30_000)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "20000 bytes" in details
        router.set(max_running=0)
        code, details = call()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry after 2.5 s" in details
        router.set(failures=[(0, Unavailable("draining"))])
        assert call() == (grpc.StatusCode.UNAVAILABLE, "draining")
        router.set(failures=[(0, Overloaded("full", 1.0))])
        assert call()[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        router.set()
    assert "one of prompt" in failure(lambda: stub.Generate(inference_pb2.GenerateRequest()))[1]


def test_an_error_after_chunks_ends_the_stream_with_its_status(stub, router):
    router.set(failures=[(6, LinkError("broken"))], delay_s=0.5)
    texts = []

    def read():
        for chunk in stub.GenerateStream(ask(max_tokens=30)):
            texts.append(chunk.text)

    assert failure(read) == (grpc.StatusCode.UNAVAILABLE, "broken")
    assert len(texts) in (1, 2)  # Serve's proxy may leave out what an error follows at once
    router.set()
    assert stub.Generate(ask(max_tokens=6)).text.startswith("".join(texts))


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_grpc_deadline_reaches_the_router_and_frees_the_sequence(stub, router, method):
    router.set(delay_s=0.05)
    call = getattr(stub, method)

    def run():
        answer = call(ask(max_tokens=2000), timeout=0.6)
        if method == "GenerateStream":
            list(answer)

    assert failure(run)[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < router.last_request.timeout_s <= 0.61  # clocks are read twice
    router.wait_running(0, SOON_S)


def test_a_time_limit_in_the_request_is_a_deadline(stub, router):
    router.set(delay_s=0.05)
    code, details = failure(lambda: stub.Generate(ask(max_tokens=2000, timeout_s=0.3)))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "tokens" in details


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_cancelled_grpc_call_closes_the_routers_stream(stub, router, method):
    router.set(delay_s=0.05)
    if method == "Generate":
        call = stub.Generate.future(ask(max_tokens=2000))
    else:
        call = stub.GenerateStream(ask(max_tokens=2000))
        next(call)
    router.wait_running(1, SOON_S)
    call.cancel()
    router.wait_running(0, SOON_S)


def test_many_cancelled_grpc_streams_leave_nothing_behind(stub, router):
    router.set(delay_s=0.001, chunk_tokens=1)

    def leave(index):
        call = stub.GenerateStream(ask(max_tokens=2000))
        for _ in range(1 + index % 7):
            next(call)
        call.cancel()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    router.wait_running(0, SOON_S)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_what_may_be_tried_again_says_when_in_the_trailing_metadata(stub, router, method):
    def retry_time(**fields):
        call = stub.Generate.future if method == "Generate" else stub.GenerateStream
        answer = call(ask(**fields))
        with pytest.raises(grpc.RpcError) as caught:
            answer.result() if method == "Generate" else list(answer)
        return dict(caught.value.trailing_metadata()).get("grpc-retry-pushback-ms")

    router.set(max_running=0)
    assert retry_time() == "2500"
    router.set(failures=[(0, Unavailable("draining"))])
    assert retry_time() == "1000"
    router.set(failures=[(6, LinkError("broken"))])  # after chunks
    assert retry_time(max_tokens=30) == "1000"
    assert retry_time(temperature=3) is None


def test_health_follows_the_router(channel, router):
    health = health_pb2_grpc.HealthStub(channel)
    response = health_pb2.HealthCheckResponse

    def check(name):
        return health.Check(health_pb2.HealthCheckRequest(service=name)).status

    assert check("") == check("paceline.v1.Inference") == response.SERVING
    assert failure(lambda: check("other.Service"))[0] == grpc.StatusCode.NOT_FOUND
    listed = health.List(health_pb2.HealthListRequest()).statuses
    assert {name: one.status for name, one in listed.items()} == dict.fromkeys(
        ("", "paceline.v1.Inference"), response.SERVING
    )
    watch = health.Watch(health_pb2.HealthCheckRequest(service="paceline.v1.Inference"))
    assert next(watch).status == response.SERVING
    router.set(ready=False)
    assert next(watch).status == response.NOT_SERVING
    assert check("") == response.NOT_SERVING
    router.set()
    assert next(watch).status == response.SERVING
    watch.cancel()
    unknown = health.Watch(health_pb2.HealthCheckRequest(service="other.Service"))
    assert next(unknown).status == response.SERVICE_UNKNOWN
    unknown.cancel()


def test_reflection_lists_our_services_and_their_files(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="paceline.v1.Inference"),
    ]
    services, file = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in services.list_services_response.service}
    assert names >= {"paceline.v1.Inference", "grpc.health.v1.Health"}
    assert b"GenerateStream" in file.file_descriptor_response.file_descriptor_proto[0]


# --- the loss of a router --------------------------------------------------------------------------------------------


def test_a_stream_goes_on_unbroken_when_its_routers_process_dies(served, tmp_path):
    config = served[0]

    class MortalRouter(EchoRouter):
        """Dies once, in the middle of its first answer."""

        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.index == 4 and request.request_id.endswith("-0") and not (tmp_path / "died").exists():
                    (tmp_path / "died").touch()
                    os._exit(1)
                yield chunk

    router = serve.deployment(MortalRouter).options(name="Mortal", num_replicas=2, **ECHO_OPTIONS)
    TOKENIZER.save_pretrained(tmp_path)
    model = ServedModel("toy", max_model_len=4096, vocab_size=len(TOKENIZER), eos_token_ids=(EOS,))
    serve.run(
        gateway_application(router.bind(delay_s=0.02), str(tmp_path), model, config), name="pair", route_prefix="/pair"
    )
    try:
        url = f"http://127.0.0.1:{config.http_port}/pair/v1/completions"
        body = {"prompt": FOX, "max_tokens": 60, "seed": 11}
        lines = httpx.post(url, json={**body, "stream": True}, timeout=20).text.split("\n\n")
        assert (tmp_path / "died").exists()
        assert lines[-2] == "data: [DONE]"
        streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])
        whole = httpx.post(url, json=body, timeout=20).json()
        assert streamed == whole["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 60
    finally:
        serve.delete("pair", _blocking=False)
