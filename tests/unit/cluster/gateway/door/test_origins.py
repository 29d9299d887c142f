"""Requests that web pages of other origins send: which are answered, and which a browser may send at all."""

import pytest
from pydantic import ValidationError

from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", max_model_len=256, vocab_size=len(TOKENIZER), eos_token_ids=())
BODY = b'{"prompt": "the quick", "max_tokens": 2}'
APP = "https://app.example"


@pytest.fixture
def client(router):
    def make(gatekeeper=None, **settings):
        config = GatewayConfig(**settings)
        metrics = GatewayMetrics()
        keeper = None if gatekeeper is None else gatekeeper(metrics)
        return gateway_client(GenerationService(router, TOKENIZER, MODEL, config, metrics, keeper), config)

    return make


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", "json"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_page_may_post_without_asking_is_refused_before_work(client, router, path, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with client() as http:
        answer = await http.post(path, content=BODY, headers=headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_media_type", "Content-Type")
    assert "-H 'Content-Type: application/json'" in error["message"]
    assert router.requests == []


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_json_is_taken_however_it_is_written(client, kind):
    async with client() as http:
        answer = await http.post("/v1/completions", content=BODY, headers={"Content-Type": kind})
    assert answer.status_code == 200


async def test_two_types_are_refused(client):
    lines = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    async with client() as http:
        assert (await http.post("/v1/completions", content=BODY, headers=lines)).status_code == 415


def preflight(origin):
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }


async def test_without_origins_no_page_is_let_in(client):
    async with client() as http:
        asked = await http.options("/v1/completions", headers=preflight(APP))
        answer = await http.get("/v1/models", headers={"Origin": APP})
    assert asked.status_code >= 400
    assert not [name for name in (*asked.headers, *answer.headers) if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("settings", "host", "origin", "is_answered"),
    [
        ({}, "127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ({}, "LOCALHOST:8000", "http://localhost:8000", True),
        ({}, "[::1]:8000", "http://[::1]:8000", True),
        ({}, "localhost", "https://localhost", True),  # something before the server ends TLS
        ({}, "127.0.0.1:8000", APP, False),
        ({}, "127.0.0.1:8000", "http://127.0.0.1:3000", False),
        ({}, "127.0.0.1:8000", "http://localhost:8000", False),
        ({}, "127.0.0.1:8000", "null", False),
        ({}, "127.0.0.1:8000", "", False),
        ({"cors_origins": [APP]}, "127.0.0.1:8000", APP, True),
        ({"cors_origins": [APP]}, "127.0.0.1:8000", "https://other.example", False),
        ({"cors_origins": ["*"]}, "127.0.0.1:8000", "https://other.example", True),
        ({"cors_origins": ["chrome-extension://abc"]}, "127.0.0.1:8000", "chrome-extension://abc", True),
        # A server that does not know its names does not know its origin either.
        ({"host": "0.0.0.0"}, "behind.a.proxy", APP, True),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "llm.example", APP, False),
    ],
)
async def test_what_a_page_of_another_origin_sends_is_refused_before_work(
    client, router, settings, host, origin, is_answered
):
    headers = {"Host": host, "Origin": origin, "Content-Type": "application/json"}
    async with client(**settings) as http:
        answer = await http.post("/v1/completions", content=BODY, headers=headers)
        listed = await http.get("/v1/models", headers=headers)
        probed = await http.get("/livez", headers=headers)
    assert (answer.status_code == 200, listed.status_code == 200) == (is_answered, is_answered)
    assert probed.status_code == 200
    assert (router.requests != []) == is_answered
    if not is_answered:
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("origin_not_allowed", "Origin")
        assert "gateway.cors_origins" in error["message"]


async def test_two_origins_are_refused(client):
    lines = [("Origin", APP), ("Origin", APP), ("Content-Type", "application/json")]
    async with client(cors_origins=[APP]) as http:
        assert (await http.post("/v1/completions", content=BODY, headers=lines)).status_code == 403


@pytest.fixture
def gatekeeper(tmp_path):
    TenantAdministration(tmp_path / "tenants.json").add("a", {})
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=False)
    return lambda metrics: Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)


async def test_a_preflight_needs_no_key_and_names_the_origin_alone(client, gatekeeper):
    async with client(gatekeeper, cors_origins=[APP]) as http:
        asked = await http.options("/v1/completions", headers=preflight(APP))
        other = await http.options("/v1/completions", headers=preflight("https://other.example"))
        refused = await http.post("/v1/completions", content=BODY, headers={"Origin": APP})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, APP)
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "access-control-allow-credentials" not in asked.headers
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
        401,
        APP,
    )  # so the page can read it
    assert "retry-after" in refused.headers["access-control-expose-headers"]


async def test_an_origin_is_scheme_and_authority(client):
    for wrong in ("app.example", "https://app.example/", "https://app.example/x", "ftp://a"):
        with pytest.raises(ValidationError, match="cors_origins"):
            GatewayConfig(cors_origins=[wrong])
    async with client(cors_origins=["*"]) as http:
        answer = await http.get("/v1/models", headers={"Origin": "https://any.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
