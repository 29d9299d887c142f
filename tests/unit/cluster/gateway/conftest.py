"""A gateway in this process over an echoing router; a module may have a tokenizer of its own."""

import pytest

from cluster.gateway.service import GenerationService
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_gateway import CONFIG, MODEL, TOKENIZER


@pytest.fixture
def router():
    return EchoRouter()


@pytest.fixture(scope="module")
def tokenizer():
    return TOKENIZER


@pytest.fixture
def service(router, tokenizer):
    return GenerationService(router, tokenizer, MODEL, CONFIG)


@pytest.fixture
async def client(service):
    async with gateway_client(service, CONFIG) as client:
        yield client
