"""k8s/clouds.md: its overlays build on the manifests as they are, and agree with the clusters that it has made."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.deploy.manifests import identity
from cluster.deploy.profiles import OVERLAYS
from cluster.deploy.validate.check import validate

K8S = Path(__file__).resolve().parents[4] / "k8s"
PAGE = (K8S / "clouds.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {text.split()[1].rstrip(";"): text for kind, text in BLOCKS if kind == "yaml"}
SHELL = "".join(text for kind, text in BLOCKS if kind == "sh").replace("\\\n", "")
PROD = OVERLAYS["prod-70b"]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
both_clouds = pytest.mark.parametrize("cloud", ["gke", "eks"])


def test_no_file_is_left_unchecked():
    names = {
        f"k8s/overlays/{cloud}/{name}.yaml" for cloud in ("gke", "eks") for name in ("kustomization", "load-balancer")
    }
    assert FILES.keys() == names | {"cluster.yaml"}
    assert len(FILES) == sum(kind == "yaml" for kind, _ in BLOCKS)


@pytest.fixture(scope="module")
def overlays(tmp_path_factory):
    """The directory of overlays with those of the page among them."""
    folder = tmp_path_factory.mktemp("k8s")
    for name in ("base", "components", "overlays"):
        shutil.copytree(K8S / name, folder / name)
    for path, text in FILES.items():
        if path.startswith("k8s/"):
            file = folder / path.removeprefix("k8s/")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return folder / "overlays"


def built(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {identity(each): each for each in yaml.safe_load_all(done.stdout)}


def groups_of(objects):
    service = objects["RayService", "paceline"]["spec"]
    return {group["groupName"]: group["template"]["spec"] for group in service["rayClusterConfig"]["workerGroupSpecs"]}


@needs_kubectl
@both_clouds
def test_an_overlay_changes_node_selectors_and_gateways_alone_and_is_valid(overlays, cloud):
    assert validate([overlays / cloud]).findings == []
    before, after = built(overlays / "prod-70b"), built(overlays / cloud)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("RayService", "paceline"), ("Gateway", "paceline")}
    groups = groups_of(after)
    assert groups["router"] == groups_of(before)["router"]
    assert groups["target"]["nodeSelector"] != groups["draft"]["nodeSelector"]
    upgrade = after["RayService", "paceline"]["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert upgrade["gatewayClassName"] != before["Gateway", "paceline"]["spec"]["gatewayClassName"]
    added = {each["metadata"].get("namespace", "paceline") for key, each in after.items() if key not in before}
    assert added == {PROD.namespace}


@needs_kubectl
@both_clouds
def test_the_load_balancer_reaches_what_it_asks_and_waits_as_long_as_a_stream(overlays, cloud):
    objects = built(overlays / cloud)
    service = objects["Service", "paceline"]["spec"]
    ports = {PROD.gateway.http_port, PROD.gateway.grpc_port}
    policy = objects["NetworkPolicy", "paceline-load-balancer"]["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    timeout_s = PROD.gateway.request_timeout_s
    router = groups_of(objects)["router"]["containers"][0]
    if cloud == "gke":
        check = objects["HealthCheckPolicy", "paceline"]["spec"]
        asked = check["default"]["config"]["httpHealthCheck"]
        assert router["readinessProbe"]["httpGet"] == {"path": asked["requestPath"], "port": asked["port"]}
        limits = objects["GCPBackendPolicy", "paceline"]["spec"]
        assert limits["default"]["timeoutSec"] == timeout_s
        assert check["targetRef"]["name"] == limits["targetRef"]["name"] == "paceline"
        (proxies,) = re.findall(r"REGIONAL_MANAGED_PROXY .*--range=(\S+)", SHELL)
        assert proxies in {peer["ipBlock"]["cidr"] for peer in policy["ingress"][0]["from"]}
        return
    targets = objects["TargetGroupConfiguration", "paceline"]["spec"]
    assert targets["targetReference"]["name"] == "paceline"
    asked = targets["defaultConfiguration"]["healthCheckConfig"]["healthCheckPath"]
    assert asked == router["readinessProbe"]["httpGet"]["path"]
    (attribute,) = objects["LoadBalancerConfiguration", "public"]["spec"]["loadBalancerAttributes"]
    assert attribute["value"] == str(timeout_s)
    gateway = objects["Gateway", "paceline"]["spec"]
    named = gateway["infrastructure"]["parametersRef"]
    assert (named["kind"], named["name"]) in objects
    named = objects["GatewayClass", gateway["gatewayClassName"]]["spec"]["parametersRef"]
    default = objects[named["kind"], named["name"]]["spec"]["defaultTargetGroupConfiguration"]["name"]
    assert ("TargetGroupConfiguration", default) in objects
    assert "scheme" not in objects[named["kind"], named["name"]]["spec"], "KubeRay's own stays internal"


@needs_kubectl
def test_pools_of_gke_have_the_gpus_that_pods_select(overlays):
    pools = dict(re.findall(r"node-pools create (\w+) .*?--accelerator=(\S+)", SHELL))
    groups = groups_of(built(overlays / "gke"))
    for name, values in (("target", PROD.target), ("draft", PROD.draft)):
        given = dict(part.split("=") for part in pools[name].split(","))
        assert groups[name]["nodeSelector"] == {"cloud.google.com/gke-accelerator": given["type"]}
        assert int(given["count"]) == values.gpus


@needs_kubectl
def test_node_groups_of_eks_are_those_that_pods_select_and_tolerate(overlays):
    pools = {pool["name"]: pool for pool in yaml.safe_load(FILES["cluster.yaml"])["managedNodeGroups"]}
    groups = groups_of(built(overlays / "eks"))
    assert "taints" not in pools["cpu"]
    for name in ("target", "draft"):
        assert groups[name]["nodeSelector"] == {"node.kubernetes.io/instance-type": pools[name]["instanceType"]}
        (taint,) = pools[name]["taints"]
        wanted = {"key": taint["key"], "operator": "Exists", "effect": taint["effect"]}
        assert groups[name]["tolerations"] == [wanted]
        assert pools[name]["propagateASGTags"], "or there is no first node"


def test_the_operator_is_installed_where_the_policies_expect_it_in_the_version_of_the_quick_start():
    command = r"helm install kuberay-operator kuberay/kuberay-operator --version (\S+)"
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    assert re.findall(command, SHELL) == re.findall(command, readme)
    assert re.search(command + r" --namespace (\S+)", SHELL)[2] == PROD.network.operator


def test_links_between_the_pages_lead_somewhere():
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    assert "](clouds.md)" in readme
    for name, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!http)([^)]+)\)", PAGE)):
        text = (K8S / name).read_text(encoding="utf-8")
        assert anchor in {head.lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
