"""What a process of a large cluster tells its node."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster import node_metrics
from cluster.node_metrics import NodeMetrics


def test_all_samples_are_told_under_their_names_and_again_with_what_they_are_now(monkeypatch):
    made, told = [], {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            made.append((name, tag_keys))
            self.name, self.keys = name, set(tag_keys)

        def set(self, value, tags):
            assert set(tags) == self.keys
            told[self.name, tuple(sorted(tags.items()))] = value

    monkeypatch.setattr(node_metrics, "Gauge", Gauge)
    registry = CollectorRegistry()
    counter = Counter("x", "of kinds", ["kind"], registry=registry)
    Histogram("t_seconds", "took", buckets=(1.0,), registry=registry).observe(0.5)
    metrics = NodeMetrics(registry, "router", "r1")
    counter.labels("a").inc(2)
    metrics.tell()
    counter.labels("b").inc()
    metrics.tell()
    mark = ("router", "r1")
    assert told["x_total", (("kind", "a"), mark)] == 2
    assert told["x_total", (("kind", "b"), mark)] == 1
    assert told["t_seconds_bucket", (("le", "1.0"), mark)] == 1
    assert len(made) == len({name for name, _ in made})
