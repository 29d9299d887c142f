"""The Helm chart: that schemas accept what it makes, that an operator would, and that wrong values are refused by name.

Covers `cluster.deploy.chart_schema`.
"""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helm_python
import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.workers.ray_environment import own_ray
from cluster.cli.k8s import RAY_METRICS_PORT
from cluster.config import ClusterConfig
from cluster.deploy.chart_schema import with_config
from cluster.deploy.validate.check import validate
from cluster.deploy.validate.quantity import parse_quantity
from cluster.gateway import SERVICER_FUNCTIONS
from cluster.gateway.door.front_door import SETTINGS_VARIABLE, FrontDoor
from cluster.gateway.observability.metrics import GatewayMetrics
from paceline_testing.chart import (
    CHART,
    PROFILES,
    identity,
    is_test,
    merged,
    objects,
    one,
    profile_objects,
    profile_values,
    serve_config,
    templates,
)

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[4]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "data" / "crds"
RAY_GROUPS = ("head", "router", "target", "draft")

_SWITCHES = (
    "gcs", "gateway", "ingress", "networkPolicy", "priorityClasses", "spread", "podDisruptionBudgets", "limitRange",
    "resourceQuota", "podMonitor", "prometheusRule", "dashboards",
)  # fmt: skip
EVERYTHING = {section: {"enabled": True} for section in _SWITCHES} | {
    "resourceQuota": {"enabled": True, "hard": {"pods": "20"}},
    "router": {"minReplicas": 2, "maxReplicas": 2},
}

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
every_profile = pytest.mark.parametrize("profile", PROFILES)


def cluster_of(made):
    return one(made, "RayService")["spec"]["rayClusterConfig"]


def groups_of(made):
    """Ray groups by name, the head among them."""
    cluster = cluster_of(made)
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def pod_specs(made):
    """Specifications of pods by the name of their group or object."""
    specs = {name: group["template"]["spec"] for name, group in groups_of(made).items()}
    return specs | {
        each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in made if each["kind"] == "StatefulSet"
    }


def containers_of(spec):
    return spec["containers"] + spec.get("initContainers", [])


def configuration(made):
    return ClusterConfig.model_validate(serve_config(made)["applications"][0]["args"])


def number_of(quantity):
    return float(parse_quantity(str(quantity)))


# What Kubernetes, Ray and Paceline say of it.


@every_profile
def test_all_objects_pass_our_own_validation(profile, tmp_path):
    """The closed schemas of custom resources and the keys of serveConfigV2 among the rest."""
    made = profile_objects(profile)
    (tmp_path / "all.yaml").write_text(yaml.dump_all(made, Dumper=yaml.CSafeDumper))
    report = validate([tmp_path], CRDS if CRDS.is_dir() else None)
    assert report.findings == []
    assert report.num_documents == len(made)


@pytest.mark.parametrize("profile", [*PROFILES, "everything"])
def test_core_objects_and_pod_templates_pass_the_strict_schemas_of_kubernetes(profile):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    made = objects(EVERYTHING) if profile == "everything" else profile_objects(profile)
    for each in made:
        if not each["apiVersion"].startswith(("ray.io", "gateway.", "monitoring.")):
            kubernetes_validate.validate(each, "1.32", strict=True)
    for group, spec in pod_specs(made).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, "spec": spec}
        kubernetes_validate.validate(pod, "1.32", strict=True)


def test_helm_has_nothing_to_remark():
    found = helm_python.lint(CHART, values=merged(EVERYTHING), namespace="paceline")
    assert [each for each in found["messages"] if "icon is recommended" not in str(each)] == []


@every_profile
def test_every_object_has_a_name_of_its_own_and_lives_in_the_namespace(profile):
    made = objects(profile_values(profile), namespace="elsewhere")
    assert len({identity(each) for each in made}) == len(made)
    for each in made:
        assert each["kind"] != "Namespace", "one that goes first takes along what removes the cluster"
        if each["kind"] != "PriorityClass":
            assert each["metadata"]["namespace"] == "elsewhere"


def test_several_releases_share_a_namespace_and_a_cluster():
    values = merged(EVERYTHING, {"models": {"existingClaim": ""}})
    first, other, third = (
        {identity(each) for each in objects(values, release, namespace)}
        for release, namespace in (("a", "here"), ("b", "here"), ("a", "there"))
    )
    assert not first & other
    assert not {each for each in first if each[0] == "PriorityClass"} & third
    services = [one(objects(values, release), "Service", f"{release}-paceline") for release in ("a", "b")]
    assert services[0]["spec"]["selector"] != services[1]["spec"]["selector"]


@every_profile
def test_serve_config_is_what_ray_reads(profile):
    config = serve_config(profile_objects(profile))
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "cluster.app:build"
    gateway = configuration(profile_objects(profile)).gateway
    assert gateway.host == "0.0.0.0"
    assert (config["http_options"]["port"], config["grpc_options"]["port"]) == (gateway.http_port, gateway.grpc_port)
    assert config["grpc_options"]["grpc_servicer_functions"] == list(SERVICER_FUNCTIONS)
    for path in SERVICER_FUNCTIONS:
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_deployments_that_are_placed_are_those_of_the_application():
    rooms = (ROOT / "actors", ROOT / "cluster" / "gateway", ROOT / "cluster" / "router", ROOT / "actors" / "workers")
    sources = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    for deployment in serve_config(profile_objects("prod-70b"))["applications"][0]["deployments"]:
        assert f'"{deployment["name"]}"' in sources


def test_versions_are_those_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_bytes())
    values = yaml.safe_load((CHART / "values.yaml").read_bytes())
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', project, re.MULTILINE)[1]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f'=={values["rayVersion"]}"' in re.search(r'"ray\[.*', project)[0]


# Kustomize.


@pytest.fixture
def helm_on_the_path(tmp_path, monkeypatch):
    """As much of it as Kustomize calls."""
    program = tmp_path / "helm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline_testing.chart "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))


@needs_kubectl
@pytest.mark.parametrize("profile", PROFILES[1:])
def test_an_overlay_is_the_chart_with_the_values_of_its_profile(profile, helm_on_the_path):
    folder = K8S / "overlays" / profile
    assert (folder / "values.yaml").read_text() == (CHART / f"values-{profile}.yaml").read_text()
    command = ["kubectl", "kustomize", "--enable-helm", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = {identity(each): each for each in profile_objects(profile) if not is_test(each)}
    assert {identity(each): each for each in yaml.safe_load_all(done.stdout)} == wanted
    assert validate([folder]).findings == []


# What KubeRay demands.


@every_profile
def test_the_rules_of_the_operator_hold_that_our_own_validation_does_not_know(profile):
    made = profile_objects(profile)
    cluster = cluster_of(made)
    groups = groups_of(made)
    assert all(group["template"]["spec"]["restartPolicy"] == "Never" for group in groups.values())
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 56, 0)
    head = groups.pop("head")
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    for group in groups.values():
        assert group["rayStartParams"].keys() == {"object-store-memory"}
        assert ("priority" in group) == ("idleTimeoutSeconds" in group) == cluster["enableInTreeAutoscaling"]
    if cluster["enableInTreeAutoscaling"]:
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert all(groups[name]["priority"] < groups["target"]["priority"] for name in groups.keys() & {"draft"})


@every_profile
def test_the_head_has_ports_of_which_kuberay_makes_the_service_of_serve(profile):
    made = profile_objects(profile)
    gateway = configuration(made).gateway
    (container,) = pod_specs(made)["head"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["serve"], ports["serve-grpc"]) == (gateway.http_port, gateway.grpc_port)
    assert ports["metrics"] == RAY_METRICS_PORT


@every_profile
def test_a_pod_of_its_group_holds_every_replica(profile):
    made = profile_objects(profile)
    groups = groups_of(made)
    for deployment in serve_config(made)["applications"][0]["deployments"]:
        options = deployment["ray_actor_options"]
        (group,) = options["resources"]
        room = {key: float(amount) for key, amount in groups[group]["resources"].items()}
        bundles = deployment.get("placement_group_bundles") or [
            {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options["resources"]}
        ]
        for resource in {key for bundle in bundles for key in bundle}:
            assert sum(bundle.get(resource, 0) for bundle in bundles) <= room.get(resource, 0), resource
        limits = groups[group]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert room.get("GPU", 0) == float(limits.get("nvidia.com/gpu", 0))


@pytest.mark.parametrize(("gpus", "workers", "pods"), [(0, 3, 3), (1, 3, 3), (2, 3, 2), (4, 4, 1)])
def test_draft_pods_hold_a_worker_for_each_gpu(gpus, workers, pods):
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    made = objects(
        {"config": {"draft": {"workers": 1, "max_workers": workers}}, "draft": {"resources": {"limits": limits}}}
    )
    group = groups_of(made)["draft"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, pods)
    assert group["resources"]["CPU"] == str(max(1, gpus))


@pytest.mark.parametrize("first", ["/models/draft", "none"])
def test_each_draft_model_has_its_deployment_and_pods_for_its_workers(first, tmp_path):
    more = {"code": {"model": "/models/code", "workers": 2, "max_workers": 3}, "prose": {"model": "/models/prose"}}
    made = objects({"config": {"draft": {"model": first, "workers": 1, "max_workers": 2}, "more_drafts": more}})
    assert configuration(made).more_drafts["code"].most_workers == 3
    (tmp_path / "all.yaml").write_text(yaml.dump_all(made, Dumper=yaml.CSafeDumper))
    assert validate([tmp_path], CRDS if CRDS.is_dir() else None).findings == []
    deployments = {one["name"]: one for one in serve_config(made)["applications"][0]["deployments"]}
    pools = {"DraftPool-code", "DraftPool-prose"} | ({"DraftPool"} if first != "none" else set())
    assert {name for name in deployments if name.startswith("DraftPool")} == pools
    assert all(deployments[name]["ray_actor_options"]["resources"] == {"draft": 0.001} for name in pools)
    group = groups_of(made)["draft"]
    has_first = first != "none"
    assert (group["minReplicas"], group["maxReplicas"]) == (3 + has_first, 4 + 2 * has_first)


@pytest.mark.parametrize(("gpus", "cpus", "pods"), [(0, 2, (2, 3)), (4, 4, (1, 2)), (3, 3, (2, 3))])
def test_a_draft_pod_holds_all_ranks_of_its_workers(gpus, cpus, pods, tmp_path):
    draft = {"model": "/models/draft", "tensor_parallel": 2, "workers": 2, "max_workers": 3}
    made = objects(
        {"config": {"draft": draft}, "draft": {"resources": {"limits": {"nvidia.com/gpu": gpus} if gpus else {}}}}
    )
    (tmp_path / "all.yaml").write_text(yaml.dump_all(made, Dumper=yaml.CSafeDumper))
    assert validate([tmp_path], CRDS if CRDS.is_dir() else None).findings == []
    group = groups_of(made)["draft"]
    assert (group["minReplicas"], group["maxReplicas"]) == pods
    assert group["resources"]["CPU"] == str(cpus)
    (deployment,) = [one for one in serve_config(made)["applications"][0]["deployments"] if one["name"] == "DraftPool"]
    bundle = {"CPU": 1.0, "draft": 0.001} | ({"GPU": 1.0} if gpus else {})
    assert deployment["placement_group_bundles"] == [bundle] * 2
    assert deployment["placement_group_strategy"] == "STRICT_PACK"


@pytest.mark.parametrize("drafters", [["none"], ["suffix"], ["suffix", "draft_model"], ["draft_model.code"]])
def test_gpus_are_asked_for_those_draft_models_that_draft(drafters, tmp_path):
    more = {"code": {"model": "/models/code"}} if drafters in (["none"], ["draft_model.code"]) else {}
    config = {"speculation": {"drafters": drafters}, "more_drafts": more}
    made = objects(merged(profile_values("prod-70b"), {"config": config}))
    (tmp_path / "all.yaml").write_text(yaml.dump_all(made, Dumper=yaml.CSafeDumper))
    assert validate([tmp_path], CRDS if CRDS.is_dir() else None).findings == []


def test_there_may_be_room_for_more_pods_than_come_by_themselves():
    group = groups_of(objects({"draft": {"maxReplicas": 12}}))["draft"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 12)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_gpus_of_any_vendor_and_parts_of_them_are_gpus(name):
    made = objects({"target": {"resources": {"limits": {name: 1}}}})
    group = groups_of(made)["target"]
    assert group["resources"]["GPU"] == "1"
    assert configuration(made).target.device == "cuda"
    assert {"key": name, "operator": "Exists", "effect": "NoSchedule"} in group["template"]["spec"]["tolerations"]


def test_targets_without_drafts_have_no_draft_pods():
    made = objects({"config": {"draft": {"model": "none"}}})
    assert set(groups_of(made)) == {"head", "router", "target"}
    assert "DraftPool" not in [one["name"] for one in serve_config(made)["applications"][0]["deployments"]]


@every_profile
def test_an_upgrade_in_place_has_room_for_new_routers_and_gateways_beside_the_old_ones(profile):
    made = profile_objects(profile)
    config = configuration(made)
    deployments = {each["name"]: each for each in serve_config(made)["applications"][0]["deployments"]}
    counts = {"Gateway": config.gateway.replicas, "Router": config.target.most_groups}
    for deployment in counts:
        assert deployments[deployment]["max_surge_percent"] == 100
    cpus = sum(deployments[name]["ray_actor_options"]["num_cpus"] * count for name, count in counts.items())
    router = groups_of(made)["router"]
    assert 2 * cpus <= int(router["resources"]["CPU"]) * router["minReplicas"]
    # What ends a gateway sooner cuts streams that are allowed.
    assert deployments["Gateway"]["graceful_shutdown_timeout_s"] == config.gateway.request_timeout_s
    second = profile_values(profile).get("upgrade", {}).get("secondTarget", False)
    assert ("max_surge_percent" in deployments["TargetGroup"]) == second


@every_profile
def test_the_grace_of_a_router_covers_the_longest_stream(profile):
    made = profile_objects(profile)
    router = pod_specs(made)["router"]
    timeout_s = serve_config(made)["http_options"]["request_timeout_s"]
    grace_s = router["terminationGracePeriodSeconds"]
    assert grace_s >= 30 + timeout_s + 20
    command = router["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert timeout_s < float(command[command.index("--limit-s") + 1]) < grace_s
    assert one(made, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] >= grace_s


# Pods.


@every_profile
def test_every_container_is_confined(profile):
    for spec in pod_specs(profile_objects(profile)).values():
        assert spec["securityContext"]["runAsUser"] > 10_000
        for container in containers_of(spec):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert not [key for key in container.get("env", []) if "PASSWORD" in key["name"].upper()]
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
            for variable in container.get("env", []):
                if variable["value"].startswith("/"):
                    assert variable["value"].startswith(("/tmp/", "/models")), variable


@every_profile
def test_no_pod_is_killed_for_what_happens_in_another(profile):
    specs = pod_specs(profile_objects(profile))
    for group in groups_of(profile_objects(profile)):
        (container,) = specs[group]["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
        assert {"name": "RAY_LOG_TO_STDERR", "value": "1"} in container["env"]
        assert {(name, value) for name, value in own_ray(4 << 20).items()} <= {
            (each["name"], each["value"]) for each in container["env"]
        }
    assert specs["router"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_replicas_read_calls_as_large_as_requests_may_be():
    for group in groups_of(objects({"config": {"gateway": {"max_body_bytes": 64 << 20}}})).values():
        found = {each["name"]: each["value"] for each in group["template"]["spec"]["containers"][0]["env"]}
        assert own_ray(64 << 20).items() <= found.items()


def test_a_router_may_be_asked_over_grpc_whether_it_is_ready():
    router = pod_specs(objects({"router": {"readiness": "grpc"}}))["router"]["containers"][0]
    assert router["readinessProbe"]["grpc"] == {"port": 9000}
    assert "httpGet" not in router["readinessProbe"]


@every_profile
def test_rays_object_store_fits_into_shared_memory_beside_what_else_is_there(profile):
    for group in groups_of(profile_objects(profile)).values():
        spec = group["template"]["spec"]
        (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if volume["name"] == "shm"]
        assert int(group["rayStartParams"]["object-store-memory"]) == number_of(shm) / 2
        assert number_of(shm) < number_of(spec["containers"][0]["resources"]["limits"]["memory"])


@every_profile
def test_only_the_head_has_a_token_and_only_where_there_is_an_autoscaler(profile):
    made = profile_objects(profile)
    tokens = {group for group, spec in pod_specs(made).items() if spec["automountServiceAccountToken"]}
    assert tokens == ({"head"} if cluster_of(made)["enableInTreeAutoscaling"] else set())


@every_profile
def test_mounts_and_volumes_belong_together(profile):
    made = profile_objects(profile)
    claimed = {
        each["metadata"]["name"]: {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        for each in made
        if each["kind"] == "StatefulSet"
    }
    for name, spec in pod_specs(made).items():
        volumes = {volume["name"] for volume in spec["volumes"]} | claimed.get(name, set())
        mounts = {mount["name"] for container in containers_of(spec) for mount in container["volumeMounts"]}
        assert mounts == volumes


def test_what_pods_take_besides_is_in_every_pod_or_in_those_of_its_group():
    extra = {
        "annotations": {"a/b": "c"}, "labels": {"team": "x"}, "env": [{"name": "A", "value": "1"}],
        "envFrom": [{"secretRef": {"name": "s"}}], "volumes": [{"name": "v", "emptyDir": {}}],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}], "initContainers": [{"name": "i", "image": "x"}],
        "sidecars": [{"name": "s", "image": "x"}], "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}}, "topologySpreadConstraints": [{"maxSkew": 1}], "priorityClassName": "p",
        "schedulerName": "s", "runtimeClassName": "gvisor",
    }  # fmt: skip
    alone = ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName")
    alone += ("schedulerName", "runtimeClassName")
    for given, wanted in (({"pods": extra}, set(RAY_GROUPS)), ({"draft": extra}, {"draft"})):
        for name, group in groups_of(objects(given)).items():
            spec, metadata = group["template"]["spec"], group["template"]["metadata"]
            container = spec["containers"][0]
            has = {
                "annotations": metadata.get("annotations") == extra["annotations"],
                "labels": metadata["labels"].get("team") == "x",
                "env": extra["env"][0] in container["env"],
                "envFrom": container.get("envFrom") == extra["envFrom"],
                "volumes": extra["volumes"][0] in spec["volumes"],
                "volumeMounts": extra["volumeMounts"][0] in container["volumeMounts"],
                "initContainers": extra["initContainers"][0] in spec.get("initContainers", []),
                "sidecars": extra["sidecars"][0] in spec["containers"][1:],
                **{key: spec.get(key) == extra[key] for key in alone},
            }
            assert has == dict.fromkeys(extra, name in wanted), name


def test_of_items_with_one_name_that_of_the_group_counts_and_any_counts_more_than_the_charts_own():
    values = {
        "pods": {"env": [{"name": "A", "value": "1"}, {"name": "OMP_NUM_THREADS", "value": "2"}]},
        "router": {"env": [{"name": "A", "value": "3"}]},
    }
    for name, group in groups_of(objects(values)).items():
        given = group["template"]["spec"]["containers"][0]["env"]
        env = {each["name"]: each["value"] for each in given}
        assert len(env) == len(given)
        assert (env["A"], env["OMP_NUM_THREADS"]) == ("3" if name == "router" else "1", "2")


def test_labels_that_choose_pods_cannot_be_changed():
    labels = {"app.kubernetes.io/component": "other", "team": "x"}
    made = objects({"router": {"labels": labels}, "commonLabels": labels})
    group = groups_of(made)["router"]
    assert one(made, "Service")["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    assert group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "router"


# Names, images, the network, Redis, budgets.


def test_names_follow_the_release_and_can_be_chosen():
    def name(release, **values):
        (service,) = [each for each in objects(values, release) if each["kind"] == "RayService"]
        return service["metadata"]["name"]

    assert name("llm") == "llm-paceline"
    assert name("paceline-eu") == "paceline-eu"
    assert name("llm", nameOverride="serving") == "llm-serving"
    assert name("llm", fullnameOverride="mine") == "mine"
    made = objects({"commonLabels": {"team": "x"}, "commonAnnotations": {"note": "y"}})
    assert all(each["metadata"]["labels"]["team"] == "x" for each in made if each["kind"] != "PriorityClass")
    assert all(each["metadata"]["annotations"]["note"] == "y" for each in made if each["kind"] != "PriorityClass")
    assert "team" not in groups_of(made)["head"]["template"]["metadata"]["labels"], "or pods were made anew"


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({}, "paceline:0.1.0"),
        ({"repository": "registry.example/paceline", "tag": "v9"}, "registry.example/paceline:v9"),
        ({"tag": "v9", "digest": "sha256:" + "0" * 64}, "paceline@sha256:" + "0" * 64),
    ],
)
def test_a_digest_counts_more_than_a_tag(given, image):
    made = objects({"image": given, "imagePullSecrets": [{"name": "registry"}]})
    for spec in pod_specs(made).values():
        assert {container["image"] for container in containers_of(spec)} == {image}
        assert spec["imagePullSecrets"] == [{"name": "registry"}]


def test_the_two_roles_of_redis_are_two_servers_with_opposite_rules():
    made = profile_objects("prod-70b")
    settings = {
        role: one(made, "ConfigMap", f"paceline-{role}")["data"]["valkey.conf"].splitlines()
        for role in ("cache", "gcs")
    }
    assert {"maxmemory-policy noeviction", "appendonly yes"} <= set(settings["gcs"])
    assert {"maxmemory-policy volatile-lfu", f"maxmemory {16 * 2**30}"} <= set(settings["cache"])
    assert "paceline-gcs" in cluster_of(made)["gcsFaultToleranceOptions"]["redisAddress"]
    assert configuration(made).cache.url == "redis://paceline-cache:6379/0"
    cache = pod_specs(made)["paceline-cache"]["containers"][0]["resources"]["limits"]
    assert number_of(cache["memory"]) == 1.5 * 16 * 2**30


@pytest.mark.parametrize(("url", "told"), [(None, "none"), ("rediss://else:6379/0", "rediss://else:6379/0")])
def test_the_cache_may_be_elsewhere_or_none(url, told):
    config = {} if url is None else {"cache": {"url": url}}
    made = objects({"cache": {"enabled": False}, "config": config})
    cache = configuration(made).cache
    assert cache.url == told
    volumes = {volume["name"] for volume in pod_specs(made)["router"]["volumes"]}
    assert (cache.password_file is not None) == ("cache-password" in volumes) == (told != "none")
    assert not [each for each in made if each["kind"] == "StatefulSet"]


@pytest.mark.parametrize(
    "config",
    [
        {"draft": {"model": "none"}},
        {"draft": {"workers": 0}},
        {"speculation": {"drafters": ["suffix"]}},
    ],
)
def test_without_draft_workers_there_is_neither_a_group_nor_a_deployment_of_them(config):
    made = objects({"config": config})
    assert configuration(made)
    assert set(groups_of(made)) == {"head", "router", "target"}
    (application,) = serve_config(made)["applications"]
    assert {one["name"] for one in application["deployments"]} == {"Gateway", "Router", "TargetGroup"}


def test_without_the_autoscaler_there_are_as_many_pods_as_there_may_be():
    made = objects({"autoscaler": {"enabled": False}})
    assert [group.get("replicas") for group in groups_of(made).values()] == [None, 1, 1, 2]


def test_auto_is_the_device_that_the_pods_have():
    made = objects(merged(profile_values("prod-70b"), {"config": {"target": {"device": "auto"}}}))
    assert (configuration(made).target.device, configuration(made).draft.device) == ("cuda", "cuda")


def test_what_prepares_models_has_the_users_settings_and_no_gpu():
    mount = {"name": "ca", "mountPath": "/ca"}
    made = objects(
        merged(
            profile_values("single-node-gpu"),
            {
                "models": {"prepare": True},
                "config": {"target": {"model": "smollm2"}, "draft": {"model": "auto"}},
                "networkPolicy": {"egress": [{}]},
                "draft": {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
                "pods": {"envFrom": [{"configMapRef": {"name": "proxy"}}], "volumeMounts": [mount]},
            },
        )
    )
    for name in ("router", "target", "draft"):
        container = pod_specs(made)[name]["initContainers"][0]
        assert container["name"] == "prepare-model"
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert container["envFrom"]
        assert mount in container["volumeMounts"]


def test_a_volume_of_the_values_takes_the_place_of_the_charts():
    volume = {"name": "models", "nfs": {"server": "nfs.example.com", "path": "/models"}}
    mount = {"name": "models", "mountPath": "/models", "subPath": "llama"}
    made = objects({"pods": {"volumes": [volume], "volumeMounts": [mount]}})
    for name in ("head", "router", "target", "draft"):
        spec = pod_specs(made)[name]
        assert [each for each in spec["volumes"] if each["name"] == "models"] == [volume]
        assert [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "models"] == [mount]


def test_labels_annotations_and_tolerations_reach_every_pod():
    toleration = {"key": "t", "operator": "Exists"}
    made = objects({"pods": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "tolerations": [toleration]}})
    templates = [group["template"] for group in groups_of(made).values()]
    templates += [each["spec"]["template"] for each in made if each["kind"] == "StatefulSet"]
    assert len(templates) == 5
    for template in templates:
        assert template["metadata"]["labels"]["a"] == "b"
        assert template["metadata"]["annotations"]["c"] == "d"
    for spec in [template["spec"] for template in templates] + [one(made, "Pod", "paceline-test")["spec"]]:
        assert toleration in spec["tolerations"]


def test_the_network_denies_by_default_and_lets_dns_through():
    made = objects({"networkPolicy": {"enabled": True}})
    policies = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "NetworkPolicy"}
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "paceline"}}}
    # Without empty lists of rules: the API server leaves them out, and applying it again would be a change.
    assert policies["paceline-deny"] == own | {"policyTypes": ["Ingress", "Egress"]}
    (dns,) = policies["paceline-dns"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    router = {"app.kubernetes.io/instance": "paceline", "app.kubernetes.io/component": "router"}
    assert policies["paceline-clients"]["podSelector"] == {"matchLabels": router}
    outside = {
        name
        for name, spec in policies.items()
        for rule in spec.get("ingress", [])
        for peer in rule["from"]
        if "namespaceSelector" in peer
    }
    assert outside == {"paceline-operator", "paceline-clients", "paceline-metrics", "paceline-gateway-metrics"}


def test_the_pod_of_helm_test_reaches_routers_past_all_policies():
    made = objects({"networkPolicy": {"enabled": True}})
    assert {each["kind"] for each in made if is_test(each)} == {"Pod", "NetworkPolicy"}
    pod = one(made, "Pod", "paceline-test")
    policies = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "NetworkPolicy"}
    (rule,) = policies["paceline-test"]["egress"]
    assert policies["paceline-test"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert rule["to"] == [{"podSelector": policies["paceline-clients"]["podSelector"]}]
    (rule,) = policies["paceline-clients"]["ingress"]
    assert {"podSelector": policies["paceline-test"]["podSelector"]} in rule["from"]


def test_routers_reach_the_collector_of_traces():
    values = {"networkPolicy": {"enabled": True, "collectorPort": 4317}}
    values["config"] = {"observability": {"otlp_endpoint": "http://collector.monitoring:4317/v1/traces"}}
    made = objects(values)
    assert configuration(made).observability.otlp_endpoint == "http://collector.monitoring:4317/v1/traces"
    traces = one(made, "NetworkPolicy", "paceline-traces")["spec"]
    assert [port["port"] for rule in traces["egress"] for port in rule["ports"]] == [4317]


@pytest.mark.parametrize("profile", [*PROFILES, "everything"])
def test_services_policies_budgets_and_monitors_choose_pods_that_are_there(profile):
    made = objects(EVERYTHING) if profile == "everything" else profile_objects(profile)
    pods = [group["template"]["metadata"]["labels"] for group in groups_of(made).values()]
    pods += [each["spec"]["template"]["metadata"]["labels"] for each in made if each["kind"] == "StatefulSet"]

    def chosen(selector):
        exact = selector.get("matchLabels", {}).items()
        rules = selector.get("matchExpressions", [])
        return [
            labels for labels in pods
            if exact <= labels.items() and all(labels.get(rule["key"]) in rule["values"] for rule in rules)
        ]  # fmt: skip

    for each in made:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert chosen({"matchLabels": spec["selector"]}), identity(each)
        elif each["kind"] in ("PodDisruptionBudget", "PodMonitor", "StatefulSet"):
            assert chosen(spec["selector"]), identity(each)
        elif each["kind"] == "NetworkPolicy" and not each["metadata"]["name"].endswith("-test"):
            assert chosen(spec["podSelector"]), identity(each)


@pytest.mark.parametrize(("groups", "stay"), [(1, 1), (2, 1), (5, 4)])
def test_targets_leave_one_after_the_other_and_the_last_one_stays(groups, stay):
    config = {"target": {"groups": groups, "max_groups": groups}}
    router = {"minReplicas": 6, "maxReplicas": 6}
    values = merged(
        profile_values("prod-70b"), {"config": config, "router": router, "upgrade": {"secondTarget": False}}
    )
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in objects(values) if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets["paceline-target"]["minAvailable"] == stay
    assert budgets.keys() == {"paceline-router", "paceline-target"}  # none of a Redis: it would hold every drain


def test_monitors_rules_and_dashboards_are_those_of_the_files():
    made = objects(EVERYTHING)
    rules = yaml.safe_load((CHART / "observability" / "alerts.yaml").read_bytes())
    assert one(made, "PrometheusRule")["spec"] == rules
    dashboards = one(made, "ConfigMap", "paceline-dashboards")["data"]
    files = sorted((CHART / "observability" / "dashboards").glob("*.json"))
    assert {name: json.loads(text) for name, text in dashboards.items()} == {
        f"paceline-{path.name}": json.loads(path.read_bytes()) for path in files
    }
    ports = {port["name"] for port in pod_specs(made)["router"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in one(made, "PodMonitor")["spec"]["podMetricsEndpoints"]} <= ports


def test_what_a_process_tells_its_node_gets_the_name_that_it_has_on_a_page():
    drop = {"sourceLabels": ["__name__"], "regex": "paceline_step_.*", "action": "drop"}
    monitor = one(objects(merged(EVERYTHING, {"podMonitor": {"metricRelabelings": [drop]}})), "PodMonitor")
    of_node, of_page = (endpoint["metricRelabelings"] for endpoint in monitor["spec"]["podMetricsEndpoints"])
    assert of_page == of_node[1:] == [drop]
    (rule,) = one(objects(EVERYTHING), "PodMonitor")["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert rule == of_node[0]
    assert (rule["sourceLabels"], rule["targetLabel"], rule["replacement"]) == (["__name__"], "__name__", "$1")
    for family in GatewayMetrics().registry.collect():
        for sample in family.samples:
            renamed = re.fullmatch(rule["regex"], f"ray_{sample.name}")
            assert renamed is not None
            assert renamed[1] == sample.name
    for name in ("ray_paceline_door_refusals", "ray_node_cpu_count", "paceline_requests_total"):
        assert re.fullmatch(rule["regex"], name) is None


def test_gateways_are_scraped_where_clients_cannot_reach_them():
    made = objects(EVERYTHING)
    port = configuration(made).gateway.metrics_port
    router, target = (pod_specs(made)[group]["containers"][0] for group in ("router", "target"))
    assert {each["containerPort"] for each in router["ports"] if each["name"] == "gateway-metrics"} == {port}
    assert "gateway-metrics" not in {each["name"] for each in target["ports"]}
    assert "gateway-metrics" in {each["port"] for each in one(made, "PodMonitor")["spec"]["podMetricsEndpoints"]}
    opened = {
        name: {
            each["port"]
            for rule in one(made, "NetworkPolicy", f"paceline-{name}")["spec"]["ingress"]
            for each in rule["ports"]
        }
        for name in ("clients", "gateway-metrics")
    }
    assert opened["gateway-metrics"] == {port}
    assert port not in opened["clients"]
    assert port not in {each["port"] for each in one(made, "Service", "paceline")["spec"]["ports"]}


KEYS_KNOWN = {"asks_for_keys": True, "tenants_file": "/etc/paceline/tenants/tenants.json"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, KEYS_KNOWN),
        ({"tenants": {"existingSecret": ""}}, {"asks_for_keys": False}),
        ({"config": {"gateway": {"max_body_bytes": 9_000_000}}}, {**KEYS_KNOWN, "max_body_bytes": 9_000_000}),
        ({"config": {"gateway": {"max_connections": 70}}}, {**KEYS_KNOWN, "max_connections": 70}),
    ],
)
def test_proxies_are_told_what_they_let_in(values, told):
    for group, spec in pod_specs(objects(values)).items():
        if group in RAY_GROUPS:
            (text,) = [each["value"] for each in spec["containers"][0]["env"] if each["name"] == SETTINGS_VARIABLE]
            assert json.loads(text) == told
            assert FrontDoor.model_validate_json(text).asks_for_keys == told["asks_for_keys"]


def test_routes_attach_to_a_gateway_of_the_chart_or_to_a_given_one():
    made = objects({"gateway": {"enabled": True}})
    assert one(made, "HTTPRoute")["spec"]["parentRefs"] == [{"name": "paceline", "sectionName": "https"}]
    parents = [{"name": "public", "namespace": "gateways"}]
    made = objects({"gateway": {"enabled": True, "parentRefs": parents}})
    route = one(made, "HTTPRoute")["spec"]
    assert route["parentRefs"] == parents
    # Of an HTTPRoute and a GRPCRoute with the same host a Gateway takes one.
    paths = {
        match["path"]["value"]: rule["backendRefs"][0]["port"] for rule in route["rules"] for match in rule["matches"]
    }
    assert paths == {"/v1": 8000, "/paceline.v1.Inference": 9000, "/grpc.health.v1.Health": 9000}
    assert "GRPCRoute" not in [each["kind"] for each in made]
    assert "Gateway" not in [each["kind"] for each in made]


def test_objects_of_the_user_are_templates():
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}
    assert one(objects({"extraObjects": [extra]}), "ConfigMap", "paceline-x")


def test_the_notes_name_what_pods_wait_for():
    notes = templates(profile_values("prod-70b"))["NOTES.txt"]
    assert all(name in notes for name in ("paceline-gcs", "paceline-cache", "paceline-tenants", "paceline-models"))
    assert "https://paceline.example.com/v1" in notes


# Values.


def test_the_schema_holds_the_limits_of_the_configuration():
    text = (CHART / "values.schema.json").read_text()
    assert with_config(text) == text, "run `make k8s`"
    schema = json.loads(text)
    values = yaml.safe_load((CHART / "values.yaml").read_bytes())
    jsonschema.Draft7Validator.check_schema(schema)
    assert jsonschema.Draft7Validator(schema).is_valid(values)
    assert schema["properties"].keys() - values.keys() == {"global"}
    for section, given in values.items():
        properties = schema["properties"][section].get("properties")
        if properties is not None:
            others = {"envFrom"} | values["pods"].keys() | {"claims"}
            assert properties.keys() - given.keys() <= others, "every value is told in values.yaml"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"drafts": {}}, "drafts"),
        ({"gcs": None}, "missing property 'gcs'"),
        ({"config": None}, "missing property 'config'"),
        ({"draft": {"maximum": 3}}, "maximum"),
        ({"config": {"target": {"tensor_paralel": 2}}}, "tensor_paralel"),
        ({"config": {"observability": {"log_format": "jsonl"}}}, "log_format"),
        ({"config": {"draft": {"max_workers": 0}}}, "max_workers"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"image": {"tag": "a b"}}, "tag"),
        ({"gcs": {"memory": "1 GB"}}, "memory"),
        ({"upgrade": {"type": "NewClutser"}}, "upgrade.type|upgrade/type"),
        ({"router": {"minReplicas": 0}}, "minReplicas"),
        ({"router": {"minReplicas": 9}}, "router.minReplicas is 9; it must not exceed maxReplicas, 1"),
        ({"target": {"minReplicas": 2}}, "target.minReplicas is 2; it must not exceed maxReplicas, 1"),
        ({"config": {"more_drafts": {"code": {"model": "qwen"}}}}, "config.more_drafts.code.model is qwen; it"),
        (
            {
                "config": {"draft": {"tensor_parallel": 2}},
                "draft": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            },
            "draft.resources.limits has 1 GPUs; tensor_parallel 2 of a draft worker needs as many in one pod",
        ),
        ({"config": {"more_drafts": {"code": {"model": "/m", "workers": 0}}}}, "minimum: got 0, want 1"),
        (
            {"config": {"more_drafts": {"code": {"model": "/m", "workers": 3, "max_workers": 2}}}},
            "config.more_drafts.code.workers is 3; it must not exceed max_workers, 2",
        ),
        (
            {"config": {"more_drafts": {"code": {"model": "/m", "device": "cuda"}}}},
            "config.more_drafts.code.device is cuda; draft.resources.limits has no GPU",
        ),
        ({"config": {"more_drafts": {"code": {"model": "/m", "device": "cuda:1"}}}}, "code/device.*.not. failed"),
        (
            {"config": {"more_drafts": {"code": {"model": "/m"}}, "speculation": {"drafters": ["suffix"]}}},
            "config.speculation.drafters is suffix; it must include draft_model.code, or auto",
        ),
        ({"config": {"target": {"groups": 3}}}, "config.target.groups is 3; it must not exceed max_groups, 1"),
        ({"config": {"draft": {"workers": 9}}}, "config.draft.workers is 9; it must not exceed max_workers, 2"),
        (
            {"config": {"target": {"tensor_parallel": 8}}, "target": {"resources": {"limits": {"nvidia.com/gpu": 4}}}},
            "target.resources.limits has 4 GPUs; config.target.tensor_parallel 8",
        ),
        ({"config": {"gateway": {"tls": {"certificate_file": "/a", "key_file": "/b"}}}}, "TLS ends at gateway"),
        ({"config": {"target": {"device": "cuda"}}}, "config.target.device is cuda; target.*limits has no GPU"),
        ({"head": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "the head does no work"),
        ({"draft": {"shm": "128Mi"}}, "draft.shm is 128Mi; the least is 150Mi"),
        ({"draft": {"shm": "3Gi"}}, "draft.shm is 3Gi; it must be less than resources.limits.memory, 3Gi"),
        ({"config": {"gateway": {"http_port": 8080}}}, "config.gateway.http_port is 8080; Ray listens there"),
        ({"config": {"gateway": {"grpc_port": 12345}}}, "config.gateway.grpc_port is 12345; Ray listens there"),
        ({"config": {"gateway": {"grpc_port": 80}}}, "config.gateway.grpc_port is 80; the least is 1024"),
        ({"config": {"gateway": {"grpc_port": 8000}}}, "http_port and grpc_port are both 8000"),
        ({"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}, "it needs upgrade.gatewayClassName"),
        (
            {
                "upgrade": {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "g"},
                "autoscaler": {"enabled": False},
            },
            "it needs autoscaler.enabled",
        ),
        ({"upgrade": {"secondTarget": True}}, "config.target.max_groups, 1, above groups, 1"),
        ({"podDisruptionBudgets": {"enabled": True}}, "podDisruptionBudgets.router is 1; it must be less than"),
        ({"models": {"prepare": True}}, "it must be a name of `paceline model list`"),
        ({"config": {"cache": {"url": "redis://x:1/0"}}}, "set cache.enabled to false"),
        ({"fullnameOverride": "a" * 41}, "fullnameOverride"),
        ({"nameOverride": "My_App"}, "nameOverride"),
        ({"head": {"resources": None}}, "missing property 'resources'"),
        ({"image": {"repository": None}}, "missing property 'repository'"),
        ({"cache": {"memory": "512m"}}, "memory"),
        ({"cache": {"env": [{"name": "a"}]}}, "env"),
        (
            {"config": {"draft": {"workers": 4, "max_workers": 8}}, "draft": {"maxReplicas": 2}},
            "draft.maxReplicas is 2; config.draft asks for up to 8 pods",
        ),
        (
            {"config": {"target": {"groups": 2, "max_groups": 4}}, "target": {"maxReplicas": 2}},
            "target.maxReplicas is 2; config.target asks for up to 4 pods",
        ),
        ({"config": {"target": {"model": "smollm2"}}}, "without models.prepare it must be a directory"),
        (
            {"models": {"prepare": True}, "config": {"target": {"model": "meta-llama/Llama-3.1-8B"}}},
            "it must be a name of `paceline model list`",
        ),
        ({"config": {"draft": {"model": "auto"}}}, "only with models.prepare"),
        ({"config": {"target": {"eagle_head": "head"}}}, "it must be none, mtp or a directory, /models/..."),
        ({"config": {"draft": {"model": "small"}}}, "it must be none, auto or a directory"),
        (
            merged(profile_values("laptop"), {"networkPolicy": {"enabled": True}}),
            "needs networkPolicy.egress",
        ),
        (
            {
                "networkPolicy": {"enabled": True},
                "cache": {"enabled": False},
                "config": {"cache": {"url": "rediss://r.example.com:6380/0"}},
            },
            "needs networkPolicy.egress",
        ),
        ({"pods": {"sidecars": [{"name": "ray-worker"}]}}, "the chart has one of that name"),
        ({"target": {"resources": {"requests": {"nvidia.com/gpu": 1}}}}, "resources.limits must have it, too"),
        ({"head": {"resources": {"requests": {"cpu": "4"}}}}, "head.resources.requests.cpu is 4; .* the limit, 2"),
        (
            {"draft": {"resources": {"requests": {"ephemeral-storage": "10Gi"}}}},
            "draft.resources.requests.ephemeral-storage is 10Gi; .* the limit, 4Gi",
        ),
        ({"config": {"draft": {"lookahead": {"guess_set_size": 0}}}}, "guess_set_size"),
        ({"config": {"observability": {"otlp_endpoint": "collector"}}}, "otlp_endpoint"),
        ({"cache": {"enabled": False}, "config": {"cache": {"url": "http://x"}}}, "url"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(values, told):
    with pytest.raises(helm_python.HelmError, match=told):
        objects(values)


def test_a_name_that_the_release_makes_too_long_is_refused():
    with pytest.raises(helm_python.HelmError, match="has 51 characters; the limit is 40"):
        objects({}, release="a" * 42)


@pytest.mark.parametrize(
    ("memory", "least"), [("512Mi", 512 * 2**20), ("1.5Gi", 1.5 * 2**30), ("2G", 2e9), ("1Ti", 2**40)]
)
def test_quantities_are_read_as_kubernetes_reads_them(memory, least):
    made = objects({"cache": {"memory": memory}})
    settings = one(made, "ConfigMap", "paceline-cache")["data"]["valkey.conf"]
    assert f"maxmemory {math.floor(least)}" in settings.splitlines()
    limit = pod_specs(made)["paceline-cache"]["containers"][0]["resources"]["limits"]["memory"]
    assert 1.49 * least <= number_of(limit) <= 1.5 * least + 2**21


@pytest.mark.parametrize(
    ("given", "canonical"),
    [("1024Mi", "1Gi"), ("1.5Gi", "1536Mi"), ("4Gi", "4Gi"), ("3000Ki", "3000Ki"), ("2000M", "2G"), ("1", "1"),
     ("0.5", "500m"), ("1500m", "1500m"), ("2000m", "2"), ("2", "2"), ("1000", "1k"), (3, "3"), ("0", "0")],
)  # fmt: skip
def test_quantities_are_written_as_kubernetes_writes_them(given, canonical):
    made = objects({"head": {"resources": {"requests": {"example.com/thing": given}}}})
    requests = pod_specs(made)["head"]["containers"][0]["resources"]["requests"]
    assert requests["example.com/thing"] == canonical


@pytest.mark.parametrize("name", ["n", "yes", "1", "0x10", "1e3", "null"])
def test_names_that_yaml_takes_for_something_else_stay_names(name):
    made = objects(merged(EVERYTHING, {"fullnameOverride": "a" if name[0].isdigit() else name}), name, name)
    assert {each["metadata"]["namespace"] for each in made if each["kind"] != "PriorityClass"} == {name}
    assert all(isinstance(each["metadata"]["name"], str) for each in made)
    (service,) = [each for each in made if each["kind"] == "RayService"]
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["metadata"]["labels"]["app.kubernetes.io/instance"] == name


# The pages.


def test_log_lines_of_the_page_are_those_that_are_written():
    """Lines of our own; the others are Kubernetes', Ray's and Redis' own."""
    page = (K8S / "README.md").read_text(encoding="utf-8")
    table = page.partition("## Troubleshooting by log line")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, flags=re.MULTILINE)
    ours = [
        line for line, where in rows if where.startswith(("serve controller", "TargetGroup", "`/readyz`", "preStop"))
    ]
    code = "".join(path.read_text() for folder in ("actors", "cluster") for path in (ROOT / folder).rglob("*.py"))
    assert len(ours) >= 6
    assert [part for line in ours for part in line.split("...") if part not in code] == []


def test_every_value_that_the_page_names_beside_those_of_other_charts_is_there():
    text = (CHART.parent / "README.md").read_text(encoding="utf-8").partition("| There | Here |\n|---|---|\n")[2]
    rows = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()]
    assert len(rows) >= 20
    for name in [name for *_, here in rows for name in re.findall(r"`([\w.]+)`", here)]:
        keys = name.replace("GROUP", "target").split(".")
        if keys[0] == "config" and len(keys) > 1:
            model = ClusterConfig.model_fields[keys[1]].annotation
            assert keys[2] in model.model_fields, name
        else:
            value = yaml.safe_load((CHART / "values.yaml").read_bytes())
            for key in keys:
                value = value[key]


def parts_of(made):
    """What an upgrade may change, by what it does: the bounds of groups KubeRay leaves to the next cluster."""
    parts = {each["kind"]: [] for each in made}
    for each in made:
        if each["kind"] == "RayService":
            spec = each["spec"]
            parts["in place"] = spec.pop("serveConfigV2")
            parts["pods"] = spec.pop("rayClusterConfig")
            groups = parts["pods"]["workerGroupSpecs"]
            parts["bounds"] = [[group.pop(key, None) for key in ("replicas", *BOUNDS)] for group in groups]
        parts[each["kind"]].append(each)
    return parts


BOUNDS = ("minReplicas", "maxReplicas")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"config": {"router": {"max_waiting": 7}}}, {"in place"}),
        ({"config": {"draft": {"max_workers": 9}}}, {"in place", "bounds"}),
        ({"draft": {"maxReplicas": 12}}, {"bounds"}),
        ({"router": {"maxReplicas": 9}}, {"bounds"}),
        ({"router": {"minReplicas": 3}}, {"bounds", "pods"}),
        ({"pods": {"env": [{"name": "A", "value": "b"}]}}, {"pods"}),
        ({"draft": {"idleTimeoutSeconds": 5}}, {"pods"}),
        ({"config": {"target": {"tensor_parallel": 4}}}, {"in place", "pods"}),
        ({"service": {"type": "LoadBalancer"}}, {"Service"}),
        ({"networkPolicy": {"clients": ["a"]}}, {"NetworkPolicy"}),
        ({"cache": {"memory": "20Gi"}}, {"StatefulSet", "ConfigMap"}),
        ({"upgrade": {"stepSizePercent": 10}}, {"RayService"}),
    ],
)
def test_a_changed_value_does_to_a_release_what_the_page_says(changed, what):
    values = profile_values("prod-70b")
    before, after = (parts_of(objects(given)) for given in (values, merged(values, changed)))
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == what
