"""Mistakes, each made in a manifest that is right, with the rule that must find it."""

from dataclasses import dataclass
from typing import Any

from paceline_testing.manifests import Manifest, manifest

REMOVED: Any = object()


@dataclass(frozen=True, slots=True)
class Mistake:
    """`edits`: places (keys and indices with blanks between, beginning with a part of `_place`; "-" appends to a list),
    each followed by its new value or REMOVED. The place "text" is `serveConfigV2`, its value (old, new)."""

    name: str
    rule: str
    base: str
    edits: tuple[Any, ...]

    def make(self) -> Manifest:
        made = manifest(self.base)
        for place, value in zip(self.edits[::2], self.edits[1::2], strict=True):
            if place == "text":
                text = made["spec"]["serveConfigV2"]
                assert value[0] in text
                made["spec"]["serveConfigV2"] = text.replace(*value, 1)
            else:
                _edit(made, _place(made, place), value)
        return made


def _place(made: Manifest, place: str) -> list[str]:
    """The keys of a place, with the part that it begins with spelt out; a pod is that of the first worker group."""
    is_cluster = made["kind"] == "RayCluster"
    ray = "spec" if is_cluster else "spec rayClusterConfig"
    pod = (
        f"{ray} workerGroupSpecs 0 template spec"
        if is_cluster or made["kind"] == "RayService"
        else "spec template spec"
    )
    parts = {
        "ray": ray,
        "head": f"{ray} headGroupSpec",
        "head_env": f"{ray} headGroupSpec template spec containers 0 env",
        "worker": f"{ray} workerGroupSpecs 0",
        "pod": pod,
        "container": f"{pod} containers 0",
        "upgrade": "spec upgradeStrategy clusterUpgradeOptions",
    }
    first, *others = place.split(" ")
    return [*parts.get(first, first).split(" "), *others]


def _edit(made: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        made = made[int(key) if isinstance(made, list) else key]
    last: Any = keys[-1]
    if last == "-":
        made.append(value)
    elif value is REMOVED:
        del made[last]
    else:
        made[int(last) if isinstance(made, list) else last] = value


# fmt: off
_ROWS: tuple[tuple[Any, ...], ...] = (
    # What schemas see, and demands beyond them.
    ("replica for replicas", "schema-unknown-field", "deployment", "spec replica", 3),
    ("text for a number", "schema-type", "deployment", "spec replicas", "three"),
    ("no selector", "schema-missing", "deployment", "spec selector", REMOVED),
    ("typo in a pod", "schema-unknown-field", "deployment", "container imagePullPolcy", "Always"),
    ("typo in a Ray cluster", "schema-unknown-field", "ray_service", "ray enableInTreeAutoscalling", True),
    ("typo in a Ray pod", "schema-unknown-field", "ray_service", "container resource", {}),
    ("number as a start parameter", "schema-type", "ray_service", "head rayStartParams num-cpus", 0),
    ("no rayClusterConfig", "schema-missing", "ray_service", "spec rayClusterConfig", REMOVED),
    ("removed apiVersion", "api-unknown", "disruption_budget", "apiVersion", "policy/v1beta1"),
    ("kind that is not there", "api-unknown", "deployment", "kind", "Deploymnet"),
    # Pods of workloads.
    ("label value with a blank", "schema-value", "deployment", "metadata labels tier", "front end"),
    ("label key of 64 letters", "schema-value", "service", "metadata labels", {"a" * 64: "x"}),
    ("port 70000", "schema-value", "deployment", "container ports 0 containerPort", 70000),
    ("port name of 16 letters", "schema-value", "deployment", "container ports 1 name", "prometheusexport"),
    ("two ports of a name", "list-unique", "deployment", "container ports 1 name", "http"),
    ("request over limit", "resource-limit", "deployment", "container resources requests memory", "2Gi"),
    ("half a GPU", "resource-limit", "deployment", "container resources limits nvidia.com/gpu", "0.5"),
    ("GPU request without limit", "resource-limit", "deployment",
     "container resources requests nvidia.com/gpu", 1),
    ("16 GB as a quantity", "schema-value", "deployment", "container resources limits memory", "16GB"),
    ("gpu for nvidia.com/gpu", "resource-name", "deployment", "container resources limits gpu", 1),
    ("two containers of a name", "list-unique", "deployment", "pod initContainers 0 name", "web"),
    ("container name with _", "schema-value", "deployment", "container name", "web_server"),
    ("no image", "schema-missing", "deployment", "container image", REMOVED),
    ("mount without volume", "mount-volume", "deployment", "container volumeMounts 1 name", "model"),
    ("two volumes at one place", "list-unique", "deployment", "container volumeMounts 1 mountPath", "/tmp"),
    ("volume with two sources", "schema-value", "deployment", "pod volumes 0 hostPath", {"path": "/tmp"}),
    ("two volumes of a name", "list-unique", "stateful_set", "pod volumes -", {"name": "tmp", "emptyDir": {}}),
    ("probe with two handlers", "schema-value", "deployment", "container readinessProbe exec", {"command": ["true"]}),
    ("probe without handler", "schema-value", "deployment", "container startupProbe grpc", REMOVED),
    ("probe of a port that is not", "probe-port", "deployment", "container readinessProbe httpGet port", "https"),
    ("two successes of liveness", "schema-value", "deployment", "container livenessProbe successThreshold", 2),
    ("pull policy in small letters", "schema-value", "deployment", "container imagePullPolicy", "ifNotPresent"),
    ("operator Exist", "schema-value", "deployment", "pod tolerations 0 operator", "Exist"),
    ("toleration Exists with a value", "schema-value", "deployment", "pod tolerations 0 value", "yes"),
    ("whenUnsatisfiable Never", "schema-value", "deployment",
     "pod topologySpreadConstraints 0 whenUnsatisfiable", "Never"),
    ("affinity weight 1000", "schema-value", "deployment",
     "pod affinity podAntiAffinity preferredDuringSchedulingIgnoredDuringExecution 0 weight", 1000),
    ("root that must not be root", "security-context", "deployment", "container securityContext runAsUser", 0),
    ("value and valueFrom", "schema-value", "deployment", "container env 1 value", "x"),
    # Other kinds.
    ("service port 0", "schema-value", "service", "spec ports 0 port", 0),
    ("service type LoadBalance", "schema-value", "service", "spec type", "LoadBalance"),
    ("minAvailable and maxUnavailable", "schema-value", "disruption_budget", "spec minAvailable", 1),
    ("policyTypes ingress", "schema-value", "network_policy", "spec policyTypes 0", "ingress"),
    ("address without its length", "schema-value", "network_policy", "spec ingress 0 from 1 ipBlock cidr", "10.0.0.0"),
    # The same in a Ray group, where no API server looks.
    ("Ray pod: mount without volume", "mount-volume", "ray_service", "container volumeMounts 0 name", "sm"),
    ("Ray pod: request over limit", "resource-limit", "ray_service", "container resources requests cpu", "16"),
    ("Ray pod: operator Exist", "schema-value", "ray_service", "pod tolerations 0 operator", "Exist"),
    ("Ray pod: quantity 8 GB", "schema-value", "ray_service", "pod volumes 0 emptyDir sizeLimit", "8GB"),
    ("Ray pod: label value with /", "schema-value", "ray_service",
     "worker template metadata labels paceline/role", "a/b"),
    # KubeRay's operator.
    ("RayService name of 48 letters", "ray-name", "ray_service", "metadata name", "p" * 48),
    ("RayCluster name of 54 letters", "ray-name", "ray_cluster", "metadata name", "p" * 54),
    ("RayCluster name with a dot", "ray-name", "ray_cluster", "metadata name", "bench.one"),
    ("minReplicas over maxReplicas of a group", "ray-replicas", "ray_service", "worker minReplicas", 3),
    ("replicas below 0", "ray-replicas", "ray_cluster", "worker replicas", -1),
    ("two groups of a name", "ray-group-name", "ray_service", "worker groupName", "draft"),
    ("resources twice", "ray-start", "ray_service", "head resources", {"CPU": "0"}),
    ("labels as a start parameter", "ray-start", "ray_service", "worker rayStartParams labels", "a=b"),
    ("redis-password as a parameter", "ray-gcs", "ray_service", "head rayStartParams redis-password", "x"),
    ("REDIS_PASSWORD beside the options", "ray-gcs", "ray_service",
     "head_env -", {"name": "REDIS_PASSWORD", "value": "redis:6379"}),
    ("RAY_REDIS_ADDRESS beside the options", "ray-gcs", "ray_service",
     "head_env -", {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}),
    ("RAY_REDIS_ADDRESS alone", "ray-gcs", "ray_cluster",
     "head_env -", {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}),
    ("legacy annotation beside the options", "ray-gcs", "ray_service",
     "metadata annotations", {"ray.io/ft-enabled": "true"}),
    ("storage without rocksdb", "ray-gcs", "ray_service",
     "ray gcsFaultToleranceOptions storage", {"size": "1Gi"}),
    ("restartPolicy Always under autoscaler v2", "ray-autoscaler-v2", "ray_service", "pod restartPolicy", "Always"),
    ("priority without autoscaler v2", "ray-autoscaler-v2", "ray_service", "ray autoscalerOptions", {"version": "v1"}),
    ("priority with an old Ray", "ray-version", "fixed_ray_cluster",
     "container image", "x:1", "worker priority", 1, "ray rayVersion", "2.52.0",
     "ray enableInTreeAutoscaling", True, "ray autoscalerOptions", {"version": "v2"}),
    ("token without rayVersion", "ray-version", "fixed_ray_cluster", "ray authOptions", {"mode": "token"}),
    ("tokens of Kubernetes in a RayService", "ray-service", "ray_service",
     "ray authOptions enableK8sTokenAuth", True),
    ("incremental upgrade without autoscaler", "ray-upgrade", "small_ray_service",
     "spec upgradeStrategy", {
         "type": "NewClusterWithIncrementalUpgrade",
         "clusterUpgradeOptions": {"stepSizePercent": 5, "intervalSeconds": 10, "gatewayClassName": "istio"}}),
    ("steps over the surge", "ray-upgrade", "ray_service", "upgrade stepSizePercent", 50),
    ("interval 0", "ray-upgrade", "ray_service", "upgrade intervalSeconds", 0),
    ("gatewayClassName empty", "ray-upgrade", "ray_service", "upgrade gatewayClassName", ""),
    ("upgrade type NewClutser", "ray-upgrade", "ray_service", "spec upgradeStrategy", {"type": "NewClutser"}),
    ("head service with a name", "ray-service", "ray_service", "head headService", {"metadata": {"name": "head"}}),
    ("no port for Serve on the head", "ray-serve-port", "ray_service",
     "head template spec containers 0 ports", [{"name": "gcs", "containerPort": 6379}]),
    ("the port for Serve misnamed", "ray-serve-port", "ray_service",
     "head template spec containers 0 ports", [{"name": "server", "containerPort": 8000}]),
    ("suspended group under the autoscaler", "ray-suspend", "ray_service", "worker suspend", True),
    ("TLS behind its gate", "ray-alpha-gate", "ray_service", "ray tlsOptions", {"enabled": True}),
    ("redis-username as a parameter", "ray-gcs", "ray_cluster", "head rayStartParams redis-username", "x"),
    ("REDIS_USERNAME in the head", "ray-gcs", "ray_service",
     "head_env -", {"name": "REDIS_USERNAME", "value": "redis:6379"}),
    ("namespace of the storage as an annotation", "ray-gcs", "ray_service",
     "metadata annotations", {"ray.io/external-storage-namespace": "mine"}),
    ("Redis without an address", "ray-gcs", "ray_service",
     "ray gcsFaultToleranceOptions", {"backend": "redis"}),
    ("rocksdb behind its gate", "ray-alpha-gate", "ray_service",
     "ray gcsFaultToleranceOptions", {"backend": "rocksdb", "storage": {"size": "1Gi"}}),
    ("history server behind its gate", "ray-alpha-gate", "ray_service",
     "ray historyServerOptions", {"collectorOptions": {"image": "collector:1"}}),
    ("network policy behind its gate", "ray-alpha-gate", "ray_service",
     "ray networkPolicy", {"mode": "DenyAllIngress"}),
    ("idle time of a group without autoscaler v2", "ray-autoscaler-v2", "fixed_ray_cluster",
     "worker idleTimeoutSeconds", 60),
    ("token with an old Ray", "ray-version", "fixed_ray_cluster",
     "container image", "x:1", "ray rayVersion", "2.51.0", "ray authOptions", {"mode": "token"}),
    ("mode of tokens misspelt", "schema-value", "ray_service", "ray authOptions mode", "tokens"),
    ("surge of 150 %", "ray-upgrade", "ray_service", "upgrade maxSurgePercent", 150),
    ("image of another Ray", "ray-image-version", "ray_service", "container image", "rayproject/ray:2.52.0-py311"),
    ("half a CPU as a start parameter", "ray-start", "ray_service", "worker rayStartParams num-cpus", "0.5"),
    ("autoscaler v2 by a variable, without an autoscaler", "ray-autoscaler-v2", "fixed_ray_cluster",
     "head_env -", {"name": "RAY_enable_autoscaler_v2", "value": "1"}),
    # serveConfigV2, a text.
    ("text that is no YAML", "serve-yaml", "ray_service", "text", ("route_prefix: /", "route_prefix: [/")),
    ("autoscalng_config", "serve-unknown-key", "ray_service", "text", ("autoscaling_config", "autoscalng_config")),
    ("http_option", "serve-unknown-key", "ray_service", "text", ("http_options", "http_option")),
    ("max_replica", "serve-unknown-key", "ray_service", "text", ("max_replicas", "max_replica")),
    ("num_cpu", "serve-unknown-key", "ray_service", "text", ("num_cpus: 1", "num_cpu: 1")),
    ("min_replicas over max_replicas", "serve-schema", "ray_service", "text", ("min_replicas: 1", "min_replicas: 9")),
    ("number as a variable", "serve-schema", "ray_service",
     "text", ("num_cpus: 1", "num_cpus: 1\n          runtime_env: {env_vars: {OMP_NUM_THREADS: 1}}")),
    ("route without /", "serve-schema", "ray_service", "text", ("route_prefix: /", "route_prefix: v1")),
    ("module that is not", "serve-import", "ray_service",
     "text", ("grpc_health.v1.health_pb2_grpc", "grpc_health.v1.health_grpc")),
    ("name that is not", "serve-import", "ray_service", "text", ("cluster.app:build", "cluster.serve:application")),
    ("policy that is not", "serve-import", "ray_service",
     "text", ("target_ongoing_requests: 2",
              "policy: {policy_function: 'actors.workers.autoscaling:DraftPolicies'}")),
    ("request router that is not", "serve-import", "ray_service",
     "text", ("max_ongoing_requests: 1000",
              "request_router_config: {request_router_class: 'ray.serve.request_router:Nearest'}")),
    ("no replicas of the only group", "group-resources", "small_ray_service",
     "head rayStartParams num-cpus", "0", "worker replicas", REMOVED),
    ("argument tensor_paralel", "config-unknown-key", "ray_service", "text", ("tensor_parallel", "tensor_paralel")),
    ("argument out of its limits", "config-value", "ray_service", "text", ("max_running: 64", "max_running: 0")),
    ("override of no deployment", "serve-deployment", "ray_service", "text", ("name: Router", "name: Routers")),
    ("more ranks than GPUs", "group-resources", "ray_service", "text", ("tensor_parallel: 8", "tensor_parallel: 64")),
    ("no GPU for a replica", "group-resources", "ray_service", "text", ("      num_cpus: 1", "      num_gpus: 16")),
    ("no node of the target group", "group-resources", "ray_service",
     "ray workerGroupSpecs 1 replicas", 0, "ray workerGroupSpecs 1 minReplicas", 0,
     "ray workerGroupSpecs 1 maxReplicas", 0),
)
# fmt: on

MISTAKES = tuple(Mistake(name, rule, base, tuple(edits)) for name, rule, base, *edits in _ROWS)

# Found only by the definitions of KubeRay's kinds.
NEED_DEFINITIONS = ("typo in a Ray cluster", "no rayClusterConfig", "mode of tokens misspelt")
