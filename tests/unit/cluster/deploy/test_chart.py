"""Manifests for Kubernetes: that they are what the values say, that schemas accept them, and that an operator would.

Covers `cluster.deploy.ports`, `cluster.deploy.ray_service` and `cluster.deploy.redis`.
"""

import copy
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig
from cluster.deploy.access import disruption_budgets
from cluster.deploy.chart import MARKS, chart_files, profile_manifests, values_model
from cluster.deploy.json_patch import json_patch
from cluster.deploy.kustomize import overlay_manifests, rendered_files
from cluster.deploy.manifests import identity, manifests
from cluster.deploy.pods import image, selector
from cluster.deploy.profiles import BASE, OVERLAYS
from cluster.deploy.serve_config import IMPORT_PATH, serve_config
from cluster.deploy.tenancy import tenancy
from cluster.deploy.validate.check import validate
from cluster.deploy.values import (
    DeployValues,
    GcsValues,
    ImageValues,
    PodValues,
    RouterValues,
    TargetValues,
    UpgradeValues,
    number_of,
    times,
)

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parents[4]
K8S = ROOT / "k8s"
INSTALL = K8S / "containers" / "install.sh"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of the environment, or any other
CRDS = ROOT.parent / "shared" / "data" / "crds"
PROFILES = {"base": BASE, **OVERLAYS}

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
every_profile = pytest.mark.parametrize("name", PROFILES)


def objects_of(name):
    return manifests(BASE) + tenancy(BASE) if name == "base" else overlay_manifests(name)


def ray_service_of(name):
    (service,) = [each for each in objects_of(name) if each["kind"] == "RayService"]
    return service


def pod_specs(name):
    """Name of a group or object, and the specification of its pods."""
    for each in objects_of(name):
        if each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            yield "head", cluster["headGroupSpec"]["template"]["spec"]
            for group in cluster["workerGroupSpecs"]:
                yield group["groupName"], group["template"]["spec"]
        elif "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers_of(spec):
    return spec["containers"] + spec.get("initContainers", [])


def test_what_is_committed_is_what_the_values_say():
    rendered = rendered_files() | {f"chart/{name}": text for name, text in chart_files().items()}
    committed = {
        str(path.relative_to(K8S)): path.read_text(encoding="utf-8")
        for folder in ("base", "overlays", "components", "chart")
        for path in (K8S / folder).rglob("*.*")
    }
    assert committed.keys() == rendered.keys(), "run `paceline k8s render`"
    for name, text in rendered.items():
        assert committed[name] == text, f"{name} is old: run `paceline k8s render`"


def test_rendering_keeps_what_others_have_written_and_names_what_changes(run, tmp_path):
    status, out, _ = run("k8s", "render", "--out", tmp_path)
    assert (status, out) == (0, f"{sum(1 for path in tmp_path.rglob('*.*') if path.is_file())} files in {tmp_path}\n")
    edited, foreign = tmp_path / "base" / "cluster.yaml", tmp_path / "overlays" / "laptop" / "kustomization.yaml"
    edited.write_text(edited.read_text() + "# by hand\n")
    assert run("k8s", "render", "--out", tmp_path)[1].splitlines()[0] == f"changed: {edited}"
    assert "by hand" not in edited.read_text()
    edited.write_text(edited.read_text() + "# by hand\n")
    foreign.write_text("resources: [mine.yaml]\n")
    status, out, err = run("k8s", "render", "--out", tmp_path)
    assert (status, out) == (2, "")
    assert "overlays/laptop/kustomization.yaml not of this command" in err
    assert "by hand" in edited.read_text(), "nothing is written where something cannot be"
    assert run("k8s", "render", "--out", tmp_path, "--force")[0] == 0
    assert "mine.yaml" not in foreign.read_text()
    foreign.write_text("{resources: [mine.yaml]}\n")
    assert run("k8s", "render", "--out", tmp_path)[0] == 2


def test_rendering_where_nothing_can_be_written_is_one_line(refuse, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "k8s" / "base" / "cluster.yaml").mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "k8s", Path("/proc/nowhere")):
        assert "cannot be written: " in refuse("k8s", "render", "--out", out)


@needs_kubectl
@every_profile
def test_kustomize_makes_of_an_overlay_what_its_values_say(name):
    folder = K8S / ("base" if name == "base" else f"overlays/{name}")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {identity(each): each for each in yaml.safe_load_all(done.stdout)}
    wanted = manifests(BASE) if name == "base" else overlay_manifests(name)
    assert built == {identity(each): each for each in wanted}


@every_profile
def test_all_objects_pass_our_own_validation(name, tmp_path):
    """The closed schemas of custom resources and the keys of serveConfigV2 among the rest."""
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects_of(name)))
    report = validate([tmp_path], CRDS if CRDS.is_dir() else None)
    assert report.findings == []
    assert report.num_documents == len(objects_of(name))


@every_profile
def test_every_object_has_a_name_of_its_own_and_lives_in_the_namespace(name):
    objects = objects_of(name)
    assert len({identity(each) for each in objects}) == len(objects)
    for each in objects:
        if each["kind"] not in ("Namespace", "PriorityClass"):
            assert each["metadata"]["namespace"] == PROFILES[name].namespace


KEYS = st.sampled_from(["a", "b/c", "d~e"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(JSON.map(lambda value: {"x": value}), JSON.map(lambda value: {"x": value}))
def test_a_patch_turns_one_object_into_another(old, new):
    assert json.dumps(applied(json_patch(old, new), old), sort_keys=True) == json.dumps(new, sort_keys=True)


def applied(patch, document):
    """Operations of RFC 6902, as far as patches of ours use them."""
    document = copy.deepcopy(document)
    for operation in patch:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place = document
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        last = int(last) if isinstance(place, list) else last
        if operation["op"] == "remove":
            del place[last]
        else:
            place[last] = copy.deepcopy(operation["value"])
    return document


@every_profile
def test_core_objects_and_pod_templates_pass_the_strict_schemas_of_kubernetes(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in objects_of(name):
        if not each["apiVersion"].startswith(("ray.io", "gateway.")):
            kubernetes_validate.validate(each, "1.32", strict=True)
    for group, spec in pod_specs(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": group}, "spec": spec}
        kubernetes_validate.validate(pod, "1.32", strict=True)


@every_profile
def test_serve_config_is_what_ray_reads(name):
    config = yaml.safe_load(ray_service_of(name)["spec"]["serveConfigV2"])
    assert config == serve_config(PROFILES[name])
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == IMPORT_PATH == "cluster.app:build"
    assert ClusterConfig.model_validate(application["args"]).gateway.host == "0.0.0.0"
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_logs_and_traces_of_a_deployment_are_chosen_in_its_values():
    def told(values):
        return serve_config(values)["applications"][0]["args"]["observability"]

    assert all(told(values) == {"log_format": "json", "log_level": "info"} for values in PROFILES.values())
    observability = {"otlp_endpoint": "http://collector.monitoring:4317/v1/traces", "sample_ratio": 0.1}
    values = DeployValues.model_validate({"observability": observability, "network": {"collector_port": 4317}})
    assert told(values) == observability
    (policy,) = [each["spec"] for each in tenancy(values) if each["metadata"]["name"] == "paceline-traces"]
    assert policy["podSelector"] == {"matchLabels": selector(values, "router")}
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [4317]


def test_the_deployments_that_are_placed_are_those_of_the_application():
    rooms = (ROOT / "cluster" / "gateway", ROOT / "cluster" / "router", ROOT / "actors" / "workers")
    sources = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    for deployment in serve_config(OVERLAYS["prod-70b"])["applications"][0]["deployments"]:
        assert f'name="{deployment["name"]}"' in sources


@every_profile
def test_a_pod_of_its_group_holds_every_replica(name):
    groups = {
        group["groupName"]: group for group in ray_service_of(name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    for deployment in serve_config(PROFILES[name])["applications"][0]["deployments"]:
        options = deployment["ray_actor_options"]
        (group,) = options["resources"]
        room = {key: float(amount) for key, amount in groups[group]["resources"].items()}
        bundles = deployment.get("placement_group_bundles") or [
            {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options["resources"]}
        ]
        for resource in {key for bundle in bundles for key in bundle}:
            assert sum(bundle.get(resource, 0) for bundle in bundles) <= room.get(resource, 0), (name, resource)
        limits = groups[group]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert room.get("GPU", 0) == float(limits.get("nvidia.com/gpu", 0))


@every_profile
def test_an_upgrade_in_place_has_room_for_new_routers_and_gateways_beside_the_old_ones(name):
    values = PROFILES[name]
    deployments = {one["name"]: one for one in serve_config(values)["applications"][0]["deployments"]}
    counts = {"Gateway": values.gateway.replicas, "Router": values.target.max}
    for deployment in counts:
        assert deployments[deployment]["max_surge_percent"] == 100
    cpus = sum(deployments[name]["ray_actor_options"]["num_cpus"] * count for name, count in counts.items())
    assert 2 * cpus <= values.router.ray_cpus * values.router.min
    # What ends a gateway sooner cuts streams that are allowed.
    assert deployments["Gateway"]["graceful_shutdown_timeout_s"] == values.gateway.request_timeout_s
    assert ("max_surge_percent" in deployments["TargetGroup"]) == values.upgrade.second_target


@every_profile
def test_the_rules_of_the_operator_hold_that_our_own_validation_does_not_know(name):
    cluster = ray_service_of(name)["spec"]["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in groups)]
    assert all(template["spec"]["restartPolicy"] == "Never" for template in templates)
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 56, 0)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in cluster["headGroupSpec"]
    for group in groups:
        assert group["rayStartParams"].keys() == {"object-store-memory"}
        assert ("priority" in group) == ("idleTimeoutSeconds" in group) == cluster["enableInTreeAutoscaling"]
    if cluster["enableInTreeAutoscaling"]:
        assert cluster["autoscalerOptions"]["version"] == "v2"
        priority = {group["groupName"]: group["priority"] for group in groups}
        assert priority["draft"] < priority["target"]


@every_profile
def test_every_container_is_confined(name):
    for _, spec in pod_specs(name):
        assert spec["securityContext"]["runAsUser"] > 10_000
        for container in containers_of(spec):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security["allowPrivilegeEscalation"]
            assert container["image"] == image(PROFILES[name])
            assert not [key for key in container.get("env", []) if "PASSWORD" in key["name"].upper()]
            folders = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in folders
            for variable in container.get("env", []):
                if variable["value"].startswith("/"):
                    assert variable["value"].startswith(("/tmp/", "/models")), variable


@every_profile
def test_no_pod_is_killed_for_what_happens_in_another(name):
    for group, spec in pod_specs(name):
        if group in ("head", "router", "target", "draft"):
            assert spec["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
    (router,) = [spec for group, spec in pod_specs(name) if group == "router"]
    assert router["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"


@every_profile
def test_rays_object_store_fits_into_shared_memory_beside_what_else_is_there(name):
    cluster = ray_service_of(name)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if volume["name"] == "shm"]
        assert 75 * 2**20 <= int(group["rayStartParams"]["object-store-memory"]) <= number_of(shm) / 2
        assert number_of(shm) < number_of(spec["containers"][0]["resources"]["limits"]["memory"])


@every_profile
def test_only_the_head_has_a_token_and_only_where_there_is_an_autoscaler(name):
    tokens = {group for group, spec in pod_specs(name) if spec["automountServiceAccountToken"]}
    assert tokens == ({"head"} if PROFILES[name].autoscaling else set())


@every_profile
def test_mounts_and_volumes_belong_together(name):
    claims = {"data"} if name != "laptop" else set()
    for _, spec in pod_specs(name):
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = {mount["name"] for container in containers_of(spec) for mount in container["volumeMounts"]}
        assert mounts <= volumes | claims
        assert volumes <= mounts


@every_profile
def test_the_grace_of_a_router_covers_the_longest_stream(name):
    specs = dict(pod_specs(name))
    timeout_s = serve_config(PROFILES[name])["http_options"]["request_timeout_s"]
    grace_s = specs["router"]["terminationGracePeriodSeconds"]
    assert grace_s >= 30 + timeout_s + 20
    command = specs["router"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert timeout_s < float(command[command.index("--limit-s") + 1]) < grace_s
    assert ray_service_of(name)["spec"]["rayClusterDeletionDelaySeconds"] >= grace_s


@every_profile
def test_what_replicas_log_is_the_output_of_their_pod(name):
    for group, spec in pod_specs(name):
        if group in ("head", "router", "target", "draft"):
            assert {"name": "RAY_LOG_TO_STDERR", "value": "1"} in spec["containers"][0]["env"]


@pytest.mark.parametrize(("groups", "stay"), [(1, 1), (2, 1), (5, 4)])
def test_targets_leave_one_after_the_other_and_the_last_one_stays(groups, stay):
    prod = OVERLAYS["prod-70b"].model_dump()
    prod["target"] |= {"min": groups, "max": groups}
    prod["upgrade"]["second_target"] = False
    prod["router"] |= {"min": 6, "max": 6}
    budgets = {each["metadata"]["name"]: each["spec"] for each in disruption_budgets(DeployValues.model_validate(prod))}
    assert budgets["paceline-target"]["minAvailable"] == stay
    assert budgets.keys() == {"paceline-router", "paceline-target"}


@every_profile
def test_no_budget_holds_a_drain_for_ever(name):
    """No budget keeps all n pods of a stateful set: nothing would ever bring a further one."""
    sets = [each["spec"] for each in objects_of(name) if each["kind"] == "StatefulSet"]
    assert sets
    for each in objects_of(name):
        if each["kind"] == "PodDisruptionBudget":
            wanted = each["spec"]["selector"]["matchLabels"].items()
            chosen = [one for one in sets if wanted <= one["template"]["metadata"]["labels"].items()]
            assert all(each["spec"]["minAvailable"] < one["replicas"] for one in chosen)


@every_profile
def test_services_policies_and_budgets_choose_pods_that_are_there(name):
    values = PROFILES[name]
    pods = [selector(values, "head"), *(selector(values, group) for group in ("router", "target", "draft"))]
    pods += [selector(values, role) for role in ("cache", "gcs")]
    for each in objects_of(name):
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert spec["selector"] in pods
        elif each["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"] in pods
            assert spec.keys() & {"minAvailable", "maxUnavailable"} == {"minAvailable"}  # a RayCluster has no scale
        elif each["kind"] == "StatefulSet":
            chosen = spec["selector"]["matchLabels"]
            assert chosen.items() <= spec["template"]["metadata"]["labels"].items()


def test_the_two_roles_of_redis_are_two_servers_with_opposite_rules():
    settings = {
        each["metadata"]["name"]: each["data"]["valkey.conf"]
        for each in overlay_manifests("prod-70b")
        if each["kind"] == "ConfigMap"
    }
    assert "maxmemory-policy noeviction" in settings["paceline-gcs"]
    assert "appendonly yes" in settings["paceline-gcs"]
    assert "maxmemory-policy volatile-lfu" in settings["paceline-cache"]
    cluster = ray_service_of("prod-70b")["spec"]["rayClusterConfig"]
    assert "paceline-gcs" in cluster["gcsFaultToleranceOptions"]["redisAddress"]
    assert "paceline-cache" in serve_config(OVERLAYS["prod-70b"])["applications"][0]["args"]["cache"]["url"]


def test_the_network_denies_by_default_and_lets_dns_through():
    policies = {each["metadata"]["name"]: each["spec"] for each in tenancy(BASE) if each["kind"] == "NetworkPolicy"}
    deny = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": []}
    assert policies["paceline-deny"] == deny
    (dns,) = policies["paceline-dns"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    outside = [
        name
        for name, spec in policies.items()
        for rule in spec.get("ingress", [])
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    assert policies["paceline-clients"]["podSelector"] == {"matchLabels": selector(BASE, "router")}
    for quota in (each["spec"]["hard"] for each in tenancy(BASE) if each["kind"] == "ResourceQuota"):
        # A load balancer has node ports, too: either without the other is a rule that no service can keep.
        assert quota["services.loadbalancers"] == quota["services.nodeports"] == "0"
    assert set(outside) == {"paceline-operator", "paceline-clients", "paceline-metrics", "paceline-gateway-metrics"}


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


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DeployValues.model_validate({"imag": {}}), "imag"),
        (lambda: DeployValues.model_validate({"target": {"tensor_paralel": 2}}), "tensor_paralel"),
        (lambda: TargetValues(cpu="1", memory="1G", ray_cpus=9, gpus=4, tensor_parallel=8), "gpus is 4"),
        (lambda: TargetValues(cpu="1", memory="1G", ray_cpus=2, tensor_parallel=2), "ray_cpus is 2"),
        (lambda: UpgradeValues(type="NewClusterWithIncrementalUpgrade"), "gateway_class"),
        (lambda: DeployValues.model_validate({"gateway": {"replicas": 9}}), "router.ray_cpus"),
        (lambda: DeployValues.model_validate({"upgrade": {"second_target": True}}), "target.max 1; .* target.min, 1"),
        (lambda: GcsValues(memory="1 GB"), "memory"),
        (lambda: DeployValues.model_validate({"gateway": {"http_port": 8080}}), "http_port is 8080"),
        (lambda: DeployValues.model_validate({"gateway": {"grpc_port": 12345}}), "grpc_port is 12345"),
        (
            lambda: RouterValues(cpu="1", memory="1Gi", ray_cpus=2, min=2, max=3, pods_that_stay=2),
            "pods_that_stay is 2",
        ),
        (lambda: PodValues(cpu="1", memory="1Gi", ray_cpus=1, shm="128Mi"), "shm is 128Mi"),
        (lambda: PodValues(cpu="1", memory="1Gi", ray_cpus=1, shm="1Gi"), "memory, 1Gi"),
        (lambda: DeployValues.model_validate({"observability": {"log_format": "jsonl"}}), "log_format"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(make, named):
    with pytest.raises(ValidationError, match=named):
        make()


def test_a_digest_counts_more_than_a_tag():
    digest = "sha256:" + "0" * 64
    values = DeployValues(image=ImageValues(repository="registry.example/paceline", tag="1", digest=digest))
    assert image(values) == f"registry.example/paceline@{digest}"


def test_a_quantity_is_multiplied_and_rounded_up():
    assert times("512Mi", 1.5) == "768Mi"
    assert times("1Mi", 1.1) == "2Mi"
    assert times("250m", 2) == "500m"


needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH")


def helm(*arguments):
    command = ["helm", "template", "release", K8S / "chart", "--namespace", "elsewhere", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_helm
@every_profile
def test_the_chart_makes_of_a_profile_what_its_values_say(name):
    done = helm("--set", f"profile={name}")
    assert done.returncode == 0, done.stderr
    made = {identity(each): each for each in yaml.safe_load_all(done.stdout) if each}
    values = PROFILES[name].model_copy(update={"namespace": "elsewhere"})
    assert made == {identity(each): each for each in profile_manifests(name, values)}


@needs_helm
def test_chosen_values_are_in_the_manifests_as_if_the_profile_had_them():
    done = helm("--set", "profile=prod-70b,draft.max=3,model.target=/models/8,target.kv_cache_tokens=4096,image.tag=v9")
    assert done.returncode == 0, done.stderr
    made = {identity(each): each for each in yaml.safe_load_all(done.stdout) if each}
    values = OVERLAYS["prod-70b"].model_dump()
    values["namespace"] = "elsewhere"
    values["draft"]["max"], values["model"]["target"] = 3, "/models/8"
    values["target"]["kv_cache_tokens"], values["image"]["tag"] = 4096, "v9"
    wanted = {identity(each): each for each in profile_manifests("prod-70b", DeployValues.model_validate(values))}
    for objects in (made, wanted):  # Helm writes texts in quotes
        spec = objects["RayService", "paceline"]["spec"]
        spec["serveConfigV2"] = yaml.safe_load(spec["serveConfigV2"])
    assert made == wanted


@needs_helm
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("draft.maximum=3", "maximum"),
        ("drafts.max=3", "drafts"),
        ("router.min=-1", "router.min"),
        ("profile=laptops", "profile"),
        ("profile=laptop,cache.secret=mine", "cache.secret cannot be chosen in profile laptop"),
    ],
)
def test_the_chart_refuses_values_by_name(setting, told):
    done = helm("--set", setting)
    assert done.returncode != 0
    assert told in done.stderr


def where_nothing_is_chosen(template):
    """What Helm makes of a template by the profile alone, as far as templates of ours go."""
    text = re.sub(r"^\{\{- if not .*\{\{ fail .*\n", "", template, flags=re.MULTILINE)
    text = re.sub(r"^\{\{- if not .*\n.*\n\{\{- end \}\}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\{\{- (if eq|end) .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\{\{ if not [^}]* \}\}\{\{ [^}]* \}\}\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", text)
    text = text.replace("{{ .Release.Namespace }}", "elsewhere")
    assert "{{" not in text
    return text


@every_profile
def test_a_template_of_the_chart_falls_back_on_its_profile(name):
    text = where_nothing_is_chosen(chart_files()[f"templates/{name}.yaml"])
    made = {identity(each): each for each in yaml.safe_load_all(text) if each}
    values = PROFILES[name].model_copy(update={"namespace": "elsewhere"})
    assert made == {identity(each): each for each in profile_manifests(name, values)}


def test_the_schema_of_the_chart_is_closed_and_has_the_limits_of_the_configuration():
    schema = json.loads(chart_files()["values.schema.json"])
    assert schema == values_model().model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(yaml.safe_load(chart_files()["values.yaml"]))
    assert validator.is_valid({"profile": "laptop", "draft": {"max": 3}})
    wrong = [{"drafts": {}}, {"draft": {"maximum": 3}}, {"draft": {"max": 4096}}, {"profile": "laptops"}]
    wrong += [{"draft": {"max": value}} for value in ("3", 1.5, True, [], -1)]
    wrong += [{"image": {"tag": value}} for value in (1.1, True, "a b", "x\ny", "v1 }}", "")]
    wrong += [{"image": {"repository": value}} for value in ("a b", "a\nb: c", "{{ x }}", "a:", "")]
    wrong += [{"network": {"host": "a b"}}, {"image": 3}, {"image": []}]
    for values in wrong:
        assert not validator.is_valid({"profile": "base"} | values), values
    assert not validator.is_valid({}), "Helm drops a profile that is null, and would install nothing"


def test_a_section_of_values_that_is_null_is_as_good_as_empty():
    """Helm removes it, and a template that looks into it fails; one that looks with brackets does not."""
    for name, text in chart_files().items():
        if name.startswith("templates/"):
            for line in text.splitlines():
                looked = re.findall(r"\{\{-? if ([^}]*)\}\}", line)
                assert not [one for one in looked if re.search(r"[^(]\.Values\.\w+\.", one)], line


def test_the_marks_of_the_chart_stand_for_themselves_alone():
    text = "".join(rendered_files().values())
    for mark in MARKS.values():
        assert str(mark) not in text


CONTAINERS = K8S / "containers"


def hashed(name):
    """Version by name, of a file for `pip --require-hashes`."""
    text = (CONTAINERS / name).read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=\S)", text.strip()) if not entry.startswith("#")]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    return dict(re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.+]+)", entry).groups() for entry in entries)


def test_images_hold_what_is_locked():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lock = {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (line.partition("==") for line in lines)
    }
    common, cpu, cuda = (hashed(f"requirements{kind}.txt") for kind in ("", "-cpu", "-cuda"))
    assert cpu == {"torch": f"{lock['torch']}+cpu"}
    assert cuda["torch"] == lock["torch"]
    assert not common.keys() & (cpu.keys() | cuda.keys())
    for name, version in common.items():
        if name in lock:
            assert version == lock[name], f"{name}: run `make image-lock`"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {Requirement(line).name.lower() for line in project["dependencies"]} | {"hatchling"}
    assert wanted - {"torch"} <= common.keys(), "run `make image-lock`"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_images_run_as_the_user_of_the_manifests_and_take_nothing_along(kind):
    text = (CONTAINERS / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    user = DeployValues().security.user
    assert f"USER {user}:{user}" in text
    assert text.count("\nFROM ") == 2
    assert "apt-get" not in text.rpartition("\nFROM ")[2]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE):
        for path in source.split():
            assert (ROOT / path).exists()
            assert any(path.startswith(line[1:]) for line in ignored if line.startswith("!")), path


@pytest.mark.parametrize("command", ["hadolint Dockerfile.cpu Dockerfile.cuda", "shellcheck install.sh"])
def test_container_files_are_clean(command):
    done = subprocess.run(
        command.split(), cwd=CONTAINERS, env=os.environ | {"PATH": TOOLS}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_script_of_the_images_says_how_it_is_called():
    done = subprocess.run(["sh", INSTALL], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[2] == "  install.sh PREFIX SOURCE REQUIREMENTS..."


def test_the_script_of_the_images_refuses_a_package_with_another_hash(tmp_path):
    """All the rest of it takes minutes and an index: tests/images/install_and_serve.py."""
    wheel = tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    good = hashlib.sha256(wheel.read_bytes()).hexdigest()
    bad = "0" * 64
    (tmp_path / "requirements.txt").write_text(f"tiny==1.0 --hash=sha256:{bad}\n", encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_ARGS": f"--no-index --find-links {wheel.parent}",
    }
    command = ["sh", INSTALL, tmp_path / "prefix", ROOT, tmp_path / "requirements.txt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(f"Expected sha256 {bad}\\s+Got +{good}", done.stderr)
    assert not list(tmp_path.rglob("tiny.py"))
