"""Tenants on a cluster that is deployed from the text of a `serveConfigV2`: keys, limits, namespaces and shaped streams
over HTTP and gRPC, with a tiny model."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from actors.errors import InvalidRequest
from cluster.gateway import SERVICER_FUNCTIONS
from cluster.gateway.answers.streams import SIZES
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.offline.engine import LocalEngine
from cluster.tenants.administration import TenantAdministration
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.deployed import end_application, wait_for
from paceline_testing.free_ports import free_ports
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

# Longer than a few blocks of the prefix cache, and with something in it that comes again.
PROMPT = "what one tenant asks, another may not find out: " * 3
LISTING = inference_pb2.ListModelsRequest()


TEXT = """
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {http_port}}}
grpc_options:
  port: {grpc_port}
  grpc_servicer_functions: [{servicers}]
applications:
- name: paceline
  route_prefix: /
  import_path: cluster.app:build
  args:
    target: {{model: {model}, served_name: tiny, device: cpu, exact: bitwise, kv_cache_tokens: 8192}}
    draft: {{{workers}: 0}}
    gateway: {{stream_interval_ms: 20, replicas: 1, metrics_port: {metrics_port}, metrics_interval_s: 0}}
    tenants: {{file: {tenants}}}
"""


@dataclass(frozen=True)
class Cluster:
    values: dict[str, object]  # for TEXT
    admin: TenantAdministration
    model: Path


def deploy(text: str) -> ApplicationStatus:
    """What the dashboard does with a PUT of the configuration; waits for what becomes of it."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    serve.start(
        proxy_location=config.proxy_location,
        http_options=config.http_options.model_dump(),
        grpc_options=config.grpc_options.model_dump(),
    )
    _get_global_client().deploy_apps(config)
    deadline = time.monotonic() + 120
    while True:
        status = serve.status().applications["paceline"].status
        if status in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED):
            return status
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(ray_here, tmp_path_factory):
    """Deployed as `serve deploy` does it; routers may not know their target group yet."""
    serve.shutdown()  # another test's, whose options it would keep
    home = tmp_path_factory.mktemp("home")
    model = save_tiny_model(home / "tiny", hidden_size=32, layers=2, heads=4, kv_heads=2)
    speak_ascii(model)
    admin = TenantAdministration(home / "tenants.json")
    admin.add("first", {})  # with a registry keys are asked for from the start
    http_port, grpc_port, metrics_port = free_ports(3)
    values = {
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "model": model,
        "servicers": ", ".join(SERVICER_FUNCTIONS),
        "tenants": home / "tenants.json",
    }
    assert deploy(TEXT.format(workers="workers", **values)) == ApplicationStatus.RUNNING
    yield Cluster(values, admin, model)
    end_application()
    serve.shutdown()


@pytest.fixture
def http(cluster):
    with httpx.Client(
        base_url=f"http://127.0.0.1:{cluster.values['http_port']}", timeout=150
    ) as client:  # while the group starts
        yield client


@pytest.fixture
def stub(cluster):
    with grpc.insecure_channel(f"127.0.0.1:{cluster.values['grpc_port']}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def new_key(cluster, http, name, **fields):
    """Key of a tenant that is added while the cluster runs; waits until the gateway knows it."""
    with suppress(InvalidRequest):  # this test's first run has failed
        cluster.admin.remove(name)
    key = cluster.admin.add(name, fields).key
    wait_for(lambda: http.get("/v1/nothing", headers=bearer(key)).status_code != 401, "the key")
    return key


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def complete(http, key, **fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body, headers={} if key is None else bearer(key))


def refused(answer, status, code):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, code)
    return error


def ask(**fields):
    return inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=24, temperature=0, ignore_eos=True, **fields)


def grpc_errors(stub, key):
    """The error of every method of the service."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    for call in (
        lambda: stub.Generate(ask(), metadata=metadata),
        lambda: list(stub.GenerateStream(ask(), metadata=metadata)),
        lambda: stub.ListModels(LISTING, metadata=metadata),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        yield caught.value


def test_requests_wait_for_the_target_group_and_get_the_text_of_one_process(cluster, http, stub):
    key = new_key(cluster, http, "early")
    answer = complete(http, key)
    assert answer.status_code == 200, answer.text
    one = LocalEngine(str(cluster.model), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=8192)
    (wanted,) = one.generate([PROMPT], max_new_tokens=24, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == wanted.text
    assert stub.Generate(ask(), metadata=(("authorization", f"Bearer {key}"),)).text == wanted.text
    wait_for(lambda: http.get("/readyz").status_code == 200, "readiness")


def test_without_a_key_or_with_a_wrong_one_nothing_is_served_but_what_probes_ask(cluster, http, stub):
    key = new_key(cluster, http, "acme")
    for wrong in (None, key[:-1] + "x", "pl-0-0"):
        error = refused(complete(http, wrong), 401, "invalid_api_key")
        assert wrong is None or wrong not in error["message"]
        assert http.get("/v1/models", headers={} if wrong is None else bearer(wrong)).status_code == 401
        for grpc_error in grpc_errors(stub, wrong):
            assert grpc_error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert complete(http, None).headers["www-authenticate"] == "Bearer"
    for path in ("/livez", "/readyz", "/version"):
        assert http.get(path).status_code == 200
    assert http.get("/metrics").status_code == 404
    with grpc.insecure_channel(f"127.0.0.1:{cluster.values['grpc_port']}") as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    metadata = (("authorization", f"Bearer {key}"),)
    assert [model.id for model in stub.ListModels(LISTING, metadata=metadata).models] == ["tiny"]
    assert stub.Generate(ask(), metadata=metadata).text == complete(http, key).json()["choices"][0]["text"]


def test_a_disabled_tenant_is_refused_until_it_is_enabled_again(cluster, http, stub):
    key = new_key(cluster, http, "off")
    cluster.admin.change("off", {"disabled": True})
    wait_for(lambda: complete(http, key).status_code == 403, "the refusal")
    refused(complete(http, key), 403, "tenant_disabled")
    for error in grpc_errors(stub, key):
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    cluster.admin.change("off", {"disabled": False})
    wait_for(lambda: complete(http, key).status_code == 200, "the end of the refusal")


def test_over_a_limit_a_tenant_waits_and_the_others_do_not(cluster, http, stub):
    other = new_key(cluster, http, "other")
    slow = new_key(cluster, http, "slow", requests_per_second=0.01)  # which took the one request there is
    answer = complete(http, slow)
    assert refused(answer, 429, "rate_limit_exceeded")["param"] == "requests_per_second"
    assert 60 <= int(answer.headers["retry-after"]) <= 100
    for error in grpc_errors(stub, slow):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 60_000 <= int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) <= 100_000
    few = new_key(cluster, http, "few", tokens_per_minute=10)
    assert complete(http, few).status_code == 200  # more than a minute's tokens wait for a full bucket, which it was
    assert refused(complete(http, few), 429, "rate_limit_exceeded")["param"] == "tokens_per_minute"
    one = new_key(cluster, http, "one", max_concurrent=1)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(http, one, max_tokens=200), range(8)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) + statuses.count(429) == 8
    assert {answer.json()["error"]["param"] for answer in answers if answer.status_code == 429} <= {"max_concurrent"}
    assert complete(http, one).status_code == 200  # its place is free again
    assert complete(http, other).status_code == 200
    metrics = httpx.get(f"http://127.0.0.1:{cluster.values['metrics_port']}/metrics", timeout=60).text
    assert value_of(metrics, "paceline_tenant_refusals_total", reason="requests_per_second") > 0
    assert not any(name in metrics for name in ("acme", "slow", "pl-"))


def test_tenants_find_their_own_prefix_blocks_alone_and_say_the_same(cluster, http):
    a, b = new_key(cluster, http, "a"), new_key(cluster, http, "b")
    g, h = (new_key(cluster, http, name, policy="group", group="both") for name in ("g", "h"))

    def ask(key, **fields):
        answer = complete(http, key, **fields).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    cached, text = ask(a)
    assert cached == 0
    again, same = ask(a)
    assert again > 0  # or the rest would prove nothing
    assert same == text
    assert ask(b) == (0, text)
    assert ask(a, cache_salt="pepper") == (0, text)
    assert ask(a, cache_salt="pepper")[0] == again
    assert ask(a, speculation={"namespace": "notes"}) == (0, text)
    # Those of a group share, but are not told what others have asked.
    assert ask(g) == ask(h) == (0, text)
    for key, has_stats in ((a, True), (g, False)):
        answer = complete(http, key, speculation={"stats": True}).json()
        assert ("speculation" in answer) == has_stats


def test_a_shaped_stream_has_the_same_text_in_messages_of_few_sizes(cluster, http, stub):
    key = new_key(cluster, http, "stream")
    text = complete(http, key, max_tokens=120).json()["choices"][0]["text"]
    body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    sizes, parts = set(), []
    with http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if line and data != "[DONE]":
                sizes.add(len(data.encode()))
                parts.append(json.loads(data)["choices"][0]["text"])
    assert "".join(parts) == text
    assert sizes <= set(SIZES)
    metadata = (("authorization", f"Bearer {key}"),)
    request = inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=120, temperature=0, ignore_eos=True)
    chunks = list(stub.GenerateStream(request, metadata=metadata))
    assert "".join(chunk.text for chunk in chunks) == text
    assert {chunk.ByteSize() for chunk in chunks} <= set(SIZES)


def test_a_typo_in_the_text_is_refused_and_what_runs_goes_on(cluster, http):
    key = new_key(cluster, http, "late")
    assert deploy(TEXT.format(workers="wrokers", **cluster.values)) == ApplicationStatus.DEPLOY_FAILED
    assert "draft.wrokers" in serve.status().applications["paceline"].message
    assert complete(http, key).status_code == 200
