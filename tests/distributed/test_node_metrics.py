"""Metrics of a cluster with many processes, as a scraper finds them at the agent of a real Ray node."""

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from cluster import serve as serve_module
from cluster.config import ClusterConfig
from cluster.gateway import deployment as gateway_deployment
from paceline_testing.deployed import deployed, wait_for
from paceline_testing.scraped import values_of
from paceline_testing.tiny_models import save_tiny_model

TOKENS = 7
GENERATED = "paceline_generation_tokens_total"


@pytest.fixture(scope="module")
def url(ray_here, ports, tmp_path_factory):
    """Each process is told that there are more of its kind than one page shows: so many would not fit here."""
    model = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=2, hidden_size=32)
    config = ClusterConfig.model_validate(
        {
            "target": {"model": str(model), "device": "cpu", "kv_cache_tokens": 4096},
            "draft": {"model": "none"},
            "speculation": {"drafters": ["none"]},
            "gateway": ports,
            "cache": {"url": "none"},
        }
    )
    application = serve_module.gateway_application
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_module, "MOST_ON_PAGE", 0)
        patch.setattr(gateway_deployment, "MOST_ON_PAGE", 0)
        many = {"num_routers": 33}
        patch.setattr(serve_module, "gateway_application", lambda *given, **more: application(*given, **more | many))
        with deployed(config) as url:
            yield url


def scraped(name: str, label: str) -> float:
    """The sum of the samples of that name at the agent of the node, which all name the process."""
    (node,) = ray.nodes()
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    assert all(sample.labels.get(label) for sample in samples), samples
    return sum(sample.value for sample in samples)


def test_each_process_tells_its_node_and_the_page_has_no_routers(url):
    body = {"prompt": "one", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200
    page = httpx.get(f"{url}/metrics", timeout=30).text
    assert sum(values_of(page, GENERATED)) >= TOKENS
    assert values_of(page, "paceline_rounds_total") == []
    assert values_of(page, "paceline_metrics_missing_routers") == [33]
    wait_for(lambda: scraped(f"ray_{GENERATED}", "gateway") >= TOKENS, "the gateway's figures")
    wait_for(lambda: scraped("ray_paceline_rounds_total", "router") >= 1, "the router's figures")
    assert scraped("ray_paceline_time_to_first_token_seconds_count", "gateway") >= 1
