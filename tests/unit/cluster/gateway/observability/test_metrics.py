"""The metrics of several processes on one page."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.gateway.observability.metrics import GatewayMetrics, merged
from paceline_testing.scraped import value_of


def page(count: int) -> str:
    registry = CollectorRegistry()
    Counter("seen", "What was seen", ["kind"], registry=registry).labels('a "b"\n').inc(count)
    Gauge("size", "How large", registry=registry).set(count)
    Histogram("wait_seconds", "How long", buckets=(1.0, 2.0), registry=registry).observe(count)
    return generate_latest(registry).decode()


def test_samples_have_the_label_of_their_process_and_families_appear_once():
    text = merged("router", {"x": page(1), "y": page(5)})
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for line in ("# HELP seen_total What was seen", "# TYPE seen_total counter", "# TYPE wait_seconds histogram"):
        assert text.splitlines().count(line) == 1
    assert all(sample.labels["router"] in ("x", "y") for family in families for sample in family.samples)
    assert value_of(text, "seen_total", kind='a "b"\n', router="x") == 1
    assert value_of(text, "size", router="y") == 5
    assert value_of(text, "size") == 6
    assert value_of(text, "wait_seconds_bucket", le="+Inf", router="y") == 1
    assert value_of(text, "wait_seconds_bucket", le="2.0", router="y") == 0


def test_one_process_gets_its_label_and_one_that_says_nothing_none():
    one = page(3)
    assert value_of(merged("router", {"x": one}), "size", router="x") == 3
    assert merged("router", {"x": one, "silent": ""}) == merged("router", {"x": one})
    assert merged("router", {}) == ""


def test_pages_of_gateways_keep_all_that_they_say():
    metrics = GatewayMetrics()
    metrics.request_success.labels("stop").inc(4)
    metrics.time_to_first_token.observe(0.3)
    text = metrics.text()
    both = merged("gateway", {"one": text, "two": text})
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for gateway in ("one", "two"):
                assert value_of(both, sample.name, **sample.labels, gateway=gateway) == sample.value
