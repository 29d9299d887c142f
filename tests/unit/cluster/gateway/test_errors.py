"""The error table, the generated gRPC code and the metric names."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from ray.exceptions import RayTaskError

from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    ModelError,
    ObjectiveUnreachable,
    Overloaded,
    RouterLost,
    Unavailable,
)
from cluster.gateway.errors import BodyTooLarge, ModelNotFound, status_of
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.tenants.errors import OverLimit, TenantDisabled, Unauthenticated

ROOT = Path(__file__).resolve().parents[4]
PROTO = "cluster/gateway/paceline/v1/inference.proto"

TABLE = [
    (InvalidRequest("top_p", 2, "at most 1"), 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    (InvalidRequest("prompt", 9, "too long", "too_long"), 400, grpc.StatusCode.INVALID_ARGUMENT, "too_long"),
    (ModelNotFound("model", "x", "there is y"), 404, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    (BodyTooLarge("body", 9, "at most 8"), 413, grpc.StatusCode.INVALID_ARGUMENT, "body_too_large"),
    (Overloaded("full", 0.2), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    (ObjectiveUnreachable("late", 0.2), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "objective_unreachable"),
    (OverLimit("max_concurrent", 3, 1.0), 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded"),
    (Unauthenticated("missing_key"), 401, grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
    (TenantDisabled(), 403, grpc.StatusCode.PERMISSION_DENIED, "tenant_disabled"),
    (DeadlineExceeded("late"), 504, grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded"),
    (Unavailable("draining"), 503, grpc.StatusCode.UNAVAILABLE, "unavailable"),
    (RouterLost("gone"), 503, grpc.StatusCode.UNAVAILABLE, "unavailable"),
    (LinkError("torn"), 503, grpc.StatusCode.UNAVAILABLE, "unavailable"),
    (ModelError("/a/secret/path"), 500, grpc.StatusCode.INTERNAL, "internal_error"),
    (ValueError("secret"), 500, grpc.StatusCode.INTERNAL, "internal_error"),
]


@pytest.mark.parametrize(("error", "http", "code", "name"), TABLE, ids=lambda value: str(value)[:24])
def test_every_error_has_its_status_also_when_ray_wrapped_it(error, http, code, name):
    wrapped = RayTaskError("generate", "traceback", error)
    across = pickle.loads(pickle.dumps(error))
    assert (type(across), str(across), vars(across)) == (type(error), str(error), vars(error))
    for one in (error, across, wrapped, wrapped.as_instanceof_cause(), RayTaskError("outer", "traceback", wrapped)):
        status = status_of(one)
        assert (status.http, status.grpc, status.code) == (http, code, name)
        assert "secret" not in status.message
        assert set(status.body()["error"]) == {"message", "type", "param", "code"}


def test_retry_after_is_whole_seconds_and_at_least_one():
    assert status_of(Overloaded("full", 0.2)).headers() == {"Retry-After": "1"}
    assert status_of(Overloaded("full", 7.1)).headers() == {"Retry-After": "8"}
    assert status_of(DeadlineExceeded("late")).headers() == {"x-should-retry": "false"}


def test_generated_grpc_code_is_up_to_date(tmp_path):
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated = sorted(path for path in tmp_path.rglob("inference_pb2*"))
    assert len(generated) == 3
    for path in generated:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text()


def test_metric_names_have_our_prefix_and_base_units():
    for family in GatewayMetrics().registry.collect():
        assert family.name.startswith("paceline_")
        assert not re.search("_(ms|us|kb|mb)(_|$)", family.name)
        assert family.documentation


def test_values_are_spelled_as_in_json():
    told = [str(InvalidRequest("a", value, "b")) for value in (None, True, False, 1, 1.5, "x")]
    assert told == [f"a is {value}; b" for value in ("null", "true", "false", "1", "1.5", "'x'")]


def test_a_wrong_value_is_told_by_its_beginning():
    told = str(InvalidRequest("model", "x" * 10**6, "the model served here is 'a'"))
    assert told.startswith("model is 'xxx")
    assert told.endswith("...; the model served here is 'a'")
    assert len(told) < 400
