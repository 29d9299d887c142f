"""The public ports of a gateway with tenants on a real Ray Serve: what they tell, take and survive."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from cluster.gateway.deployment import gateway_application, start_proxies
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from paceline_testing.certificates import Authority
from paceline_testing.deployed import end_application, wait_for
from paceline_testing.echo_router import ECHO_OPTIONS, EchoRouter
from paceline_testing.free_ports import free_ports
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
FOX = "the quick brown fox"
MB = 1_000_000
MADE_UP = "Bearer x"
GATEWAY = "ServeReplica:paceline:Gateway"


@dataclass(frozen=True)
class Door:
    config: GatewayConfig
    key: str

    @property
    def url(self):
        return f"{'https' if self.config.tls.certificate_file else 'http'}://127.0.0.1:{self.config.http_port}"

    @property
    def headers(self):
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def metadata(self):
        return (("authorization", f"Bearer {self.key}"),)


@contextlib.contextmanager
def opened(home, **settings):
    """Serve with proxies of its own, two gateways and tenants."""
    serve.shutdown()  # another test's, whose options it would keep
    TOKENIZER.save_pretrained(home / "tokenizer")
    key = TenantAdministration(home / "tenants.json").add("first", {}).key
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    config = GatewayConfig(
        **ports, replicas=2, max_new_tokens=4000, request_timeout_s=60, stream_interval_ms=0, **settings
    )
    model = ServedModel("toy", max_model_len=32_768, vocab_size=len(TOKENIZER), eos_token_ids=())
    access = TenantAccess(home / "tenants.json", may_be_open=False)
    try:
        start_proxies(config, access)
        router = serve.deployment(EchoRouter).options(name="Router", **ECHO_OPTIONS)
        application = gateway_application(router.bind(delay_s=0.01), str(home / "tokenizer"), model, config, access)
        serve.run(application, name="paceline")
        yield Door(config, key)
    finally:
        with contextlib.suppress(RayServeException):  # another has taken its place
            end_application()
            serve.shutdown()


@pytest.fixture(scope="module")
def door(ray_here, tmp_path_factory):
    with opened(tmp_path_factory.mktemp("home")) as door:
        wait_for(lambda: httpx.get(f"{door.url}/readyz", timeout=30).status_code == 200, "readiness")
        yield door


def complete(door, **fields):
    body = {"prompt": FOX, "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{door.url}/v1/completions", json=body, headers=door.headers, timeout=30)


@pytest.fixture
def channel(door):
    with grpc.insecure_channel(f"127.0.0.1:{door.config.grpc_port}") as channel:
        yield channel


def code_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def test_without_a_key_the_public_ports_tell_how_the_server_is_and_nothing_else(door, channel):
    assert complete(door).status_code == 200
    for path in ("/livez", "/readyz", "/health", "/version", "/-/healthz"):
        assert httpx.get(f"{door.url}{path}").status_code == 200
    assert httpx.get(f"{door.url}/-/healthz").text == "success"
    for path in ("/-/routes", "/-/", "/metrics"):
        answer = httpx.get(f"{door.url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert httpx.get(f"{door.url}/v1/models").status_code == 401
    own = serve_pb2_grpc.RayServeAPIServiceStub(channel)
    assert code_of(lambda: own.ListApplications(serve_pb2.ListApplicationsRequest())) is grpc.StatusCode.UNIMPLEMENTED
    assert code_of(lambda: own.Healthz(serve_pb2.HealthzRequest())) is grpc.StatusCode.UNIMPLEMENTED


def test_what_proxies_refuse_themselves_is_counted_by_ray(door, channel):
    def counted(code):
        (node,) = [one for one in ray.nodes() if one["Alive"]]
        page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
        lines = [line for line in page.splitlines() if line.startswith("ray_paceline_door_refusals_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if f'code="{code}"' in line)

    before = {code: counted(code) for code in ("headers_too_large", "body_too_large", "invalid_api_key")}
    assert httpx.get(f"{door.url}/v1/models", headers={"X-Large": "x" * 70_000}).status_code == 431
    large = {**door.headers, "Content-Type": "application/json"}
    assert httpx.post(f"{door.url}/v1/completions", headers=large, content=b"x" * 5_000_000).status_code == 413
    stub = inference_pb2_grpc.InferenceStub(channel)
    assert code_of(lambda: stub.Generate(inference_pb2.GenerateRequest(prompt="a"))) is grpc.StatusCode.UNAUTHENTICATED
    for code, count in before.items():
        wait_for(lambda code=code, count=count: counted(code) == count + 1, f"{code} to be counted")


def test_metrics_of_all_gateways_are_on_their_own_port(door):
    page = httpx.get(f"http://127.0.0.1:{door.config.metrics_port}/metrics", timeout=30).text
    assert page.count("# TYPE paceline_generation_tokens_total counter") == 1
    assert len({line for line in page.splitlines() if line.startswith("paceline_prompt_tokens_total{gateway=")}) == 2
    assert value_of(page, "echo_running", router="echo") == 0


class Memory:
    """The most memory that proxy and gateways have had above that of the beginning, MB; measured in a thread."""

    def __init__(self):
        self._processes = [psutil.Process(pid) for pid in ray_processes("ProxyActor") + ray_processes(GATEWAY)]
        assert len(self._processes) == 3
        self._before = self._now()
        self.growth = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _now(self):
        return sum(one.memory_info().rss for one in self._processes) / MB

    def _watch(self):
        while not self._is_over.wait(0.02):
            self.growth = max(self.growth, self._now() - self._before)


def raw(door, *parts):
    """What comes back on a connection of its own, however it ends."""
    with socket.create_connection(("127.0.0.1", door.config.http_port), timeout=20) as one:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                one.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := one.recv(65536):
                answer += data
                if b"}}" in answer:
                    break
    return answer


def test_abuse_without_a_key_costs_little_memory(door):
    options = [("grpc.max_send_message_length", -1)]
    large = b"\n" + b"\x80\xe1\xeb\x17" + b"x" * 50_000_000 * 2
    assert httpx.get(f"{door.url}/livez").status_code == 200
    with Memory() as memory:
        with grpc.insecure_channel(f"127.0.0.1:{door.config.grpc_port}", options) as channel:
            send = channel.unary_unary("/paceline.v1.Inference/Generate")
            calls = [send.future(large, timeout=60) for _ in range(4)]
            assert {call.code() for call in calls} <= {
                grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED
            }  # fmt: skip
            fitting = b"\n" + b"\x80\x89\x7a" + b"x" * 2_000_000
            calls = [send.future(fitting, timeout=60, metadata=(("authorization", MADE_UP),)) for _ in range(40)]
            assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
            head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
            for headers in (
                [b"X: ", b"y" * 60 * MB],
                [b"X: y\r\n" * 20_000, b"\r\n"],
                [b"X: " + b"y" * MB, b"\r\n\r\n"],
            ):
                answer = raw(door, head, *headers)
                assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
                assert b'"code":"headers_too_large"' in answer
        chunks = [b"%x\r\n" % MB + b"z" * MB + b"\r\n"] * 60
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = raw(door, post + b"Transfer-Encoding: chunked\r\n\r\n", *chunks)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 401 "), answer[:200]
        body = b"z" * (door.config.max_body_bytes - 1)
        head = f"Authorization: {MADE_UP}\r\nContent-Length: {len(body) + 1}\r\n\r\n".encode()
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: raw(door, post + head, body), range(40)))
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 401 ") for answer in answers)
        assert any(answers)
    print(f"abuse: {memory.growth:.0f} MB")
    assert memory.growth <= 50, f"{memory.growth:.0f} MB"


def test_many_connections_cost_little_memory_and_keep_nobody_out(door):
    head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 60_000
    with Memory() as memory, contextlib.ExitStack() as connections:
        for _ in range(3 * door.config.max_connections):
            connection = connections.enter_context(
                socket.create_connection(("127.0.0.1", door.config.http_port), timeout=30)
            )
            connection.sendall(head)
        assert complete(door).status_code == 200
    print(f"connections: {memory.growth:.0f} MB")
    assert memory.growth <= 50, f"{memory.growth:.0f} MB"


def test_a_body_above_the_limit_is_refused_with_its_size(door):
    too_large = {"prompt": "x" * door.config.max_body_bytes}
    answer = httpx.post(f"{door.url}/v1/completions", json=too_large, headers=door.headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_answers_and_grpc_calls_may_be_larger_than_grpcs_usual_limit(door, channel):
    longest = " ".join(["the quick brown fox jumps over the lazy dog"] * 3200)
    answer = complete(door, prompt=longest, echo=True, n=32, temperature=1)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 4 << 20
    assert all(choice["text"].startswith(longest) for choice in answer.json()["choices"])
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(prompt=FOX, max_tokens=8, stop=["x" * 1000] * ((4 << 20) // 1003 - 1))
    assert code_of(lambda: stub.Generate(request, metadata=door.metadata)) is grpc.StatusCode.INVALID_ARGUMENT


def stream_lines(door, seen, **fields):
    body = {"prompt": FOX, "temperature": 0, "stream": True, **fields}
    with httpx.stream("POST", f"{door.url}/v1/completions", json=body, headers=door.headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                seen.append(line)


def test_a_killed_gateway_costs_its_own_streams_alone_and_others_some_seconds_at_most(door, channel):
    streams = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=stream_lines, args=(door, seen), kwargs={"max_tokens": 1500}) for seen in streams
    ]
    for thread in threads:
        thread.start()
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(prompt=FOX, temperature=0, max_tokens=1500)
    over_grpc = [stub.GenerateStream(request, metadata=door.metadata, timeout=60) for _ in range(6)]
    for call in over_grpc:
        next(call)
    wait_for(lambda: all(streams), "the beginning of all streams")
    with ThreadPoolExecutor(8) as pool:
        whole = [pool.submit(complete, door, max_tokens=1500) for _ in range(8)]
        router = serve.get_deployment_handle("Router", "paceline")
        wait_for(lambda: router.observed.remote().result()[0] == 22, "all requests at the router")
        victim = ray_processes(GATEWAY)[0]
        psutil.Process(victim).kill()
        failed_for, statuses = gap(lambda: complete(door), lambda: len(set(ray_processes(GATEWAY)) - {victim}) == 2)
        answers = [each.result() for each in whole]
    endings = [ending_of(call) for call in over_grpc]
    for thread in threads:
        thread.join(60)
    lost_whole = [answer for answer in answers if answer.status_code != 200]
    lost_streams = [seen for seen in streams if seen[-1] != "data: [DONE]"]
    lost_calls = [details for code, details in endings if code is not grpc.StatusCode.OK]
    assert 0 < len(lost_whole) + len(lost_streams) + len(lost_calls) < 22  # Serve may give all of one kind to one
    for answer in lost_whole:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    for seen in lost_streams:
        assert seen[-1].startswith('data: {"error":{"message":"the answer broke off before its end')
    assert set(lost_calls) <= {"the gateway that answered was lost; the same call may be sent again"}
    print(f"killed gateway: refused for {failed_for:.2f} s, {statuses}")
    assert failed_for <= 6, statuses  # less than 3 on a quiet machine


def ending_of(call):
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass
    return call.code(), call.details()


def gap(ask, is_replaced, within_s=60.0):
    """Seconds from now until the last of the calls that failed had done so, and the number of each answer, until what
    was lost is replaced and ten calls in a row have gone well."""
    started = time.monotonic()
    failed_until, good, seen = started, 0, []
    while good < 10 or not is_replaced():
        assert time.monotonic() < started + within_s, seen
        try:
            answer = ask()
            status = answer.status_code
            assert status == 200 or answer.json()["error"]["code"] in ("unavailable", "overloaded"), answer.text
        except httpx.TransportError as error:
            status = type(error).__name__
            time.sleep(0.05)
        seen.append(status)
        good = good + 1 if status == 200 else 0
        if status != 200:
            failed_until = time.monotonic()
    return failed_until - started, {status: seen.count(status) for status in seen}


def test_a_killed_proxy_is_soon_replaced(door):
    (proxy,) = ray_processes("ProxyActor")
    psutil.Process(proxy).kill()
    failed_for, statuses = gap(lambda: complete(door), lambda: len(ray_processes("ProxyActor")) == 1)
    print(f"killed proxy: refused for {failed_for:.2f} s, {statuses}")
    assert failed_for <= 10, statuses  # 2 on a quiet machine, most of it the start of a process


def test_many_grpc_connections_and_calls_without_a_key_cost_little_memory(door, channel):
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty settings
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(prompt=FOX, temperature=0, max_tokens=8)
    assert stub.Generate(request, metadata=door.metadata, timeout=30).text
    with Memory() as memory, contextlib.ExitStack() as opened:
        watches = [channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(600)]
        for _ in range(2 * door.config.max_connections):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", door.config.grpc_port), timeout=30))
            one.sendall(hello)
        wait_for(lambda: sum(watch.done() for watch in watches) >= 500, "refusals")
        ended = {watch.code() for watch in watches if watch.done()}
        assert ended <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}  # by us, and by grpc itself
        assert stub.Generate(request, metadata=door.metadata, timeout=30).text  # on a connection that was there before
        for watch in watches:
            watch.cancel()
    print(f"gRPC connections: {memory.growth:.0f} MB")
    assert memory.growth <= 50, f"{memory.growth:.0f} MB"


@pytest.mark.slow
def test_tls_with_certificates_of_clients_on_both_ports(ray_here, tmp_path):
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("server", "server")
    client = authority.issue("client", "client")
    tls = {"certificate_file": certificate, "key_file": key, "client_ca_file": authority.file}
    with opened(tmp_path, tls=tls) as door, httpx.Client(verify=str(authority.file)) as without:
        wait_for(lambda: without.get(f"{door.url}/readyz", timeout=30).status_code == 200, "readiness")
        answer = without.get(f"{door.url}/v1/models", headers=door.headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_client_certificate")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{door.config.http_port}/readyz")
        authority.issue("server", "server")  # the files change
        context = ssl.create_default_context(cafile=str(authority.file))
        context.load_cert_chain(*client)
        with httpx.Client(verify=context) as known:
            assert known.get(f"{door.url}/v1/models", headers=door.headers).status_code == 200
        pair = client[1].read_bytes(), client[0].read_bytes()
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *pair)
        with grpc.secure_channel(f"localhost:{door.config.grpc_port}", credentials) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert stub.ListModels(inference_pb2.ListModelsRequest(), metadata=door.metadata).models[0].id == "toy"
