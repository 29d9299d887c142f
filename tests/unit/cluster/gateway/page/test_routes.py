"""The documents at / and /docs as the gateway sends them; tests/browser shows what they do."""

import base64
import hashlib
import re

import pytest

from cluster.gateway.page.routes import PAGE_PATHS, inlined
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer

MODEL = ServedModel("toy", max_model_len=256, vocab_size=400, eos_token_ids=())
LIMITS = {"/": 60_000, "/docs": 20_000}


def client_of(**config):
    config = GatewayConfig(**config)
    return gateway_client(GenerationService(EchoRouter(), toy_tokenizer(), MODEL, config), config)


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
async def test_a_page_is_one_small_response_that_runs_its_own_scripts_only(path):
    async with client_of() as client:
        answer = await client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert len(answer.content) <= LIMITS[path]
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        contents = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert contents
        assert policy[f"{kind}-src"].split() == [f"'sha256-{digest}'" for digest in hashes]
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_without_the_page_its_paths_are_like_any_other_that_is_not_there():
    async with client_of(page=False) as client:
        for path in PAGE_PATHS:
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_a_script_that_would_end_its_element_is_refused(tmp_path):
    (tmp_path / "page.html").write_text('<script src="one.js"></script>', encoding="utf-8")
    (tmp_path / "one.js").write_text("show('</script>')", encoding="utf-8")
    with pytest.raises(ValueError, match=r"one\.js"):
        inlined(tmp_path / "page.html")
