"""API keys, limits and namespaces over HTTP and gRPC, over an echoing router and over a real engine."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import numpy as np
import openai
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from actors.drafters.contract import DraftContext
from actors.messages import SamplingParams
from cache_service.formats.namespaces import OPEN, PUBLIC
from cluster.gateway.answers.streams import SIZES
from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.http.operational_routes import OPEN_PATHS
from cluster.gateway.http_app import create_app
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from cluster.gateway.page.routes import PAGE_PATHS
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.offline.engine import LocalEngine
from cluster.routing.router_status import RouterStatus
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from paceline_testing.echo_gateway import gateway_client, until
from paceline_testing.echo_router import EchoRouter
from paceline_testing.tiny_models import save_tiny_model
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", max_model_len=256, vocab_size=len(TOKENIZER), eos_token_ids=())
CONFIG = GatewayConfig(max_body_bytes=20_000, max_new_tokens=128, default_max_tokens=16, request_timeout_s=5)
FOX = "the quick brown fox"
NUM_FOX = len(TOKENIZER.backend_tokenizer.encode(FOX).ids)
COMPLETIONS = "/v1/completions"


@pytest.fixture
def admin(tmp_path):
    return TenantAdministration(tmp_path / "tenants.json", allow_shared=True)


def gatekeeper_of(access, metrics):
    return Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)


def make_service(admin, tmp_path, router, tokenizer=TOKENIZER, model=MODEL):
    metrics = GatewayMetrics()
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=False, allow_shared=True)
    gatekeeper = gatekeeper_of(access, metrics)
    return GenerationService(router, tokenizer, model, CONFIG, metrics, gatekeeper)


def bearer(issued):
    return {"Authorization": f"Bearer {issued.key}"}


async def complete(client, issued, **fields):
    body = {"prompt": FOX, "temperature": 0, "max_tokens": 8, **fields}
    return await client.post(COMPLETIONS, json=body, headers=bearer(issued) if issued else {})


def error_of(answer, status, code):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


async def test_what_probes_and_scrapers_ask_needs_no_key_and_all_else_does(admin, tmp_path, router):
    admin.add("a", {})
    service = make_service(admin, tmp_path, router)
    app = create_app(service, CONFIG)
    async with gateway_client(service, CONFIG) as client:
        for path in (OPEN_PATHS | PAGE_PATHS) - {"/metrics"}:
            assert (await client.get(path)).status_code == 200
            assert (await client.head(path)).status_code == 200
        routes = {route.path for route in app.routes} | {
            "/nothing",
            "/livez/",
            "http://localhost//livez",
            "/v1/models/toy",
            "/LIVEZ",
        }
        for path in sorted(routes - OPEN_PATHS - PAGE_PATHS):
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                answer = await client.request(method, path.replace("{", "").replace("}", ""))
                assert answer.status_code == 401, (method, path)
        metrics = await client.get("/metrics")
    assert "gateway.metrics_port" in error_of(metrics, 404, "not_found")["message"]
    assert 'paceline_tenant_refusals_total{reason="missing_key"}' in service.metrics.text()
    assert router.requests == []


async def test_no_key_a_wrong_one_and_a_disabled_tenant(admin, tmp_path, router):
    issued = admin.add("a", {})
    admin.add("off", {})
    off = admin.rotate("off", keep_old_for=timedelta(0))
    admin.change("off", {"disabled": True})
    service = make_service(admin, tmp_path, router)
    async with gateway_client(service, CONFIG) as client:
        answer = await complete(client, None)
        error_of(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        answer = await client.post(COMPLETIONS, json={}, headers={"Authorization": f"Bearer {issued.key}x"})
        assert issued.key not in error_of(answer, 401, "invalid_api_key")["message"]
        error_of(await complete(client, off), 403, "tenant_disabled")
        assert (await complete(client, issued)).status_code == 200
        async with openai.AsyncOpenAI(
            api_key="wrong", base_url="http://localhost/v1", http_client=client, max_retries=0
        ) as official:
            with pytest.raises(openai.AuthenticationError):
                await official.models.list()
    assert len(router.requests) == 1


async def test_a_key_is_asked_for_before_a_body_is_read(admin, tmp_path, router):
    admin.add("a", {})
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("gateway", 80),
    }  # fmt: skip
    await create_app(make_service(admin, tmp_path, router), CONFIG)(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_requests_carry_their_tenant_and_its_namespace(admin, tmp_path, router):
    a, b = admin.add("a", {}), admin.add("b", {})
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        for issued in (a, a, b):
            assert (await complete(client, issued)).status_code == 200
    assert [request.tenant for request in router.requests] == [a.tenant.id, a.tenant.id, b.tenant.id]
    namespaces = [request.namespace for request in router.requests]
    assert namespaces[0] == namespaces[1] != namespaces[2]
    assert "" not in namespaces


async def test_all_keys_of_a_tenant_are_one_organisation_to_the_public_pool(admin, tmp_path, router):
    keys = [admin.add("a", {"policy": "promoted"}), admin.rotate("a", timedelta(hours=1))]
    keys += [admin.add("b", {"policy": "promoted"}), admin.add("c", {})]
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        for issued in keys:
            assert (await complete(client, issued)).status_code == 200
        assert (await complete(client, keys[0], speculation={"cache": "read"})).status_code == 200
    first, second, other, nobody, reader = [request.promotes for request in router.requests]
    assert first == second != other
    assert (nobody, reader) == ("", "")
    assert keys[0].tenant.id not in first


async def test_where_promotion_is_off_its_tenants_are_isolated(admin, tmp_path, router):
    issued = admin.add("p", {"policy": "promoted"})
    metrics = GatewayMetrics()
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=False, allow_promoted=False)
    service = GenerationService(router, TOKENIZER, MODEL, CONFIG, metrics, gatekeeper_of(access, metrics))
    async with gateway_client(service, CONFIG) as client:
        assert (await complete(client, issued)).status_code == 200
    assert (router.requests[0].readable, router.requests[0].promotes) == ((), "")


async def test_without_tenants_requests_are_nobodys(router):
    async with gateway_client(GenerationService(router, TOKENIZER, MODEL, CONFIG), CONFIG) as client:
        assert (await complete(client, None)).status_code == 200
    assert (router.requests[0].tenant, router.requests[0].namespace) == ("", OPEN)


async def test_what_a_request_draws_on_is_by_its_tenants_policy_and_its_own_wishes(admin, tmp_path, router):
    keys = {
        "a": admin.add("a", {}),
        "p": admin.add("p", {"policy": "promoted"}),
        "g": admin.add("g", {"policy": "group"}),
        "poor": admin.add("poor", {"cache_bytes": 0}),
    }
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:

        async def scope(name, **fields):
            answer = await complete(client, keys[name], **fields)
            assert answer.status_code == 200, answer.text
            request = router.requests[-1]
            return request.namespace, request.readable, request.cache

        own, readable, cache = await scope("a")
        assert (readable, cache) == ((), "read_write")
        assert await scope("a", speculation={"namespace": "docs", "cache": "read"}) == (f"{own}.docs", (own,), "read")
        assert await scope("a", speculation={"cache": "off"}) == (own, (), "off")
        salted, readable, _ = await scope("a", cache_salt="pepper")
        assert (salted != own, salted.startswith(own), "pepper" in salted, readable) == (True, True, False, ())
        assert (await scope("p"))[1:] == ((PUBLIC,), "read_write")
        assert (await scope("poor"))[1:] == ((), "read")
        agreed = "we have agreed on this"
        assert (await scope("g", cache_salt=agreed))[0] != (await scope("g"))[0]
        error = error_of(await complete(client, keys["g"], cache_salt="pepper"), 400, "invalid_value")
        assert (error["param"], "pepper" in error["message"]) == ("cache_salt", False)


async def test_how_much_may_be_learnt_of_a_tenant_goes_with_its_requests_but_not_of_a_group(admin, tmp_path, router):
    keys = {
        "free": admin.add("free", {}),
        "own": admin.add("own", {"cache_bytes": 1000}),
        "group": admin.add("group", {"cache_bytes": 1000, "policy": "group", "group": "g"}),
    }
    told = {}
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        for name, key in keys.items():
            assert (await complete(client, key)).status_code == 200
            told[name] = router.requests[-1].cache_bytes
    assert told == {"free": None, "own": 1000, "group": None}


async def test_a_request_has_the_class_of_its_tenant_unless_it_says_and_always_its_weight(admin, tmp_path, router):
    keys = {"plain": admin.add("plain", {}), "bulk": admin.add("bulk", {"service_class": "batch", "weight": 2.5})}
    told = {}
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        for name, tier in (("plain", None), ("bulk", None), ("bulk", "auto"), ("bulk", "default"), ("plain", "flex")):
            assert (await complete(client, keys[name], service_tier=tier)).status_code == 200
            told[name, tier] = router.requests[-1].service_class, router.requests[-1].tenant_weight
    assert told == {
        ("plain", None): ("interactive", 1.0),
        ("bulk", None): ("batch", 2.5),
        ("bulk", "auto"): ("batch", 2.5),
        ("bulk", "default"): ("interactive", 2.5),
        ("plain", "flex"): ("batch", 1.0),
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_counts_that_would_tell_of_other_tenants_are_not_told(admin, tmp_path, router, stream):
    told = {}
    for name, fields in (
        ("isolated", {}),
        ("promoted", {"policy": "promoted"}),
        ("group", {"policy": "group", "group": "g"}),
        ("shared", {"policy": "shared"}),
    ):
        issued = admin.add(name, fields)
        async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
            answer = await complete(
                client, issued, stream=stream, speculation={"stats": True, "token_sources": True},
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )  # fmt: skip
        last = json.loads(answer.text.split("data: ")[-2]) if stream else answer.json()
        has_cached = last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        told[name] = has_cached, "speculation" in last, "token_sources" in answer.text
    assert told == {
        "isolated": (True, True, True),
        "promoted": (True, False, False),
        "group": (False, False, False),
        "shared": (False, False, False),
    }


async def test_streams_of_tenants_are_padded_to_few_sizes_and_the_text_is_the_same(admin, tmp_path, router):
    issued = admin.add("a", {})
    router.chunk_tokens = 5
    service = make_service(admin, tmp_path, router)

    async def sizes_of(client, stream_options):
        answer = await complete(client, issued, max_tokens=60, stream=True, stream_options=stream_options)
        chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line][:-1]
        texts = [choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
        return {len(chunk.encode()) for chunk in chunks}, texts

    async with gateway_client(service, CONFIG) as client:
        whole = (await complete(client, issued, max_tokens=60)).json()["choices"][0]["text"]
        padded, texts = await sizes_of(client, None)
        assert padded <= set(SIZES)
        assert "".join(texts) == whole
        bare, texts = await sizes_of(client, {"include_obfuscation": False})
        assert not bare & set(SIZES)
        assert "".join(texts) == whole
        service._config = CONFIG.model_copy(update={"stream_interval_ms": 0.0, "stream_tokens": 4})
        _, texts = await sizes_of(client, None)
        assert "".join(texts) == whole
        assert len(texts) == 15
        for stop in (whole[9:14], whole[-3:], "never in it"):
            until = (await complete(client, issued, max_tokens=60, stop=stop)).json()["choices"][0]
            answer = await complete(client, issued, max_tokens=60, stop=stop, stream=True)
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            chunks = [json.loads(line) for line in lines[:-1]]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == until["text"]
            assert chunks[-1]["choices"][0]["finish_reason"] == until["finish_reason"]


async def test_over_the_rate_of_requests(admin, tmp_path, router):
    slow, other = admin.add("slow", {"requests_per_second": 0.01}), admin.add("other", {})
    service = make_service(admin, tmp_path, router)
    async with gateway_client(service, CONFIG) as client:
        assert (await complete(client, slow)).status_code == 200
        answer = await complete(client, slow)
        assert error_of(answer, 429, "rate_limit_exceeded")["param"] == "requests_per_second"
        assert 90 <= int(answer.headers["retry-after"]) <= 100
        assert (await complete(client, other)).status_code == 200
    text = await service.metrics_page.text()
    assert 'paceline_tenant_refusals_total{reason="requests_per_second"} 1.0' in text
    assert "slow" not in text
    assert slow.tenant.id not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_over_the_tokens_of_a_minute(admin, tmp_path, router, stream):
    minute = NUM_FOX + 8
    issued = admin.add("a", {"tokens_per_minute": minute})
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        assert (await complete(client, issued, stream=stream, max_tokens=50)).status_code == 200
        answer = await complete(client, issued, stream=stream)
        assert error_of(answer, 429, "rate_limit_exceeded")["param"] == "tokens_per_minute"
        # 42 tokens overdrawn, and a prompt's worth on top; less what flowed in meanwhile.
        expected_s = 60 * (50 - 8 + NUM_FOX) / minute
        assert expected_s - 10 <= int(answer.headers["retry-after"]) <= expected_s + 1
    assert len(router.requests) == 1


async def test_a_prompt_that_is_too_long_is_charged_and_the_next_is_refused_before_it_is_tokenised(
    admin, tmp_path, router
):
    issued = admin.add("a", {"tokens_per_minute": 200})
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        long = {"prompt": "a b " * 300}
        assert error_of(await complete(client, issued, **long), 400, "context_length_exceeded")["param"] == "prompt"
        for fields in ({}, long):
            assert error_of(await complete(client, issued, **fields), 429, "rate_limit_exceeded")
    assert router.requests == []


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_counting_tokens_is_charged_and_refused_before_it_is_done(admin, tmp_path, router, path):
    issued = admin.add("a", {"tokens_per_minute": 200})
    service = make_service(admin, tmp_path, router)
    async with gateway_client(service, CONFIG) as client:

        async def count(text):
            body = {"messages": [{"role": "user", "content": text}]}
            return await client.post(path, json=body, headers=bearer(issued))

        endless = await count("a b " * 4_500)
        assert "at least" in endless.json()["error"]["message"]
        assert endless.status_code == 400
        assert (await count("a b " * 300)).status_code == 200
        answer = await count("a")
        assert answer.status_code == 429
        assert "tokens_per_minute" in answer.json()["error"]["message"]
    assert 'reason="tokens_per_minute"' in service.metrics.text()


async def test_places_are_held_until_a_stream_ends_or_is_left(admin, tmp_path, router):
    issued = admin.add("a", {"max_concurrent": 2})
    service = make_service(admin, tmp_path, router)
    async with gateway_client(service, CONFIG) as client:
        assert "at most 2" in error_of(await complete(client, issued, n=3), 400, "invalid_value")["message"]
        router.delay_s = 0.05
        slow = asyncio.create_task(complete(client, issued, n=2, max_tokens=128))
        await until(lambda: router.running)
        answer = await complete(client, issued)
        assert error_of(answer, 429, "rate_limit_exceeded")["param"] == "max_concurrent"
        assert answer.headers["retry-after"] == "1"
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await until(lambda: not router.running)
        router.delay_s = 0.0
        assert (await complete(client, issued, n=2)).status_code == 200
        router.failures = [(1, RuntimeError("boom"))]
        assert (await complete(client, issued)).status_code == 500
        assert (await complete(client, issued, n=2, stream=True)).status_code == 200
        assert (await complete(client, issued, n=2)).status_code == 200


async def test_an_answer_under_way_when_its_tenant_is_removed_goes_on_to_its_end(admin, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.tenants.registry_file._CHECK_PERIOD_S", 0.0)
    may_go_on = asyncio.Event()

    class Gated(EchoRouter):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk
                await may_go_on.wait()

    issued, other = admin.add("a", {}), admin.add("b", {})
    router = Gated()
    async with gateway_client(make_service(admin, tmp_path, router), CONFIG) as client:
        running = asyncio.create_task(complete(client, issued, max_tokens=64))
        await until(lambda: router.running)
        admin.remove("a")
        error_of(await complete(client, issued), 401, "invalid_api_key")
        assert router.running
        may_go_on.set()
        answers = await running, await complete(client, other, max_tokens=64)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


@asynccontextmanager
async def grpc_channel(service):
    server = grpc.aio.server()
    servicer = InferenceServicer(service, CONFIG)
    add_InferenceServicer_to_server(servicer, server)
    servicer.List = None  # which Serve never asks for
    add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def generate_request(**fields):
    return inference_pb2.GenerateRequest(prompt=FOX, temperature=0, max_tokens=8, **fields)


async def every_method(stub, metadata):
    """The error of each method of the service, which are the same."""
    calls = [
        lambda: stub.Generate(generate_request(), metadata=metadata),
        lambda: stub.GenerateStream(generate_request(), metadata=metadata).read(),
        lambda: stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        yield caught.value


async def test_grpc_refuses_with_its_own_codes(admin, tmp_path, router):
    issued, off = admin.add("a", {"requests_per_second": 0.01}), admin.add("off", {})
    admin.change("off", {"disabled": True})
    async with grpc_channel(make_service(admin, tmp_path, router)) as channel:
        stub = InferenceStub(channel)
        for metadata in ((), (("authorization", f"Bearer {issued.key}0"),), (("authorization", "Basic x"),)):
            async for error in every_method(stub, metadata):
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        async for error in every_method(stub, (("authorization", f"Bearer {off.key}"),)):
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert router.requests == []
        metadata = (("authorization", f"Bearer {issued.key}"),)
        answer = await stub.Generate(generate_request(), metadata=metadata)
        assert answer.usage.completion_tokens == 8
        assert router.requests[0].tenant == issued.tenant.id
        async for error in every_method(stub, metadata):
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            pushback_ms = int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])
            assert 90_000 <= pushback_ms <= 100_000
        health = await HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_grpc_has_the_same_wishes_and_pads_the_same(admin, tmp_path, router):
    metadata = (("authorization", f"Bearer {admin.add('a', {}).key}"),)
    use = inference_pb2.CacheUse
    async with grpc_channel(make_service(admin, tmp_path, router)) as channel:
        stub = InferenceStub(channel)
        for given, cache in ((0, "read_write"), (use.CACHE_USE_OFF, "off"), (use.CACHE_USE_READ, "read")):
            speculation = inference_pb2.Speculation(cache=given, namespace="docs")
            await stub.Generate(generate_request(speculation=speculation), metadata=metadata)
            request = router.requests[-1]
            assert (request.cache, request.namespace.partition(".")[2]) == (cache, "docs")
        limited = inference_pb2.Speculation(max_draft_tokens=3, enabled=True, stats=True)
        await stub.Generate(generate_request(speculation=limited), metadata=metadata)
        assert router.requests[-1].max_draft_tokens == 3
        own = request.namespace.partition(".")[0]
        await stub.Generate(generate_request(cache_salt="pepper"), metadata=metadata)
        assert router.requests[-1].namespace.startswith(f"{own}-")
        for wrong, field in (
            ({"speculation": inference_pb2.Speculation(cache=9)}, "speculation.cache"),
            ({"speculation": inference_pb2.Speculation(sources=["oracle"])}, "speculation.drafters"),
            ({"speculation": inference_pb2.Speculation(sources=["suffix"], drafters=["auto"])}, "speculation.sources"),
            ({"speculation": inference_pb2.Speculation(namespace="A")}, "speculation.namespace"),
            ({"cache_salt": "x" * 257}, "cache_salt"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(generate_request(**wrong), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(field)
        for padded in (None, True, False):
            fields = {} if padded is None else {"include_obfuscation": padded}
            chunks = [chunk async for chunk in stub.GenerateStream(generate_request(**fields), metadata=metadata)]
            assert "".join(chunk.text for chunk in chunks)
            assert ({chunk.ByteSize() for chunk in chunks} <= set(SIZES)) == (padded is not False)


async def test_grpc_answers_count_against_the_tokens_of_a_minute(admin, tmp_path, router):
    issued = admin.add("a", {"tokens_per_minute": NUM_FOX + 1})
    metadata = (("authorization", f"Bearer {issued.key}"),)
    async with grpc_channel(make_service(admin, tmp_path, router)) as channel:
        stub = InferenceStub(channel)
        async for _ in stub.GenerateStream(generate_request(), metadata=metadata):
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generate_request(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tokens_per_minute" in caught.value.details()


class EngineRouter:
    """A `RouterClient` over an engine in this process, one request at a time."""

    def __init__(self, engine):
        self.engine = engine
        self.num_cached = 0  # prompt tokens of the last request, whoever may be told

    async def generate(self, request):
        self.num_cached = 0
        for chunk in self.engine._chunks([request], {}, None):
            self.num_cached += chunk.num_cached_tokens
            yield chunk

    async def status(self):
        return RouterStatus(ready=True, live=True)

    async def metrics_text(self):
        return ""


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_isolated_tenants_share_neither_prefix_blocks_nor_drafts(admin, tmp_path, tiny_dir):
    engine = LocalEngine(str(tiny_dir), draft_model="none", drafters=("soft_ngram", "ngram_table"))
    learners = dict(engine.core._drafting.cpu._drafters)
    model = ServedModel("tiny", engine.max_model_len, engine.target.vocab_size, eos_token_ids=())
    a, b = admin.add("a", {}), admin.add("b", {})
    g, h = (admin.add(name, {"policy": "group", "group": "both"}) for name in ("g", "h"))
    router = EngineRouter(engine)
    service = make_service(admin, tmp_path, router, engine.tokenizer, model)
    prompt = "what one tenant asks, another may not find out: " * 3
    namespaces = {}

    async def ask(name, issued):
        namespaces[name] = (await service.enter([f"Bearer {issued.key}"])).sharing.namespace
        async with gateway_client(service, CONFIG) as client:
            answer = (await complete(client, issued, prompt=prompt, max_tokens=24)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    def drafted(name):
        """Which of those that learn have something to propose in a namespace."""
        # So few that nothing is repeated among them: what is proposed was learnt before.
        token_ids = np.array(engine.tokenizer(prompt, add_special_tokens=False).input_ids[-3:], np.int32)
        context = DraftContext(10**6, token_ids, 0, len(token_ids), 16, SamplingParams(seed=0), namespaces[name])
        found = {one for one, drafter in learners.items() if len(drafter.propose([context])[0])}
        for drafter in learners.values():
            drafter.forget(10**6)
        return found

    cached, text = asyncio.run(ask("a", a))
    assert cached == 0
    again, same = asyncio.run(ask("a", a))
    assert again > 0  # or the rest would prove nothing
    assert drafted("a") == set(learners)
    namespaces["b"] = asyncio.run(service.enter([f"Bearer {b.key}"])).sharing.namespace
    assert drafted("b") == set()
    assert asyncio.run(ask("b", b)) == (0, text)
    assert same == text
    # Those of a group do share: it is the namespace that keeps the others apart.
    assert asyncio.run(ask("g", g)) == (0, text)
    assert router.num_cached == 0
    assert asyncio.run(ask("h", h)) == (0, text)  # and are not told
    assert router.num_cached == again
    assert drafted("h") == set(learners)
