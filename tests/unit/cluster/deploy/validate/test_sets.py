"""Mistakes between the objects of one set, each planted in what the chart makes of `values-prod-70b.yaml`.

Covers `cluster.deploy.validate.references`, `cluster.deploy.validate.network`, `cluster.deploy.validate.pods` and
`cluster.deploy.validate.admission`.
"""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.deploy.validate.check import check_manifest, check_set
from cluster.deploy.validate.documents import read_documents
from cluster.deploy.validate.schemas import Schemas
from paceline_testing.chart import one, profile_objects

GROUP = "spec rayClusterConfig workerGroupSpecs 0 template spec"
HEAD = "spec rayClusterConfig headGroupSpec template spec"
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other", "labels": {}}}
QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": "paceline"}, "spec": {}}
MONITOR = {
    "apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {"name": "m", "namespace": "paceline"},
    "spec": {"selector": {"matchLabels": {"app.kubernetes.io/component": "router"}}},
}  # fmt: skip
SECURITY = "pod-security.kubernetes.io/"


# fmt: off
MISTAKES = (
    # Rule, object (kind and name; a new one), place, value.
    ("quota-key", QUOTA, "spec hard", {"request.cpu": "400"}),
    ("quota-key", QUOTA, "spec hard", {"limits.nvidia.com/gpu": "40"}),
    ("quota-exceeded", QUOTA, "spec hard", {"requests.nvidia.com/gpu": "4"}),
    ("quota-exceeded", QUOTA, "spec hard", {"pods": "3"}),
    ("schema-value", QUOTA, "spec hard", {"requests.memory": "16GB"}),
    ("limit-range", "LimitRange paceline", "spec limits 0 defaultRequest cpu", "2"),
    ("limit-range", "LimitRange paceline", "spec limits 0 max", {"memory": "16Gi"}),
    ("pod-security", NAMESPACE, f"metadata labels {SECURITY}enforce", "Restricted"),
    ("pod-security", NAMESPACE, f"metadata labels {SECURITY}enforce-version", "1.30"),
    ("pod-security", NAMESPACE, f"metadata labels {SECURITY}enforced", "baseline"),
    ("schema-value", "StatefulSet paceline-cache",
     "spec persistentVolumeClaimRetentionPolicy", {"whenDeleted": "delete"}),
    ("reference-missing", "RayService paceline", f"{GROUP} priorityClassName", "paceline-serving"),
    ("reference-missing", "RayService paceline", f"{GROUP} serviceAccountName", "pacelin"),
    ("reference-missing", "StatefulSet paceline-gcs", "spec template spec volumes 1 configMap name", "gcs"),
    ("reference-missing", "StatefulSet paceline-gcs", "spec serviceName", "gcs"),
    ("reference-missing", "HTTPRoute paceline", "spec parentRefs 0 name", "public"),
    ("reference-missing", "HTTPRoute paceline", "spec rules 0 backendRefs 0 name", "paceline-routers"),
    ("reference-missing", "RayService paceline", "text", ("paceline-cache:6379", "cache:6379")),
    ("schema-value", "RayService paceline", f"{GROUP} securityContext seccompProfile", {"type": "Localhost"}),
    ("schema-value", "RayService paceline",
     f"{GROUP} securityContext seccompProfile", {"type": "RuntimeDefault", "localhostProfile": "a.json"}),
    ("schema-missing", "RayService paceline", f"{GROUP} securityContext seccompProfile", {}),
    ("backend-port", "HTTPRoute paceline", "spec rules 0 backendRefs 0 port", 8080),
    ("backend-port", "HTTPRoute paceline", "spec parentRefs 0 sectionName", "grpc"),
    ("backend-port", "RayService paceline", "text", ("paceline-cache:6379", "paceline-cache:6380")),
    ("backend-port", "RayService paceline",
     "spec rayClusterConfig gcsFaultToleranceOptions redisAddress", "redis://paceline-gcs:6380"),
    ("service-target", "Service paceline-gcs", "spec ports 0 targetPort", "valkey"),
    ("service-target", MONITOR, "spec podMetricsEndpoints", [{"port": "metric"}]),
    ("service-port", "Service paceline", "spec ports 0 targetPort", 8081),
    ("selects-nothing", "Service paceline", "spec selector app.kubernetes.io/component", "routers"),
    ("selects-nothing", "PodDisruptionBudget paceline-target",
     "spec selector matchLabels app.kubernetes.io/component", "targets"),
    ("ray-serve-port", "RayService paceline", f"{HEAD} containers 0 ports", [{"name": "gcs", "containerPort": 6379}]),
    ("backend-port", "HTTPRoute paceline", "spec hostnames", ["api.paceline.example.com"]),
    ("reference-missing", "RayService paceline",
     "spec rayClusterConfig gcsFaultToleranceOptions redisPassword valueFrom secretKeyRef name", "paceline-cache"),
    ("quota-key", QUOTA, "spec hard", {"nvidia.com/gpu": "24"}),
    ("schema-value", "PriorityClass paceline-paceline-serving", "value", 2_000_000_000),
    ("grace-period", "RayService paceline", f"{GROUP} terminationGracePeriodSeconds", 60),
    ("ray-container", "RayService paceline",
     "spec rayClusterConfig workerGroupSpecs 1 template spec containers 0 resources",
     {"limits": {"nvidia.com/gpu": 4}, "requests": {"nvidia.com/gpu": 4}}),
    ("ray-container", "RayService paceline", f"{HEAD} automountServiceAccountToken", False),
    ("ray-container", "RayService paceline", f"{GROUP} containers 0 volumeMounts 0 mountPath", "/scratch"),
    ("ray-container", "RayService paceline",
     "spec rayClusterConfig workerGroupSpecs 1 rayStartParams object-store-memory", "68719476736"),
    ("resource-limit", "RayService paceline",
     "spec rayClusterConfig autoscalerOptions resources limits memory", "512m"),
    ("serve-deployment", "RayService paceline", "text", ("  port: 9000", "  port: 9001")),
    ("serve-deployment", "RayService paceline", "text", ("tensor_parallel: 8", "tensor_parallel: 4")),
    ("serve-deployment", "RayService paceline", "text", ("proxy_location: EveryNode", "proxy_location: HeadOnly")),
    ("ray-cleanup", "RayService paceline", f"{HEAD} priorityClassName", "paceline-paceline-serving"),
    ("ray-namespace", NAMESPACE, "metadata name", "paceline"),
    ("selects-nothing", "StatefulSet paceline-gcs", "spec selector matchLabels app.kubernetes.io/component", "gc"),
    # What the policies must let through.
    ("network-cut", "NetworkPolicy paceline-ray",
     "spec podSelector matchExpressions 0 values", ["router", "target", "draft"]),
    ("network-cut", "NetworkPolicy paceline-ray",
     "spec ingress 0 from 0 podSelector matchExpressions 0 values", ["router", "target", "head"]),
    ("network-cut", "NetworkPolicy paceline-ray", "spec ingress 0 ports", [{"port": 6379}]),
    ("network-cut", "NetworkPolicy paceline-ray", "spec egress 1 ports 0 port", 6380),
    ("network-cut", "NetworkPolicy paceline-dns", "spec egress 0 ports", [{"port": 5353, "protocol": "UDP"}]),
    ("network-cut", "NetworkPolicy paceline-dns", "spec policyTypes", ["Ingress"]),
    ("network-cut", "NetworkPolicy paceline-dns", "spec egress 0 ports", [{"port": 53, "protocol": "TCP"}]),
    ("network-cut", "NetworkPolicy paceline-ray", "spec egress 1 ports 0 protocol", "UDP"),
    ("network-cut", "NetworkPolicy paceline-operator", "spec ingress 0 ports", [{"port": 8000}]),
    ("network-cut", "NetworkPolicy paceline-operator", "spec ingress 0 from", [{"podSelector": {}}]),
    ("network-cut", "NetworkPolicy paceline-autoscaler", "spec egress 0 ports", [{"port": 80}]),
    ("network-cut", "NetworkPolicy paceline-cache",
     "spec ingress 0 from 0 podSelector matchExpressions 0 values", ["router", "target"]),
)
# fmt: on


@pytest.fixture(scope="module")
def schemas():
    return Schemas(None)


def findings(objects, schemas):
    documents, problems = read_documents("x.yaml", yaml.dump_all(objects, Dumper=yaml.CSafeDumper, sort_keys=False))
    assert problems == []
    found = [document.find(problem) for document in documents for problem in check_manifest(document, schemas)]
    return found + [document.find(problem) for document, problem in check_set(documents)]


def planted(at, place, value):
    """The objects of the profile with one mistake."""
    made = profile_objects("prod-70b")
    if isinstance(at, dict):
        target = yaml.safe_load(yaml.safe_dump(at))
        made.append(target)
    else:
        target = one(made, *at.split())
    if place == "text":
        assert value[0] in target["spec"]["serveConfigV2"]
        target["spec"]["serveConfigV2"] = target["spec"]["serveConfigV2"].replace(*value)
        return made
    *keys, last = (int(key) if key.isdigit() else key for key in place.split())
    for key in keys:
        target = target[key] if isinstance(target, list) else target.setdefault(key, {})
    target[last] = value
    return made


@pytest.mark.parametrize(
    ("rule", "at", "place", "value"), MISTAKES, ids=lambda part: str(part)[:40] if isinstance(part, str) else ""
)
def test_a_mistake_between_objects_is_found_by_its_rule_and_no_other(rule, at, place, value, schemas):
    found = findings(planted(at, place, value), schemas)
    assert {finding.rule for finding in found} == {rule}
    assert all((finding.where, finding.what, finding.why, finding.fix) for finding in found)


ODD = st.sampled_from([None, [], {}, [[]], [{}], {"a": None}, "", 0, -1, 1.5, True, ["a"], [None], [{"name": {}}]])


def places(value, where=()):
    yield where
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*where, key))


PLACES = [place for place in places(profile_objects("prod-70b")) if len(place) > 1]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=12))
def test_whatever_the_values_of_a_set_are_there_is_an_answer(changes, schemas):
    made = profile_objects("prod-70b")
    for (*keys, last), value in sorted(changes, key=lambda change: -len(change[0])):  # the innermost first
        target = made
        for key in keys:
            target = target[key]
        target[last] = value
    assert findings(made, schemas) is not None


@pytest.mark.parametrize(
    ("at", "place", "value"),
    [
        ("RayService paceline", f"{GROUP} containers 0 volumeMounts 0 mountPath", "/tmp/"),
        ("RayService paceline", "text", ("http_port: 8000", 'http_port: "8000"')),
        ("RayService paceline", "text", ("tensor_parallel: 8", 'tensor_parallel: "8"')),
        ("RayService paceline",
         "spec rayClusterConfig workerGroupSpecs 1 rayStartParams plasma-directory", "/scratch"),
    ],
)  # fmt: skip
def test_what_is_right_in_another_way_raises_no_alarm(at, place, value, schemas):
    assert findings(planted(at, place, value), schemas) == []


def test_a_sidecar_before_ray_is_found(schemas):
    made = profile_objects("prod-70b")
    containers = one(made, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"][
        "containers"
    ]
    containers.insert(0, {"name": "logs", "image": "logs:1"})
    assert "ray-container" in {finding.rule for finding in findings(made, schemas)}
