"""k8s/clouds.md: its values are taken by the chart, and agree with the clusters that it has made."""

import re
from pathlib import Path

import pytest
import yaml

from cluster.deploy.validate.check import validate
from paceline_testing.chart import identity, merged, objects, profile_objects, profile_values

K8S = Path(__file__).resolve().parents[4] / "k8s"
PAGE = (K8S / "clouds.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {text.split()[1].rstrip(";"): text for kind, text in BLOCKS if kind == "yaml"}
SHELL = "".join(text for kind, text in BLOCKS if kind == "sh").replace("\\\n", "")

both_clouds = pytest.mark.parametrize("cloud", ["gke", "eks"])


def made_for(cloud):
    """What the chart makes with prod-70b's values and the page's, and the page's own objects, by kind and name."""
    values = merged(profile_values("prod-70b"), yaml.safe_load(FILES[f"values-{cloud}.yaml"]))
    made = objects(values) + list(yaml.safe_load_all(FILES[f"load-balancer-{cloud}.yaml"]))
    return {identity(each): each for each in made}


def groups_of(made):
    service = made["RayService", "paceline"]["spec"]
    return {group["groupName"]: group["template"]["spec"] for group in service["rayClusterConfig"]["workerGroupSpecs"]}


def test_no_file_is_left_unchecked():
    names = {f"{kind}-{cloud}.yaml" for cloud in ("gke", "eks") for kind in ("values", "load-balancer")}
    assert FILES.keys() == names | {"cluster.yaml"}
    assert len(FILES) == sum(kind == "yaml" for kind, _ in BLOCKS)


@both_clouds
def test_values_change_node_selectors_and_gateways_alone_and_all_is_valid(cloud, tmp_path):
    before, after = {identity(each): each for each in profile_objects("prod-70b")}, made_for(cloud)
    (tmp_path / "all.yaml").write_text(yaml.dump_all(after.values(), Dumper=yaml.CSafeDumper))
    assert validate([tmp_path]).findings == []
    assert {key for key in before if before[key] != after[key]} == {("RayService", "paceline"), ("Gateway", "paceline")}
    groups = groups_of(after)
    assert groups["router"] == groups_of(before)["router"]
    assert groups["target"]["nodeSelector"] != groups["draft"]["nodeSelector"]
    upgrade = after["RayService", "paceline"]["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert upgrade["gatewayClassName"] != before["Gateway", "paceline"]["spec"]["gatewayClassName"]
    added = {each["metadata"].get("namespace", "paceline") for key, each in after.items() if key not in before}
    assert added == {"paceline"}


@both_clouds
def test_the_load_balancer_reaches_what_it_asks_and_waits_as_long_as_a_stream(cloud):
    made = made_for(cloud)
    service = made["Service", "paceline"]["spec"]
    policy = made["NetworkPolicy", "paceline-load-balancer"]["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    ports = {port["port"] for port in service["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    route = made["HTTPRoute", "paceline"]["spec"]["rules"][0]
    timeout_s = int(route["timeouts"]["request"].removesuffix("s"))
    router = groups_of(made)["router"]["containers"][0]
    if cloud == "gke":
        check = made["HealthCheckPolicy", "paceline"]["spec"]
        asked = check["default"]["config"]["httpHealthCheck"]
        assert router["readinessProbe"]["httpGet"] == {"path": asked["requestPath"], "port": asked["port"]}
        limits = made["GCPBackendPolicy", "paceline"]["spec"]
        assert limits["default"]["timeoutSec"] == timeout_s
        assert check["targetRef"]["name"] == limits["targetRef"]["name"] == "paceline"
        (proxies,) = re.findall(r"REGIONAL_MANAGED_PROXY .*--range=(\S+)", SHELL)
        assert proxies in {peer["ipBlock"]["cidr"] for peer in policy["ingress"][0]["from"]}
        return
    targets = made["TargetGroupConfiguration", "paceline"]["spec"]
    assert targets["targetReference"]["name"] == "paceline"
    asked = targets["defaultConfiguration"]["healthCheckConfig"]["healthCheckPath"]
    assert asked == router["readinessProbe"]["httpGet"]["path"]
    (attribute,) = made["LoadBalancerConfiguration", "public"]["spec"]["loadBalancerAttributes"]
    assert attribute["value"] == str(timeout_s)
    gateway = made["Gateway", "paceline"]["spec"]
    named = gateway["infrastructure"]["parametersRef"]
    assert (named["kind"], named["name"]) in made
    named = made["GatewayClass", gateway["gatewayClassName"]]["spec"]["parametersRef"]
    default = made[named["kind"], named["name"]]["spec"]["defaultTargetGroupConfiguration"]["name"]
    assert ("TargetGroupConfiguration", default) in made
    assert "scheme" not in made[named["kind"], named["name"]]["spec"], "KubeRay's own stays internal"


def gpus_of(spec):
    return spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_pools_of_gke_have_the_gpus_that_pods_select():
    pools = dict(re.findall(r"node-pools create (\w+) .*?--accelerator=(\S+)", SHELL))
    groups = groups_of(made_for("gke"))
    for name in ("target", "draft"):
        given = dict(part.split("=") for part in pools[name].split(","))
        assert groups[name]["nodeSelector"] == {"cloud.google.com/gke-accelerator": given["type"]}
        assert given["count"] == gpus_of(groups[name])


def test_node_groups_of_eks_are_those_that_pods_select_and_tolerate():
    pools = {pool["name"]: pool for pool in yaml.safe_load(FILES["cluster.yaml"])["managedNodeGroups"]}
    groups = groups_of(made_for("eks"))
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
    default = yaml.safe_load((K8S / "chart" / "values.yaml").read_bytes())
    assert re.search(command + r" --namespace (\S+)", SHELL)[2] == default["networkPolicy"]["operator"]


def test_links_between_the_pages_lead_somewhere():
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    assert "](clouds.md)" in readme
    for name, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!http)([^)]+)\)", PAGE)):
        text = (K8S / name).read_text(encoding="utf-8")
        assert anchor in {head.lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
