"""One mistake each, made in a manifest that is right, and the rule that must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline_testing import manifests as right

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    rule: str
    base: Callable[[], Manifest]
    edit: Callable[[Manifest], object]

    def make(self) -> Manifest:
        manifest = self.base()
        self.edit(manifest)
        return manifest


def _pod(manifest: Manifest) -> Manifest:
    """The spec of the pods of a workload, or of the first worker group of a Ray cluster."""
    spec = manifest["spec"]
    if "rayClusterConfig" in spec:
        return spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    return spec["template"]["spec"]


def _container(manifest: Manifest) -> Manifest:
    return _pod(manifest)["containers"][0]


def _ray(manifest: Manifest) -> Manifest:
    spec = manifest["spec"]
    return spec.get("rayClusterConfig", spec)


def _worker(manifest: Manifest, index: int = 0) -> Manifest:
    return _ray(manifest)["workerGroupSpecs"][index]


def _head(manifest: Manifest) -> Manifest:
    return _ray(manifest)["headGroupSpec"]


def _head_env(name: str) -> Callable[[Manifest], object]:
    def edit(manifest: Manifest) -> None:
        _head(manifest)["template"]["spec"]["containers"][0]["env"].append({"name": name, "value": "redis:6379"})

    return edit


def _set(*keys: str | int, to: Any) -> Callable[[Manifest], object]:
    def edit(manifest: Manifest) -> None:
        value: Any = manifest
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return edit


def _in(part: Callable[[Manifest], Any], *keys: str | int, to: Any) -> Callable[[Manifest], object]:
    return lambda manifest: _set(*keys, to=to)(part(manifest))


def _text(old: str, new: str) -> Callable[[Manifest], object]:
    """In the text of serveConfigV2."""

    def edit(manifest: Manifest) -> None:
        assert old in manifest["spec"]["serveConfigV2"]
        manifest["spec"]["serveConfigV2"] = manifest["spec"]["serveConfigV2"].replace(old, new, 1)

    return edit


def _upgrade(**options: Any) -> Callable[[Manifest], object]:
    return lambda manifest: manifest["spec"]["upgradeStrategy"]["clusterUpgradeOptions"].update(options)


def _both_zero(manifest: Manifest) -> None:
    manifest["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 0}


_SERVICE, _CLUSTER = right.ray_service, right.ray_cluster
_POLICY, _SCALER, _BUDGET = right.network_policy, right.autoscaler, right.disruption_budget
_CIDR = ("spec", "ingress", 0, "from", 1, "ipBlock")

MISTAKES = (
    # What schemas see.
    Mistake("replica for replicas", "schema-unknown-field", right.deployment, _set("spec", "replica", to=3)),
    Mistake("text for a number", "schema-type", right.deployment, _set("spec", "replicas", to="three")),
    Mistake("no selector", "schema-missing", right.deployment, lambda m: m["spec"].pop("selector")),
    Mistake("typo in a pod", "schema-unknown-field", right.deployment, _in(_container, "imagePullPolcy", to="Always")),
    Mistake("typo in a Ray cluster", "schema-unknown-field", _SERVICE, _in(_ray, "enableInTreeAutoscalling", to=True)),
    Mistake("typo in a Ray pod", "schema-unknown-field", _SERVICE, _in(_container, "resource", to={})),
    Mistake("number as a start parameter", "schema-type", _SERVICE, _in(_head, "rayStartParams", "num-cpus", to=0)),
    Mistake("no rayClusterConfig", "schema-missing", _SERVICE, lambda m: m["spec"].pop("rayClusterConfig")),
    Mistake("removed apiVersion", "api-removed", _BUDGET, _set("apiVersion", to="policy/v1beta1")),
    Mistake("kind that is not there", "api-unknown", right.deployment, _set("kind", to="Deploymnet")),
    # Pods of workloads.
    Mistake(
        "selector misses its template",
        "selector-template",
        right.deployment,
        _set("spec", "selector", "matchLabels", "tier", to="back"),
    ),
    Mistake(
        "label value with a blank", "label-syntax", right.deployment, _set("metadata", "labels", "tier", to="front end")
    ),
    Mistake("label key of 64 letters", "label-syntax", right.service, _set("metadata", "labels", to={"a" * 64: "x"})),
    Mistake(
        "annotation key with a blank",
        "annotation-syntax",
        right.deployment,
        _set("metadata", "annotations", "my owner", to="x"),
    ),
    Mistake("name in capitals", "object-name", right.deployment, _set("metadata", "name", to="Web")),
    Mistake("port 70000", "port-range", right.deployment, _in(_container, "ports", 0, "containerPort", to=70000)),
    Mistake(
        "port name of 16 letters",
        "port-name",
        right.deployment,
        _in(_container, "ports", 1, "name", to="prometheusexport"),
    ),
    Mistake(
        "two ports of a name", "port-name-unique", right.deployment, _in(_container, "ports", 1, "name", to="http")
    ),
    Mistake(
        "request over limit",
        "resource-limit",
        right.deployment,
        _in(_container, "resources", "requests", "memory", to="2Gi"),
    ),
    Mistake(
        "half a GPU",
        "resource-whole",
        right.deployment,
        _in(_container, "resources", "limits", "nvidia.com/gpu", to="0.5"),
    ),
    Mistake(
        "GPU request without limit",
        "resource-device-limit",
        right.deployment,
        _in(_container, "resources", "requests", "nvidia.com/gpu", to=1),
    ),
    Mistake(
        "16 GB as a quantity", "quantity", right.deployment, _in(_container, "resources", "limits", "memory", to="16GB")
    ),
    Mistake(
        "gpu for nvidia.com/gpu", "resource-name", right.deployment, _in(_container, "resources", "limits", "gpu", to=1)
    ),
    Mistake(
        "two containers of a name",
        "container-name-unique",
        right.deployment,
        _in(_pod, "initContainers", 0, "name", to="web"),
    ),
    Mistake("container name with _", "container-name", right.deployment, _in(_container, "name", to="web_server")),
    Mistake("no image", "container-image", right.deployment, lambda m: _container(m).pop("image")),
    Mistake(
        "mount without volume", "mount-volume", right.deployment, _in(_container, "volumeMounts", 1, "name", to="model")
    ),
    Mistake(
        "two volumes at one place",
        "mount-path",
        right.deployment,
        _in(_container, "volumeMounts", 1, "mountPath", to="/tmp"),
    ),
    Mistake(
        "volume with two sources",
        "volume-source",
        right.deployment,
        _in(_pod, "volumes", 0, "hostPath", to={"path": "/tmp"}),
    ),
    Mistake(
        "two volumes of a name",
        "volume-name",
        right.stateful_set,
        lambda m: _pod(m)["volumes"].append({"name": "tmp", "emptyDir": {}}),
    ),
    Mistake(
        "probe with two handlers",
        "probe-handler",
        right.deployment,
        _in(_container, "readinessProbe", "exec", to={"command": ["true"]}),
    ),
    Mistake(
        "probe without handler", "probe-handler", right.deployment, lambda m: _container(m)["startupProbe"].pop("grpc")
    ),
    Mistake(
        "probe of a port that is not",
        "probe-port",
        right.deployment,
        _in(_container, "readinessProbe", "httpGet", "port", to="https"),
    ),
    Mistake(
        "two successes of liveness",
        "probe-times",
        right.deployment,
        _in(_container, "livenessProbe", "successThreshold", to=2),
    ),
    Mistake(
        "pull policy in small letters", "enum", right.deployment, _in(_container, "imagePullPolicy", to="ifNotPresent")
    ),
    Mistake("operator Exist", "enum", right.deployment, _in(_pod, "tolerations", 0, "operator", to="Exist")),
    Mistake(
        "toleration Exists with a value", "toleration", right.deployment, _in(_pod, "tolerations", 0, "value", to="yes")
    ),
    Mistake(
        "whenUnsatisfiable Never",
        "enum",
        right.deployment,
        _in(_pod, "topologySpreadConstraints", 0, "whenUnsatisfiable", to="Never"),
    ),
    Mistake(
        "affinity weight 1000",
        "topology",
        right.deployment,
        _in(
            _pod, "affinity", "podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution", 0, "weight", to=1000
        ),
    ),
    Mistake(
        "In without values",
        "selector-syntax",
        right.deployment,
        _in(
            _pod,
            "topologySpreadConstraints",
            0,
            "labelSelector",
            "matchExpressions",
            to=[{"key": "a", "operator": "In"}],
        ),
    ),
    Mistake(
        "preStop beyond the grace period",
        "grace-period",
        right.deployment,
        _in(_container, "lifecycle", "preStop", "sleep", "seconds", to=90),
    ),
    Mistake(
        "root that must not be root",
        "security-context",
        right.deployment,
        _in(_container, "securityContext", "runAsUser", to=0),
    ),
    Mistake("value and valueFrom", "env-source", right.deployment, _in(_container, "env", 1, "value", to="x")),
    Mistake(
        "restartPolicy Never in a Deployment",
        "pod-restart-policy",
        right.deployment,
        _in(_pod, "restartPolicy", to="Never"),
    ),
    Mistake("restartPolicy Always in a Job", "pod-restart-policy", right.job, _in(_pod, "restartPolicy", to="Always")),
    Mistake("no step possible", "strategy", right.deployment, _both_zero),
    # Other kinds.
    Mistake(
        "two ports, one without name", "port-name-required", right.service, lambda m: m["spec"]["ports"][1].pop("name")
    ),
    Mistake("service port 0", "port-range", right.service, _set("spec", "ports", 0, "port", to=0)),
    Mistake("service type LoadBalance", "enum", right.service, _set("spec", "type", to="LoadBalance")),
    Mistake("node port of a ClusterIP", "service-type", right.service, _set("spec", "ports", 0, "nodePort", to=30080)),
    Mistake("service name that starts with a digit", "object-name", right.service, _set("metadata", "name", to="7web")),
    Mistake("minAvailable and maxUnavailable", "pdb-one", _BUDGET, _set("spec", "minAvailable", to=1)),
    Mistake("budget of 125%", "pdb-value", _BUDGET, _set("spec", "maxUnavailable", to="125%")),
    Mistake("minReplicas over maxReplicas", "hpa-range", _SCALER, _set("spec", "minReplicas", to=9)),
    Mistake(
        "metric target Utilisation",
        "enum",
        _SCALER,
        _set("spec", "metrics", 0, "resource", "target", "type", to="Utilisation"),
    ),
    Mistake(
        "target without its value",
        "hpa-metric",
        _SCALER,
        _set("spec", "metrics", 0, "resource", "target", to={"type": "AverageValue"}),
    ),
    Mistake("policyTypes ingress", "enum", _POLICY, _set("spec", "policyTypes", 0, to="ingress")),
    Mistake("address without its length", "cidr", _POLICY, _set(*_CIDR, "cidr", to="10.0.0.0")),
    Mistake("exception outside its range", "cidr", _POLICY, _set(*_CIDR, "except", 0, to="192.168.0.0/16")),
    Mistake(
        "range of ports that ends first",
        "port-range",
        _POLICY,
        _set("spec", "ingress", 0, "ports", 1, "endPort", to=8000),
    ),
    Mistake("egress denied, DNS too", "network-dns", right.deny_all, lambda m: None),
    Mistake("secret that is not base64", "secret-base64", right.secret, _set("data", "token", to="plain text!")),
    Mistake("schedule with hour 25", "cron-schedule", right.cron_job, _set("spec", "schedule", to="0 25 * * *")),
    Mistake("claim without access mode", "volume-claim", right.volume_claim, lambda m: m["spec"].pop("accessModes")),
    Mistake("path without /", "ingress", right.ingress, _set("spec", "rules", 0, "http", "paths", 0, "path", to="v1")),
    # The same in a Ray group, where no API server looks.
    Mistake(
        "Ray pod: mount without volume", "mount-volume", _SERVICE, _in(_container, "volumeMounts", 0, "name", to="sm")
    ),
    Mistake(
        "Ray pod: request over limit",
        "resource-limit",
        _SERVICE,
        _in(_container, "resources", "requests", "cpu", to="16"),
    ),
    Mistake("Ray pod: operator Exist", "enum", _SERVICE, _in(_pod, "tolerations", 0, "operator", to="Exist")),
    Mistake("Ray pod: quantity 8 GB", "quantity", _SERVICE, _in(_pod, "volumes", 0, "emptyDir", "sizeLimit", to="8GB")),
    Mistake(
        "Ray pod: label value with /",
        "label-syntax",
        _SERVICE,
        _in(_worker, "template", "metadata", "labels", "paceline/role", to="a/b"),
    ),
    # KubeRay's operator.
    Mistake("RayService name of 48 letters", "ray-name", _SERVICE, _set("metadata", "name", to="p" * 48)),
    Mistake("RayCluster name of 54 letters", "ray-name", _CLUSTER, _set("metadata", "name", to="p" * 54)),
    Mistake("RayCluster name with a dot", "ray-name", _CLUSTER, _set("metadata", "name", to="bench.one")),
    Mistake("minReplicas over maxReplicas of a group", "ray-replicas", _SERVICE, _in(_worker, "minReplicas", to=3)),
    Mistake("replicas below 0", "ray-replicas", _CLUSTER, _in(_worker, "replicas", to=-1)),
    Mistake("two groups of a name", "ray-group-name", _SERVICE, _in(_worker, "groupName", to="draft")),
    Mistake("resources twice", "ray-resources-twice", _SERVICE, _in(_head, "resources", to={"CPU": "0"})),
    Mistake("labels as a start parameter", "ray-labels", _SERVICE, _in(_worker, "rayStartParams", "labels", to="a=b")),
    Mistake(
        "redis-password as a parameter", "ray-gcs", _SERVICE, _in(_head, "rayStartParams", "redis-password", to="x")
    ),
    Mistake("REDIS_PASSWORD beside the options", "ray-gcs", _SERVICE, _head_env("REDIS_PASSWORD")),
    Mistake("RAY_REDIS_ADDRESS beside the options", "ray-gcs", _SERVICE, _head_env("RAY_REDIS_ADDRESS")),
    Mistake("RAY_REDIS_ADDRESS alone", "ray-gcs", _CLUSTER, _head_env("RAY_REDIS_ADDRESS")),
    Mistake(
        "legacy annotation beside the options",
        "ray-gcs",
        _SERVICE,
        _set("metadata", "annotations", to={"ray.io/ft-enabled": "true"}),
    ),
    Mistake(
        "storage without rocksdb",
        "ray-gcs-backend",
        _SERVICE,
        _in(_ray, "gcsFaultToleranceOptions", "storage", to={"size": "1Gi"}),
    ),
    Mistake(
        "restartPolicy Always under autoscaler v2",
        "ray-autoscaler-v2",
        _SERVICE,
        _in(_pod, "restartPolicy", to="Always"),
    ),
    Mistake(
        "priority without autoscaler v2",
        "ray-autoscaler-v2",
        _SERVICE,
        _in(_ray, "autoscalerOptions", to={"version": "v1"}),
    ),
    Mistake(
        "priority with an old Ray",
        "ray-version",
        right.fixed_ray_cluster,
        lambda m: m["spec"].update(
            enableInTreeAutoscaling=True,
            autoscalerOptions={"version": "v2"},
            rayVersion="2.52.0",
            workerGroupSpecs=[
                {"groupName": "a", "maxReplicas": 1, "priority": 1, "template": right.ray_group(image="x:1")}
            ],
        ),
    ),
    Mistake(
        "token without rayVersion",
        "ray-version",
        right.fixed_ray_cluster,
        _in(_ray, "authOptions", to={"mode": "token"}),
    ),
    Mistake(
        "tokens of Kubernetes in a RayService",
        "ray-service-auth",
        _SERVICE,
        _in(_ray, "authOptions", "enableK8sTokenAuth", to=True),
    ),
    Mistake(
        "incremental upgrade without autoscaler",
        "ray-upgrade",
        right.small_ray_service,
        _set(
            "spec",
            "upgradeStrategy",
            to={
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {"stepSizePercent": 5, "intervalSeconds": 10, "gatewayClassName": "istio"},
            },
        ),
    ),
    Mistake("steps over the surge", "ray-upgrade", _SERVICE, _upgrade(stepSizePercent=50)),
    Mistake("interval 0", "ray-upgrade", _SERVICE, _upgrade(intervalSeconds=0)),
    Mistake("gatewayClassName empty", "ray-upgrade", _SERVICE, _upgrade(gatewayClassName="")),
    Mistake(
        "upgrade type NewClutser",
        "ray-upgrade-type",
        _SERVICE,
        _set("spec", "upgradeStrategy", to={"type": "NewClutser"}),
    ),
    Mistake(
        "head service with a name",
        "ray-head-service",
        _SERVICE,
        _in(_head, "headService", to={"metadata": {"name": "head"}}),
    ),
    Mistake("suspended group under the autoscaler", "ray-suspend", _SERVICE, _in(_worker, "suspend", to=True)),
    Mistake("TLS behind its gate", "ray-alpha-gate", _SERVICE, _in(_ray, "tlsOptions", to={"enabled": True})),
    Mistake(
        "redis-username as a parameter", "ray-gcs", _CLUSTER, _in(_head, "rayStartParams", "redis-username", to="x")
    ),
    Mistake("REDIS_USERNAME in the head", "ray-gcs", _SERVICE, _head_env("REDIS_USERNAME")),
    Mistake(
        "namespace of the storage as an annotation",
        "ray-gcs",
        _SERVICE,
        _set("metadata", "annotations", to={"ray.io/external-storage-namespace": "mine"}),
    ),
    Mistake(
        "Redis without an address",
        "ray-gcs-backend",
        _SERVICE,
        _in(_ray, "gcsFaultToleranceOptions", to={"backend": "redis"}),
    ),
    Mistake(
        "rocksdb behind its gate",
        "ray-alpha-gate",
        _SERVICE,
        _in(_ray, "gcsFaultToleranceOptions", to={"backend": "rocksdb", "storage": {"size": "1Gi"}}),
    ),
    Mistake(
        "history server behind its gate",
        "ray-alpha-gate",
        _SERVICE,
        _in(_ray, "historyServerOptions", to={"collectorOptions": {"image": "collector:1"}}),
    ),
    Mistake(
        "network policy behind its gate",
        "ray-alpha-gate",
        _SERVICE,
        _in(_ray, "networkPolicy", to={"mode": "DenyAllIngress"}),
    ),
    Mistake(
        "idle time of a group without autoscaler v2",
        "ray-autoscaler-v2",
        right.fixed_ray_cluster,
        _in(_worker, "idleTimeoutSeconds", to=60),
    ),
    Mistake(
        "token with an old Ray",
        "ray-version",
        right.fixed_ray_cluster,
        lambda m: (
            _ray(m).update(rayVersion="2.51.0", authOptions={"mode": "token"}),
            _worker(m).update(template=right.ray_group(image="x:1")),
        ),
    ),
    Mistake("mode of tokens misspelt", "schema-value", _SERVICE, _in(_ray, "authOptions", "mode", to="tokens")),
    Mistake("surge of 150 %", "ray-upgrade", _SERVICE, _upgrade(maxSurgePercent=150)),
    Mistake("label of a group with a blank", "label-syntax", _SERVICE, _in(_worker, "labels", to={"pool": "a b"})),
    Mistake(
        "image of another Ray",
        "ray-image-version",
        _SERVICE,
        _in(_container, "image", to="rayproject/ray:2.52.0-py311"),
    ),
    Mistake(
        "half a CPU as a start parameter",
        "ray-start-number",
        _SERVICE,
        _in(_worker, "rayStartParams", "num-cpus", to="0.5"),
    ),
    Mistake("nightly at 25 o'clock", "cron-schedule", right.ray_cron_job, _set("spec", "schedule", to="0 25 * * *")),
    Mistake(
        "nightly cluster that is kept",
        "ray-job",
        right.ray_cron_job,
        _set("spec", "jobTemplate", "shutdownAfterJobFinishes", to=False),
    ),
    Mistake("job without time", "ray-job", right.ray_job, _set("spec", "activeDeadlineSeconds", to=0)),
    Mistake(
        "interactive job that tries again",
        "ray-job",
        right.ray_job,
        lambda m: m["spec"].update(submissionMode="InteractiveMode", backoffLimit=2),
    ),
    Mistake(
        "suspended job on a cluster that is there",
        "ray-job",
        right.ray_job,
        lambda m: m["spec"].update(suspend=True, clusterSelector={"ray.io/cluster": "bench"}),
    ),
    Mistake(
        "autoscaler v2 by a variable, without an autoscaler",
        "ray-autoscaler-v2",
        right.fixed_ray_cluster,
        lambda m: _head(m)["template"]["spec"]["containers"][0]["env"].append(
            {"name": "RAY_enable_autoscaler_v2", "value": "1"}
        ),
    ),
    # serveConfigV2, a text.
    Mistake("text that is no YAML", "serve-yaml", _SERVICE, _text("route_prefix: /", "route_prefix: [/")),
    Mistake("autoscalng_config", "serve-unknown-key", _SERVICE, _text("autoscaling_config", "autoscalng_config")),
    Mistake("http_option", "serve-unknown-key", _SERVICE, _text("http_options", "http_option")),
    Mistake("max_replica", "serve-unknown-key", _SERVICE, _text("max_replicas", "max_replica")),
    Mistake("num_cpu", "serve-unknown-key", _SERVICE, _text("num_cpus: 1", "num_cpu: 1")),
    Mistake("min_replicas over max_replicas", "serve-schema", _SERVICE, _text("min_replicas: 1", "min_replicas: 9")),
    Mistake(
        "number as a variable",
        "serve-schema",
        _SERVICE,
        _text("num_cpus: 1", "num_cpus: 1\n          runtime_env: {env_vars: {OMP_NUM_THREADS: 1}}"),
    ),
    Mistake("route without /", "serve-schema", _SERVICE, _text("route_prefix: /", "route_prefix: v1")),
    Mistake(
        "module that is not",
        "serve-import",
        _SERVICE,
        _text("grpc_health.v1.health_pb2_grpc", "grpc_health.v1.health_grpc"),
    ),
    Mistake("name that is not", "serve-import", _SERVICE, _text("cluster.app:build", "cluster.serve:application")),
    Mistake(
        "policy that is not",
        "serve-import",
        _SERVICE,
        _text(
            "      target_ongoing_requests: 2",
            "      target_ongoing_requests: 2\n"
            "          policy: {policy_function: 'actors.workers.autoscaling:DraftPolicies'}",
        ),
    ),
    Mistake(
        "request router that is not",
        "serve-import",
        _SERVICE,
        _text(
            "max_ongoing_requests: 1000",
            "max_ongoing_requests: 1000\n"
            "        request_router_config: {request_router_class: 'ray.serve.request_router:Nearest'}",
        ),
    ),
    Mistake(
        "no replicas of the only group",
        "group-resources",
        right.small_ray_service,
        lambda m: (_head(m)["rayStartParams"].update({"num-cpus": "0"}), _worker(m).pop("replicas")),
    ),
    Mistake("argument tensor_paralel", "config-unknown-key", _SERVICE, _text("tensor_parallel", "tensor_paralel")),
    Mistake("argument out of its limits", "config-value", _SERVICE, _text("max_running: 64", "max_running: 0")),
    Mistake("override of no deployment", "serve-deployment", _SERVICE, _text("name: Router", "name: Routers")),
    Mistake("more ranks than GPUs", "group-resources", _SERVICE, _text("tensor_parallel: 8", "tensor_parallel: 64")),
    Mistake("no GPU for a replica", "group-resources", _SERVICE, _text("      num_cpus: 1", "      num_gpus: 16")),
    Mistake(
        "no node of the target group",
        "group-resources",
        _SERVICE,
        lambda m: _worker(m, 1).update(minReplicas=0, replicas=0, maxReplicas=0),
    ),
)
