"""Dashboards and alert rules: `cluster.router.metrics` exposes every metric and label they name; the rules work."""

import re
import shutil
import subprocess

import pytest

from actors.drafters.registry import create_drafters
from actors.links.keys import LinkKeys
from cache_service.store.connection import ConnectionSettings
from cluster.cache.shared_cache import SharedCache
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.router.connections import Connections
from cluster.router.driver import RouterDriver
from cluster.router.metrics import RouterMetrics
from paceline_testing.panels import (
    DASHBOARDS,
    OBSERVABILITY,
    alerts,
    everything_asked,
    names_in,
    names_of,
    panels_of,
)
from paceline_testing.rounds import learning_core, serve, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 97
PROMTOOL = shutil.which("promtool")
SEVERITIES = {"critical", "warning", "info"}


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_every_panel_says_what_it_shows_and_asks_the_data_source_that_is_chosen(dashboard):
    assert {"uid", "title", "schemaVersion"} <= dashboard.keys()
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "job"}
    panels = panels_of(dashboard)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert all(query["expr"] for query in panel["targets"]), panel["title"]


def test_dashboards_have_names_of_their_own():
    assert DASHBOARDS.keys() == {"overview", "speculation", "cache", "pools"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in SEVERITIES, rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["runbook"], rule["alert"]


def test_every_alert_has_a_unit_test():
    tests = (OBSERVABILITY / "alerts_test.yaml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in tests] == []


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not on the PATH")
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]])
def test_promtool_is_content(command):
    done = subprocess.run([PROMTOOL, *command], cwd=OBSERVABILITY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
async def metrics():
    """Those of a router that has answered a request beside a cache that is out of reach."""
    cache = SharedCache(ConnectionSettings("redis://127.0.0.1:1"), "weights")
    drafters = create_drafters(("suffix", "soft_ngram"), delta_bytes=1 << 16)
    soft_sharing = cache.share_counts(drafters)
    core = learning_core(toy_info(VOCAB_SIZE), drafters, token_sink=cache, soft_sharing=soft_sharing)
    driver = RouterDriver(core, verify_timeout_s=1.0, draft_deadline_s=0.1)
    connections = Connections(LinkKeys.generate())
    answer(core)
    yield RouterMetrics(core, driver, connections, cache)
    driver.close()
    connections.close()
    cache.close(1.0)


def answer(core):
    """One request of 60 tokens, a text that repeats itself."""
    target = ToyTarget(eos_token_id=3, seed=4)
    prompt = ToyTarget(eos_token_id=3, seed=4)
    tokens = [5]
    while len(tokens) < 20:
        tokens.append(prompt.next_token(tokens))
    request = toy_request("r", tokens, 60)
    core.add(request, 0.0)
    serve(core, target.verify)
    return request


async def test_all_that_panels_and_alerts_name_is_exposed_with_its_labels(metrics):
    gateway = GatewayMetrics()
    exposed = names_of(list(metrics.collect())) | names_in(gateway.text())
    for metric in vars(gateway).values():
        for family in metric.describe() if hasattr(metric, "describe") else ():
            if family.type == "counter":
                exposed[f"{family.name}_total"] = frozenset(metric._labelnames)
    wrong = {asked.where: unknown for asked in everything_asked() if (unknown := asked.unknown(exposed))}
    assert not wrong
    assert len(everything_asked()) > 80


def test_errors_are_alerted_even_if_nothing_has_ever_succeeded():
    (rule,) = [rule for rule in alerts() if rule["alert"] == "PacelineErrors"]
    text = GatewayMetrics().text()
    assert 'paceline_request_success_total{finished_reason="stop"} 0.0' in text
    reasons = {reason for found in re.findall(r'reason=~"([^"]+)"', rule["expr"]) for reason in found.split("|")}
    assert len(reasons) > 1
    for reason in reasons:
        assert f'paceline_request_failure_total{{reason="{reason}"}} 0.0' in text


async def test_a_request_shows_in_the_stages_the_planner_and_the_cost_curve(metrics):
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    for stage in ("paceline_request_queue_time_seconds", "paceline_request_prefill_time_seconds"):
        assert found[f"{stage}_count",] == 1
        assert found[f"{stage}_bucket", "+Inf"] == 1
        assert found[f"{stage}_sum",] >= 0
    rounds = sum(value for key, value in found.items() if key[0] == "paceline_planner_rounds_total")
    assert rounds == found["paceline_rounds_total",] - 1 > 0  # the last one only has the sequence freed
    curve = [found["paceline_step_time_seconds", rows] for rows in ("1", "4", "16", "64", "256")]
    assert curve == sorted(curve)
    assert curve[0] > 0
    verified = sum(value for key, value in found.items() if key[0] == "paceline_spec_decode_num_draft_tokens_total")
    accepted = sum(value for key, value in found.items() if key[0] == "paceline_spec_decode_num_accepted_tokens_total")
    assert found["paceline_spec_decode_wasted_rows_total",] == verified - accepted
    assert found["paceline_spec_decode_num_proposed_tokens_total",] >= verified
