"""The application builder as Serve calls it."""

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from ray.serve.exceptions import RayServeException

from cluster.app import build, plan_elsewhere
from cluster.config import ClusterConfig
from paceline_testing.tiny_models import save_tiny_model


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"draft": {"wrokers": 2}}, "draft.wrokers"),
        ({"drafts": {"workers": 2}}, "drafts"),
        ({"draft": {"workers": -1}}, "draft.workers"),
    ],
)
def test_a_key_that_does_not_exist_or_a_value_out_of_range_is_refused_by_name(args, named):
    with pytest.raises(RayServeException, match=f"^args: {named}"):
        call_builder(build, args)


def test_nobody_is_served_without_a_key_by_accident_though_the_configured_host_is_loopback():
    with pytest.raises(RayServeException, match=r"tenants\.open"):
        call_builder(build, {"gateway": {"host": "127.0.0.1"}})


def test_tls_that_the_proxies_would_not_get_is_refused():
    tls = {"certificate_file": "server.pem", "key_file": "server.key"}
    with pytest.raises(RayServeException, match=r"gateway\.tls"):
        call_builder(build, {"gateway": {"tls": tls}, "tenants": {"open": True}})


def test_gpus_are_looked_for_where_models_run_and_not_where_the_application_is_built(tmp_path):
    model = save_tiny_model(tmp_path / "model", "llama", 5, layers=1)
    parts = {part: {"model": str(model), "device": "cuda"} for part in ("target", "draft")}
    plan = plan_elsewhere(ClusterConfig.model_validate(parts))
    assert (plan.target_device, plan.draft_device) == ("cuda", "cuda")
