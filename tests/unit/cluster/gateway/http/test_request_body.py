"""Compressed bodies over HTTP: `cluster.gateway.http.request_body`."""

import gzip
import io
import json
import tracemalloc
import zlib

import pytest
import zstandard
from ray.exceptions import ActorDiedError, TaskCancelledError
from starlette.requests import ClientDisconnect, Request

from cluster.gateway.http.request_body import read_body
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = ServedModel("toy", max_model_len=256, vocab_size=len(TOKENIZER), eos_token_ids=())
LIMIT = 100_000
CONFIG = GatewayConfig(max_body_bytes=LIMIT)
BODY = json.dumps({"prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}).encode()
GZIPPED = gzip.compress(BODY, mtime=0)  # else its bytes, and names of tests, tell the time


@pytest.fixture
async def client():
    async with gateway_client(GenerationService(EchoRouter(), TOKENIZER, MODEL, CONFIG), CONFIG) as client:
        yield client


async def post(client, content, encoding):
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return await client.post("/v1/completions", content=content, headers=headers)


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def zeros(compress, megabytes):
    """So many bytes of zeros, compressed; they are never in memory at once."""
    output = io.BytesIO()
    with compress(output) as file:
        for _ in range(megabytes):
            file.write(bytes(1 << 20))
    return output.getvalue()


def gzip_writer(output):
    return gzip.GzipFile(fileobj=output, mode="wb")


def zstd_writer(output):
    return zstandard.ZstdCompressor().stream_writer(output, closefd=False)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", GZIPPED),
        ("X-GZIP", GZIPPED),
        ("gzip", gzip.compress(BODY[:20], mtime=0) + gzip.compress(BODY[20:], mtime=0)),
        ("zstd", zstandard.compress(BODY)),
        ("zstd", zstandard.compress(BODY[:20]) + zstandard.compress(BODY[20:])),
        ("identity", BODY),
        ("", BODY),
    ],
)
async def test_a_compressed_body_is_read(client, encoding, content):
    response = await post(client, content, encoding)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "the quick brown fox"


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, zstd", "gzip, gzip"])
async def test_an_unknown_encoding_is_told_those_that_are_known(client, encoding):
    error = error_of(await post(client, BODY, encoding), 415)
    assert error["param"] == "content-encoding"
    assert error["message"] == f"content-encoding is {encoding!r}; known encodings are gzip and zstd, one at a time"


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", BODY), ("gzip", b""), ("gzip", GZIPPED[:-9]), ("gzip", GZIPPED + b"more"),
        ("gzip", zlib.compress(BODY)), ("zstd", BODY), ("zstd", GZIPPED),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)  # fmt: skip
async def test_damaged_data_is_not_called_json(client, encoding, content):
    error = error_of(await post(client, content, encoding), 400)
    assert error["code"] == "invalid_encoding"
    assert f"it is not whole {encoding} data" in error["message"]


async def test_a_truncated_frame_is_refused(client):
    assert error_of(await post(client, zstandard.compress(BODY)[:-9], "zstd"), 400)["param"] == "body"


@pytest.mark.parametrize(("encoding", "writer"), [("gzip", gzip_writer), ("zstd", zstd_writer)])
async def test_a_bomb_is_refused_without_the_memory_that_it_wants(client, encoding, writer):
    bomb = zeros(writer, 64)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    try:
        error = error_of(await post(client, bomb, encoding), 413)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "more than 100000 bytes decompressed; at most 100000 bytes are read" in error["message"]
    assert peak < 3_000_000


async def test_a_frame_that_needs_a_large_window_is_refused(client):
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    content = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(BODY)
    assert error_of(await post(client, content + b"x", "zstd"), 400)["code"] == "invalid_encoding"


@pytest.mark.parametrize("error", [TaskCancelledError(), ActorDiedError()])
async def test_a_proxy_that_cannot_say_more_of_a_body_means_that_the_client_is_gone(error):
    """Serve's replica asks its proxy for a body, which fails with Ray's errors where client or proxy have left."""

    async def receive():
        raise error

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(ClientDisconnect):
        await read_body(request, LIMIT)
