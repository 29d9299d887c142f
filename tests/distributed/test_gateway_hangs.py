"""One of two gateways is stopped as a process that hangs: what becomes of its streams, and of everybody's requests."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import grpc
import httpx
import psutil
import pytest

from cluster.config import ClusterConfig
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.ray_names import APPLICATION
from paceline_testing.deployed import deployed, wait_for
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

PROMPT = list(range(5, 45))
LONG, SHORT = 900, 8  # tokens
NUM_STREAMS = 4
NUM_ASKING = (
    6  # over HTTP, and as many over gRPC, with a request each at a time: more than the streams of the other gateway
)
STOPPED_S = 15.0
ANSWERED_WITHIN_S = 10.0  # of a short answer, on a busy machine; the gateway is stopped for longer
REPLACED_WITHIN_S = 75.0  # with a busy machine's start of a process
HELD = ("paceline_sequences_waiting", "paceline_sequences_running")
GATEWAY = f"ServeReplica:{APPLICATION}:Gateway"


@pytest.fixture(scope="module")
def cluster(ray_here, ports, tmp_path_factory):
    model = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=4, hidden_size=96, max_positions=2048)
    config = ClusterConfig.model_validate(
        {
            "target": {"model": str(model), "device": "cpu", "kv_cache_tokens": 16_384},
            "draft": {"model": "none"},
            "speculation": {"drafters": ["none"]},
            "gateway": {**ports, "replicas": 2},
            "cache": {"url": "none"},
        }
    )
    with deployed(config) as url:
        wait_for(lambda: len(ray_processes(GATEWAY)) == 2, "both gateways")
        yield url, f"127.0.0.1:{config.gateway.grpc_port}"


def body(num_tokens):
    return {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def ask_http(url, num_tokens=SHORT, timeout_s=ANSWERED_WITHIN_S):
    answer = httpx.post(f"{url}/v1/completions", json=body(num_tokens), timeout=timeout_s)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def ask_grpc(address, timeout_s=ANSWERED_WITHIN_S):
    with grpc.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(
            prompt_token_ids={"ids": PROMPT}, max_tokens=SHORT, temperature=0, ignore_eos=True
        )
        return inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s).text


def num_held(url):
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(value_of(page, name) for name in HELD)


def asked_until(ends, ask, *arguments):
    """How often it was answered, and the errors."""
    num_answered, errors = 0, []
    while time.monotonic() < ends:
        began = time.monotonic()
        try:
            ask(*arguments)
            num_answered += 1
        except Exception as error:
            errors.append(f"after {began - ends + STOPPED_S:.1f} s: {error!r}"[:200])
    return num_answered, errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_go_to_the_other_gateway_and_streams_of_the_stopped_one_go_on(cluster):
    url, address = cluster
    short, again = ask_http(url), ask_grpc(address)
    assert short == again
    process = psutil.Process(ray_processes(GATEWAY)[0])
    with ThreadPoolExecutor(NUM_STREAMS + 2 * NUM_ASKING) as pool:
        streams: list[Future[str]] = [pool.submit(ask_http, url, LONG, 300.0) for _ in range(NUM_STREAMS)]
        wait_for(lambda: num_held(url) == NUM_STREAMS, "all streams")
        process.send_signal(signal.SIGSTOP)
        try:
            ends = time.monotonic() + STOPPED_S
            asking = [pool.submit(asked_until, ends, ask_http, url) for _ in range(NUM_ASKING)]
            asking += [pool.submit(asked_until, ends, ask_grpc, address) for _ in range(NUM_ASKING)]
            found = [one.result() for one in asking]
            print("answered, errors:", *found, sep="\n")
            print("held:", num_held(url), "open streams:", sum(not one.done() for one in streams))
            wait_for(lambda: num_held(url) == 0, "the end of all sequences")
        finally:
            process.send_signal(signal.SIGCONT)
        texts = {one.result() for one in streams}
    assert len(texts) == 1
    assert all(num_answered for num_answered, _ in found)
    assert [errors for _, errors in found] == [[]] * 2 * NUM_ASKING


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gateway_that_hangs_for_good_is_replaced(cluster):
    before = ray_processes(GATEWAY)
    process = psutil.Process(before[0])
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: len({*ray_processes(GATEWAY)} - {process.pid}) == 2, "another gateway", REPLACED_WITHIN_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    assert ask_http(cluster[0]) == ask_grpc(cluster[1])
