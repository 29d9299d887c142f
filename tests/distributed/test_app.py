"""A cluster deployed from the text of a `serveConfigV2`, by the steps that `serve deploy` has carried out."""

from __future__ import annotations

import time

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.gateway import SERVICER_FUNCTIONS
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.offline.engine import LocalEngine
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.deployed import end_serve
from paceline_testing.free_ports import free_ports
from paceline_testing.tiny_models import save_tiny_model

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
    target: {{model: {model}, served_name: tiny, device: cpu, exact: bitwise, kv_cache_tokens: 4096}}
    draft: {{{workers}: 0}}
    tenants: {{open: true}}
"""


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
def model(tmp_path_factory):
    directory = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=2)
    speak_ascii(directory)
    return directory


@pytest.fixture
def ends_serve(ray_here):
    yield
    end_serve()


def test_the_text_is_served_over_http_and_grpc_and_a_typo_in_it_is_refused(ends_serve, model):
    wanted = LocalEngine(str(model), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=4096)
    (answer,) = wanted.generate(["a stone, a"], max_new_tokens=20, ignore_eos=True)
    http_port, grpc_port = free_ports(2)
    values = {
        "http_port": http_port,
        "grpc_port": grpc_port,
        "model": model,
        "servicers": ", ".join(SERVICER_FUNCTIONS),
    }

    assert deploy(TEXT.format(workers="wrokers", **values)) == ApplicationStatus.DEPLOY_FAILED
    assert "draft.wrokers" in serve.status().applications["paceline"].message

    assert deploy(TEXT.format(workers="workers", **values)) == ApplicationStatus.RUNNING
    url = f"http://127.0.0.1:{http_port}"
    body = {"prompt": "a stone, a", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    # At once: routers may not know their target group yet. They wait for it, and the request with them.
    served = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert served.status_code == 200, served.text
    assert served.json()["choices"][0]["text"] == answer.text
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/readyz", timeout=30).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request = inference_pb2.GenerateRequest(prompt="a stone, a", max_tokens=20, temperature=0.0, ignore_eos=True)
        assert inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60).text == answer.text
