"""The life of each profile of the chart, from Helm to the API server and KubeRay's operator: installed, ready,
upgraded by configuration and by image, scaled, applied again, uninstalled."""

import pytest

from paceline_testing.chart import CHART, PROFILES, is_test, merged, objects, profile_values
from paceline_testing.control_plane import wait_for

RAY_SERVICES, RAY_CLUSTERS = "ray.io/v1/rayservices", "ray.io/v1/rayclusters"
PATIENCE_S = 120.0
# Kinds that the chart makes, for what must be left alone and what must go.
KINDS = (
    RAY_SERVICES, "core/v1/services", "core/v1/configmaps", "core/v1/serviceaccounts", "apps/v1/statefulsets",
    "networking.k8s.io/v1/networkpolicies", "policy/v1/poddisruptionbudgets", "core/v1/limitranges",
    "gateway.networking.k8s.io/v1/gateways", "gateway.networking.k8s.io/v1/httproutes",
)  # fmt: skip
every_profile = pytest.mark.parametrize("profile", PROFILES)


def service_of(plane, namespace):
    return plane.get(RAY_SERVICES, "paceline", namespace)


def condition(plane, namespace, name):
    found = (service_of(plane, namespace) or {}).get("status", {}).get("conditions", [])
    return next((each["status"] for each in found if each["type"] == name), None)


def active_cluster(plane, namespace):
    return service_of(plane, namespace)["status"].get("activeServiceStatus", {}).get("rayClusterName")


def wait_until_ready(plane, namespace):
    try:
        wait_for(lambda: condition(plane, namespace, "Ready") == "True", "Ready", PATIENCE_S)
    except AssertionError as error:
        status = service_of(plane, namespace).get("status", {})
        raise AssertionError(f"{error}: {status}\n{plane.log('kuberay-operator')[-3000:]}") from None


def generations(plane, namespace):
    """Of everything that Helm manages here: it rises with each change of what is wanted."""
    return {
        (kind, each["metadata"]["name"]): each["metadata"].get("generation", each["metadata"]["resourceVersion"])
        for kind in KINDS
        for each in plane.all(kind, namespace)
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "Helm"
    }


def behind_the_service(plane, namespace):
    return {
        endpoint["targetRef"]["name"]
        for each in plane.all("discovery.k8s.io/v1/endpointslices", namespace)
        if each["metadata"]["labels"]["kubernetes.io/service-name"] == "paceline"
        for endpoint in each["endpoints"] or []
    }


def routers(plane, namespace):
    return {
        pod["metadata"]["name"]
        for pod in plane.all("core/v1/pods", namespace)
        if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "router"
    }


@pytest.fixture
def values(profile):
    """Of a profile; an incremental upgrade takes its steps at once."""
    return merged(profile_values(profile), {"upgrade": {"intervalSeconds": 1}})


@every_profile
def test_no_object_is_refused_or_warned_of(plane, namespace, profile):
    warnings = []
    for each in objects(profile_values(profile), namespace=namespace):
        warnings += plane.apply(each, dry_run=True)[1]
    assert warnings == []


@every_profile
def test_a_release_becomes_ready_is_upgraded_and_leaves_nothing(plane, nodes, helm, namespace, profile, values):
    helm.install(CHART, "paceline", values, namespace=namespace)
    wait_until_ready(plane, namespace)
    wait_for(lambda: active_cluster(plane, namespace), "an active cluster", PATIENCE_S)
    first = active_cluster(plane, namespace)

    # Clients reach routers, and routers alone.
    wait_for(lambda: behind_the_service(plane, namespace), "endpoints")
    wait_for(lambda: behind_the_service(plane, namespace) == routers(plane, namespace), "all routers", PATIENCE_S)

    # The same again is no change, for Helm and for the operator.
    before = generations(plane, namespace)
    helm.upgrade(CHART, "paceline", values, namespace=namespace)
    assert generations(plane, namespace) == before
    assert active_cluster(plane, namespace) == first

    # A change of the configuration is put to the same cluster.
    put = len(nodes.put_configs)
    changed = merged(values, {"config": {"router": {"max_waiting": 7}}})
    helm.upgrade(CHART, "paceline", changed, namespace=namespace)
    wait_for(lambda: len(nodes.put_configs) > put, "the new configuration", PATIENCE_S)
    assert nodes.put_configs[-1]["applications"][0]["args"]["router"]["max_waiting"] == 7
    wait_until_ready(plane, namespace)
    assert active_cluster(plane, namespace) == first

    # A change of the image makes a second cluster, to which traffic goes over; `None` leaves that to the user.
    helm.upgrade(CHART, "paceline", merged(changed, {"image": {"tag": "next"}}), namespace=namespace)
    if values.get("upgrade", {}).get("type") == "None":
        assert [each["metadata"]["name"] for each in plane.all(RAY_CLUSTERS, namespace)] == [first]
    else:
        wait_for(lambda: active_cluster(plane, namespace) not in (None, first), "the second cluster", PATIENCE_S)
        wait_until_ready(plane, namespace)

    helm.uninstall("paceline")
    wait_for(lambda: service_of(plane, namespace) is None, "the end of the RayService", PATIENCE_S)
    wait_for(lambda: not plane.all(RAY_CLUSTERS, namespace), "the end of the clusters", PATIENCE_S)
    wait_for(lambda: not plane.all("core/v1/pods", namespace), "the end of the pods", PATIENCE_S)
    assert generations(plane, namespace) == {}


def test_bounds_are_changed_in_place_and_a_new_operator_leaves_the_pods(plane, helm, namespace):
    helm.install(CHART, "paceline", {}, namespace=namespace)
    wait_until_ready(plane, namespace)
    cluster = active_cluster(plane, namespace)
    path = plane.path_of(RAY_CLUSTERS, namespace, cluster)
    body = '[{"op": "replace", "path": "/spec/workerGroupSpecs/2/maxReplicas", "value": 12}]'
    plane.http.patch(path, content=body, headers={"Content-Type": "application/json-patch+json"}).raise_for_status()
    helm.upgrade(CHART, "paceline", {"draft": {"maxReplicas": 12}}, namespace=namespace)
    assert service_of(plane, namespace)["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]["maxReplicas"] == 12
    wait_for(
        lambda: plane.get(RAY_CLUSTERS, cluster, namespace)["spec"]["workerGroupSpecs"][2]["maxReplicas"] == 12, "12"
    )
    assert active_cluster(plane, namespace) == cluster
    # What another version of the operator wrote is written anew; the pods stay, and the values' bounds count again.
    pods = {each["metadata"]["uid"] for each in plane.all("core/v1/pods", namespace)}
    body = '[{"op": "replace", "path": "/spec/workerGroupSpecs/2/maxReplicas", "value": 20}]'
    plane.http.patch(path, content=body, headers={"Content-Type": "application/json-patch+json"}).raise_for_status()
    plane.patch(path, {"metadata": {"annotations": {"ray.io/kuberay-version": "v1.6.0"}}})

    def is_taken_over():
        found = plane.get(RAY_CLUSTERS, cluster, namespace)
        bounds = found["spec"]["workerGroupSpecs"][2]["maxReplicas"]
        return (found["metadata"]["annotations"]["ray.io/kuberay-version"], bounds) != ("v1.6.0", 20)

    wait_for(is_taken_over, "the operator of now")
    assert plane.get(RAY_CLUSTERS, cluster, namespace)["spec"]["workerGroupSpecs"][2]["maxReplicas"] == 12
    wait_until_ready(plane, namespace)
    assert [each["metadata"]["name"] for each in plane.all(RAY_CLUSTERS, namespace)] == [cluster]
    assert {each["metadata"]["uid"] for each in plane.all("core/v1/pods", namespace)} == pods
    helm.uninstall("paceline")


def test_two_releases_live_in_one_namespace(plane, helm, namespace):
    values = {
        "priorityClasses": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "models": {"existingClaim": "m"},
    }
    for release in ("one", "two"):
        helm.install(CHART, release, values, namespace=namespace)
    for release in ("one", "two"):
        name = f"{release}-paceline"
        wait_for(
            lambda name=name: plane.get(RAY_SERVICES, name, namespace).get("status", {}).get("activeServiceStatus"),
            name,
        )
        helm.uninstall(release)


def test_what_helm_test_makes_is_admitted(plane, namespace):
    made = objects({"networkPolicy": {"enabled": True}}, namespace=namespace)
    hooks = [each for each in made if is_test(each)]
    assert len(hooks) == 2
    assert [plane.apply(each, dry_run=True)[1] for each in hooks] == [[], []]
