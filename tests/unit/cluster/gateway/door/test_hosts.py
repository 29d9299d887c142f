"""Names in the Host header that are answered."""

import pytest
from pydantic import ValidationError

from cluster.gateway.door.hosts import PROBE_PATHS, allowed_hosts, host_name
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", max_model_len=256, vocab_size=len(TOKENIZER), eos_token_ids=())


@pytest.fixture
def client():
    """An HTTP client of a gateway with these settings."""

    def make(**settings):
        config = GatewayConfig(**settings)
        return gateway_client(GenerationService(EchoRouter(), TOKENIZER, MODEL, config), config)

    return make


@pytest.mark.parametrize(
    ("settings", "host", "is_answered"),
    [
        ({}, "localhost:8000", True),
        ({}, "127.0.0.1", True),
        ({}, "[::1]:8000", True),
        ({}, "LOCALHOST.", True),
        ({}, "rebound.example", False),
        ({}, "localhost.rebound.example", False),
        ({}, "127.0.0.1.rebound.example:8000", False),
        ({}, "", False),
        ({"host": "127.0.0.7"}, "127.0.0.7:8000", True),
        ({"host": "0.0.0.0"}, "paceline.default.svc.cluster.local", True),
        ({"host": "::"}, "[fd00::1]:8000", True),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "llm.example", True),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, "localhost", False),
        ({"allowed_hosts": ["*.llm.example"]}, "a.llm.example:80", True),
        ({"allowed_hosts": ["*.llm.example"]}, "llm.example", False),
        ({"allowed_hosts": ["*.llm.example"]}, "evilllm.example", False),
        ({"allowed_hosts": ["[::1]"]}, "[::1]", True),
        ({"allowed_hosts": ["*"]}, "rebound.example", True),
    ],
)
async def test_only_the_allowed_names_are_answered_except_for_probes(client, settings, host, is_answered):
    async with client(**settings) as http:
        for path in ("/v1/models", "/version", "/metrics", "/nothing", "/openapi.json"):
            answer = await http.get(path, headers={"Host": host})
            assert (answer.status_code == 403) is not is_answered, (path, answer.text)
        for path in PROBE_PATHS:
            assert (await http.get(path, headers={"Host": host})).status_code == 200


async def test_a_refusal_names_the_host_and_the_setting(client):
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "a"}, headers={"Host": "rebound.example"})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert error["message"] == (
        "Host is 'rebound.example'; this server answers to localhost, 127.0.0.1, ::1 (gateway.allowed_hosts)"
    )


async def test_two_host_headers_are_refused(client):
    async with client() as http:
        lines = [("Host", "localhost"), ("Host", "rebound.example")]
        assert (await http.get("/v1/models", headers=lines)).status_code == 403


def test_without_a_setting_a_server_that_others_reach_answers_to_any_name():
    assert allowed_hosts(None, "0.0.0.0") == allowed_hosts(None, "10.0.0.7") == allowed_hosts(["*"], "127.0.0.1") == ()
    with pytest.raises(ValidationError, match="allowed_hosts"):
        GatewayConfig(allowed_hosts=[])


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.b:80", "a.b"), ("[::1]:8000", "::1"), ("[::1", "::1"), ("A.", "a"), (" a ", "a"), ("", ""), (":80", "")],
)
def test_the_name_is_read_without_port(header, name):
    assert host_name(header) == name
