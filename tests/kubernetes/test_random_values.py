"""Values drawn at random: the chart refuses them readably, or the API server accepts all that it makes."""

import re

import helm_python
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from paceline_testing.chart import objects

SWITCHES = (
    "gcs", "gateway", "ingress", "networkPolicy", "priorityClasses", "spread", "podDisruptionBudgets", "limitRange",
    "podMonitor", "prometheusRule", "dashboards",
)  # fmt: skip
NAMES = st.sampled_from(["a", "n", "1x", "some-name", "x" * 30])
AMOUNTS = st.sampled_from(["100m", "0.5", "1", "2000m", "3"])
SIZES = st.sampled_from(["160Mi", "512Mi", "1024Mi", "1.5Gi", "2G", "4Gi"])
WORDS = st.dictionaries(st.sampled_from(["a", "example.com/b"]), st.sampled_from(["x", "1", "true", ""]), max_size=2)


def some(required: dict, **optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(required, optional=optional)


RESOURCES = some(
    {
        "limits": some(
            {"memory": st.sampled_from(["1024Mi", "1.5Gi", "2G", "4Gi"])},
            cpu=AMOUNTS,
            **{"nvidia.com/gpu": st.integers(0, 2)},
        )
    },
    requests=some({}, memory=SIZES, cpu=AMOUNTS),
)
PODS = {
    "annotations": WORDS,
    "labels": WORDS,
    "nodeSelector": WORDS,
    "env": st.just([{"name": "A", "value": "1"}]),
    "tolerations": st.just([{"operator": "Exists"}]),
}
GROUP = {**PODS, "resources": RESOURCES, "shm": st.sampled_from(["160Mi", "0.25Gi", "512Mi"]), "scratch": SIZES}
COUNT = st.integers(1, 3)
SECRET = st.sampled_from(["", "mine"])
TARGETS = st.sampled_from(
    [{"groups": 2, "max_groups": 3}, {"groups": 3}, {"max_groups": 2}, {"dtype": "bfloat16"}, {"tensor_parallel": 2}]
)
VALUES = some(
    {name: st.fixed_dictionaries({"enabled": st.booleans()}) for name in SWITCHES},
    fullnameOverride=NAMES,
    commonLabels=WORDS,
    commonAnnotations=WORDS,
    config=some(
        {},
        target=TARGETS,
        draft=some({}, model=st.sampled_from(["auto", "none", "/models/x"]), max_workers=COUNT),
        gateway=some(
            {}, http_port=st.sampled_from([8000, 8001, 30_000, 8080]), request_timeout_s=st.sampled_from([0.5, 7200])
        ),
    ),
    models=some({}, existingClaim=SECRET, prepare=st.booleans()),
    autoscaler=some({}, enabled=st.booleans()),
    upgrade=some(
        {},
        type=st.sampled_from(["None", "NewCluster", "NewClusterWithIncrementalUpgrade"]),
        secondTarget=st.booleans(),
        gatewayClassName=SECRET,
    ),
    pods=some({}, **PODS),
    head=some({}, **PODS),
    router=some({"maxReplicas": st.just(3)}, **GROUP, minReplicas=COUNT),
    target=some({}, **GROUP),
    draft=some({}, **GROUP),
    cache=some({}, memory=SIZES, storage=st.sampled_from(["", "1Gi"]), existingSecret=SECRET, enabled=st.booleans()),
    tenants=some({}, existingSecret=SECRET),
)  # fmt: skip
_READABLE = re.compile(
    r"(execution error at .*: .+ (is|has|needs|are|names)\b|values don't meet the specifications)", re.DOTALL
)


@settings(
    max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(VALUES)
def test_what_the_chart_makes_is_accepted(plane, namespace, values):
    refusal, made = None, []
    try:
        made = objects(values, namespace=namespace)
    except helm_python.HelmError as error:
        refusal = str(error)
    event("refused" if refusal else "accepted")
    assert refusal is None or _READABLE.search(refusal), refusal
    for each in made:
        plane.apply(each, dry_run=True)
