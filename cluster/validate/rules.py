"""The table of all rules: what each looks for, why it matters, how it is mended. docs/validate.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`says` is what must hold. A warning does not fail the command."""

    id: str
    layer: str
    says: str
    why: str
    fix: str
    level: Level = "error"


_FILE, _SCHEMA, _CORE, _RAY, _SERVE, _CONFIG = (
    "Files", "Schemas", "Kubernetes", "Ray clusters", "serveConfigV2", "Cluster configurations",
)  # fmt: skip

_ALL = (
    Rule("yaml-syntax", _FILE, "The file is YAML or JSON.", "Nothing can read it.", "Mend the syntax at this line."),
    Rule(
        "yaml-duplicate-key",
        _FILE,
        "A key is given once.",
        "The last one silently wins, and the API server's strict mode refuses both.",
        "Remove one of them.",
    ),
    Rule(
        "file-kind",
        _FILE,
        "A document has apiVersion and kind, or is a cluster configuration.",
        "Nobody knows what to do with it.",
        "Give apiVersion and kind, or the sections of a cluster configuration.",
    ),
    Rule(
        "kustomize-build",
        _FILE,
        "`kubectl kustomize` builds the directory.",
        "Nothing of it can be applied.",
        "Mend what kustomize names, and build it anew.",
    ),
    Rule(
        "object-twice",
        _FILE,
        "An object is defined once.",
        "The one that is applied last silently wins.",
        "Remove or rename one of them.",
    ),
    Rule(
        "schema-unknown-field",
        _SCHEMA,
        "A field is one that the kind has.",
        "The API server refuses it, or drops it without a word.",
        "Correct the name, or move the field to where it belongs.",
    ),
    Rule(
        "schema-missing", _SCHEMA, "Required fields are there.", "The API server refuses the object.", "Add the field."
    ),
    Rule(
        "schema-type",
        _SCHEMA,
        "A value has the field's type.",
        "The API server refuses the object.",
        "Write the value as its type asks: texts in quotes, numbers and truths without.",
    ),
    Rule(
        "schema-value",
        _SCHEMA,
        "A value is within what the schema allows.",
        "The API server refuses the object.",
        "Choose one of the allowed values.",
    ),
    Rule(
        "api-unknown",
        _SCHEMA,
        "A kind of Kubernetes has the given apiVersion.",
        "The API server does not know the kind.",
        "Correct apiVersion and kind.",
    ),
    Rule(
        "api-removed",
        _SCHEMA,
        "The apiVersion is still served.",
        "The API server does not know the kind.",
        "Write the version that took its place; its fields may differ.",
    ),
    Rule(
        "api-deprecated",
        _SCHEMA,
        "The apiVersion is not deprecated.",
        "A later operator will not serve it.",
        "Write the version that took its place.",
        "warning",
    ),
    Rule(
        "crd-cel",
        _SCHEMA,
        "The definition's own rules (x-kubernetes-validations) hold.",
        "The API server refuses the object.",
        "Change the value as the message says.",
    ),
    Rule(
        "crd-list-unique",
        _SCHEMA,
        "Items of a list with keys differ in them.",
        "The API server refuses the object.",
        "Remove or rename one of them.",
    ),
    Rule(
        "object-name",
        _CORE,
        "Names have the syntax that their kind asks for.",
        "The API server refuses the object.",
        "Use a-z, 0-9 and -, and start and end with a letter or digit.",
    ),
    Rule(
        "label-syntax",
        _CORE,
        "Labels are [domain/]name: value, names and values of at most 63 of A-Z, a-z, 0-9, -, _ and .",
        "The API server refuses the object; inside a Ray group the operator fails to make pods.",
        "Shorten it, and use only these characters.",
    ),
    Rule(
        "annotation-syntax",
        _CORE,
        "Keys of annotations are [domain/]name.",
        "The API server refuses the object.",
        "Correct the key.",
    ),
    Rule(
        "selector-template",
        _CORE,
        "A workload's selector finds the pods of its own template.",
        "The API server refuses a workload that would not find its pods.",
        "Give the template the labels of the selector.",
    ),
    Rule(
        "selector-syntax",
        _CORE,
        "In and NotIn have values, Exists and DoesNotExist have none.",
        "The API server refuses the object.",
        "Add or remove the values.",
    ),
    Rule(
        "enum",
        _CORE,
        "A text that chooses is one of those that can be chosen.",
        "The API server refuses the object; inside a Ray group no pod is ever made.",
        "Write one of them; capital letters count.",
    ),
    Rule(
        "replicas",
        _CORE,
        "Counts are not below 0.",
        "The API server refuses the object.",
        "Give 0 or more.",
    ),
    Rule(
        "strategy",
        _CORE,
        "An update strategy can make progress, and has only its own fields.",
        "The API server refuses the object.",
        "Let maxSurge or maxUnavailable be above 0; remove rollingUpdate from other types.",
    ),
    Rule(
        "pod-containers",
        _CORE,
        "A pod has a container.",
        "The API server refuses the pod, and KubeRay the cluster.",
        "Add the container.",
    ),
    Rule(
        "pod-restart-policy",
        _CORE,
        "restartPolicy is one that the owner of the pod allows.",
        "The API server refuses the object.",
        "Deployments and their like: Always or not given; jobs: OnFailure or Never.",
    ),
    Rule(
        "container-name",
        _CORE,
        "Containers have DNS labels as names.",
        "The API server refuses the pod.",
        "Use a-z, 0-9 and -.",
    ),
    Rule(
        "container-name-unique",
        _CORE,
        "Containers of a pod have different names.",
        "The API server refuses the pod.",
        "Rename one of them.",
    ),
    Rule(
        "container-image",
        _CORE,
        "A container has an image.",
        "The API server refuses the pod, or it never starts.",
        "Write registry/name:tag or registry/name@sha256:..., without https://.",
    ),
    Rule(
        "port-range",
        _CORE,
        "Ports are from 1 to 65535.",
        "The API server refuses the object.",
        "Give a port in that range.",
    ),
    Rule(
        "port-name",
        _CORE,
        "Port names are at most 15 of a-z, 0-9 and -, with a letter (of a Service a DNS label).",
        "The API server refuses the object.",
        "Shorten the name.",
    ),
    Rule(
        "port-name-unique",
        _CORE,
        "Port names and port numbers are given once.",
        "The API server refuses the object.",
        "Rename one of them.",
    ),
    Rule(
        "port-name-required",
        _CORE,
        "Ports of a Service with several have names.",
        "The API server refuses the Service.",
        "Name every port.",
    ),
    Rule(
        "env-name",
        _CORE,
        "Names of variables are printable, without =.",
        "The API server refuses the pod.",
        "Correct the name.",
    ),
    Rule(
        "env-unique",
        _CORE,
        "A variable is set once.",
        "The last one silently wins, and a server-side apply refuses both.",
        "Remove one of them.",
    ),
    Rule(
        "env-source",
        _CORE,
        "A variable has a value or one source.",
        "The API server refuses the pod.",
        "Leave only one.",
    ),
    Rule(
        "quantity",
        _CORE,
        "Amounts are quantities: 500m, 2, 16Gi.",
        "The API server refuses the object.",
        "Write a number and one of m, k, M, G, T, Ki, Mi, Gi, Ti.",
    ),
    Rule(
        "resource-name",
        _CORE,
        "Resources are cpu, memory, ephemeral-storage, hugepages-* or domain/name.",
        "The API server refuses the pod: a GPU is nvidia.com/gpu, not gpu.",
        "Write the full name.",
    ),
    Rule(
        "resource-limit",
        _CORE,
        "A request is not over its limit.",
        "The API server refuses the pod.",
        "Raise the limit or lower the request.",
    ),
    Rule(
        "resource-whole",
        _CORE,
        "Devices such as nvidia.com/gpu come whole.",
        "The API server refuses the pod.",
        "Give a whole number; Ray itself shares devices with num_gpus: 0.5.",
    ),
    Rule(
        "resource-device-limit",
        _CORE,
        "The request of a device is its limit.",
        "The API server refuses the pod.",
        "Give limits only, or both alike.",
    ),
    Rule(
        "volume-name",
        _CORE,
        "Volumes have DNS labels as names, each another.",
        "The API server refuses the pod.",
        "Rename one of them.",
    ),
    Rule("volume-source", _CORE, "A volume has one source.", "The API server refuses the pod.", "Leave only one."),
    Rule(
        "mount-volume",
        _CORE,
        "A mount names a volume of the pod, or a claim template.",
        "The API server refuses the pod.",
        "Add the volume, or correct the name.",
    ),
    Rule(
        "mount-path",
        _CORE,
        "Volumes have places of their own.",
        "The API server refuses the pod.",
        "Give each mount another absolute path.",
    ),
    Rule(
        "probe-handler",
        _CORE,
        "A probe or a hook has one handler.",
        "The API server refuses the pod.",
        "Leave only one of them.",
    ),
    Rule(
        "probe-port",
        _CORE,
        "A probe's named port is one of its container.",
        "The probe fails for ever, and the container is restarted again and again.",
        "Name the port in `ports`, or give the probe its number.",
    ),
    Rule(
        "probe-times",
        _CORE,
        "Times and counts of probes are above 0, and one success is enough except for readiness.",
        "The API server refuses the pod.",
        "Correct the number.",
    ),
    Rule(
        "grace-period",
        _CORE,
        "A hook ends within terminationGracePeriodSeconds.",
        "The API server refuses the pod, or open streams are cut.",
        "Raise terminationGracePeriodSeconds of the pod.",
    ),
    Rule(
        "security-context",
        _CORE,
        "Security settings do not contradict one another.",
        "The container never starts.",
        "Give a uid above 0, or drop one of the two.",
    ),
    Rule(
        "toleration",
        _CORE,
        "A toleration has what its operator and effect ask for.",
        "The API server refuses the pod.",
        "Exists has no value; tolerationSeconds needs effect NoExecute.",
    ),
    Rule(
        "topology",
        _CORE,
        "Spreading and affinity have a topology key, a skew of at least 1 and weights from 1 to 100.",
        "The API server refuses the pod.",
        "Correct the value.",
    ),
    Rule(
        "service-type",
        _CORE,
        "A Service has the ports and addresses that its type asks for.",
        "The API server refuses the Service.",
        "Change the type, or remove what it does not have.",
    ),
    Rule(
        "service-target",
        _CORE,
        "A Service forwards to a named port that the pods it selects have.",
        "The Service has no endpoint: every connection is refused.",
        "Correct the name, or give the number.",
    ),
    Rule(
        "pdb-one",
        _CORE,
        "A disruption budget has minAvailable or maxUnavailable.",
        "The API server refuses both, and neither means minAvailable 1 by accident.",
        "Give exactly one.",
    ),
    Rule(
        "pdb-value",
        _CORE,
        "A disruption budget counts pods, or gives 0% to 100%.",
        "The API server refuses it.",
        "Correct the value.",
    ),
    Rule(
        "hpa-range", _CORE, "minReplicas is not over maxReplicas.", "The API server refuses it.", "Correct the range."
    ),
    Rule(
        "hpa-metric",
        _CORE,
        "A metric has the fields of its type.",
        "The API server refuses it.",
        "Give the field that the type names.",
    ),
    Rule(
        "cidr",
        _CORE,
        "Ranges of addresses are CIDR, and exceptions lie within them.",
        "The API server refuses the policy.",
        "Write it as 10.0.0.0/8.",
    ),
    Rule(
        "policy-peer",
        _CORE,
        "A peer is an ipBlock, or has selectors.",
        "The API server refuses the policy.",
        "Leave one of the two; {} as podSelector is all pods.",
    ),
    Rule(
        "network-dns",
        _CORE,
        "Where egress is denied, DNS is let through.",
        "No name resolves: workers never find the head, and the cluster does not start.",
        "Allow egress to port 53, UDP and TCP.",
    ),
    Rule("ingress", _CORE, "An Ingress has rules that can match.", "The API server refuses it.", "Correct the rule."),
    Rule(
        "config-key",
        _CORE,
        "Keys of ConfigMaps and Secrets are file names, given once.",
        "The API server refuses the object.",
        "Use letters, digits, -, _ and .",
    ),
    Rule(
        "secret-base64",
        _CORE,
        "`data` of a Secret is base64.",
        "The API server refuses the Secret.",
        "Encode it, or write it under stringData.",
    ),
    Rule(
        "volume-claim",
        _CORE,
        "A claim has an access mode and a size.",
        "The API server refuses the claim.",
        "Give accessModes and resources.requests.storage.",
    ),
    Rule(
        "priority-class",
        _CORE,
        "Priorities are at most 1000000000.",
        "Higher ones are the system's, and the API server refuses them.",
        "Give a smaller value.",
    ),
    Rule("cron-schedule", _CORE, "A schedule has five fields of cron.", "It is refused.", "Write it as 0 3 * * *."),
    Rule(
        "role",
        _CORE,
        "Roles have verbs and groups, bindings name a role and subjects.",
        "The API server refuses the object.",
        "Add what is missing.",
    ),
    Rule(
        "ray-name",
        _RAY,
        "Names are DNS labels that start with a letter: a RayService of at most 47 letters, a RayCluster of 53.",
        "The operator makes longer names of it, and refuses those that would not fit.",
        "Choose a shorter name.",
    ),
    Rule(
        "ray-group-name",
        _RAY,
        "Worker groups have different names.",
        "The operator tells their pods apart by it.",
        "Rename one of them.",
    ),
    Rule(
        "ray-replicas",
        _RAY,
        "Replicas are not below 0, and minReplicas is not over maxReplicas.",
        "The operator refuses the cluster.",
        "Correct the range.",
    ),
    Rule(
        "ray-replicas-outside",
        _RAY,
        "replicas is from minReplicas to maxReplicas.",
        "The operator silently takes the nearest of them.",
        "Give a number in the range.",
        "warning",
    ),
    Rule(
        "ray-resources-twice",
        _RAY,
        "A group has rayStartParams resources or `resources`.",
        "The operator refuses the cluster.",
        "Leave one of the two.",
    ),
    Rule(
        "ray-labels",
        _RAY,
        "Labels are no start parameter.",
        "The operator refuses the cluster.",
        "Write them under `labels` of the group.",
    ),
    Rule(
        "ray-start-number",
        _RAY,
        "num-cpus and num-gpus are whole numbers.",
        "`ray start` refuses them, and the pod restarts for ever.",
        'Write a whole number in quotes: "8".',
    ),
    Rule(
        "ray-gcs",
        _RAY,
        "Redis for Ray's own state is given by gcsFaultToleranceOptions alone.",
        "The operator refuses the cluster.",
        "Move it to gcsFaultToleranceOptions, and remove the other way.",
    ),
    Rule(
        "ray-gcs-backend",
        _RAY,
        "gcsFaultToleranceOptions has the fields of its backend.",
        "The operator refuses the cluster.",
        "redis: redisAddress and its user and password; rocksdb: storage.",
    ),
    Rule(
        "ray-autoscaler-v2",
        _RAY,
        "Autoscaler v2: restartPolicy Never, its version in one place; priority and idle times of groups need it.",
        "The operator refuses the cluster.",
        "autoscalerOptions.version: v2 with enableInTreeAutoscaling, and restartPolicy Never or not given.",
    ),
    Rule(
        "ray-autoscaler-off",
        _RAY,
        "autoscalerOptions come with enableInTreeAutoscaling.",
        "Without it nothing scales.",
        "Set enableInTreeAutoscaling: true, or remove the options.",
        "warning",
    ),
    Rule(
        "ray-version",
        _RAY,
        "rayVersion is new enough for what is asked: tokens 2.52.0, priorities of groups 2.56.0.",
        "The operator refuses the cluster.",
        "Give rayVersion, and an image with that Ray.",
    ),
    Rule(
        "ray-image-version",
        _RAY,
        "The image's Ray is rayVersion.",
        "The operator starts nodes as rayVersion asks, and they do not understand one another.",
        "Write the same version in both places.",
    ),
    Rule(
        "ray-suspend",
        _RAY,
        "No worker group is suspended while the autoscaler runs.",
        "The operator refuses the cluster.",
        "Give replicas, minReplicas and maxReplicas 0.",
    ),
    Rule(
        "ray-alpha-gate",
        _RAY,
        "No field needs an alpha gate of the operator.",
        "The gates are off by default, and the operator refuses the cluster.",
        "Remove it: TLS by a mesh, network policies as objects of their own, Redis for Ray's state.",
    ),
    Rule(
        "ray-service-auth",
        _RAY,
        "A RayService has no enableK8sTokenAuth.",
        "The operator refuses it.",
        "Use authOptions.mode: token with a secret.",
    ),
    Rule(
        "ray-head-service",
        _RAY,
        "The head service of a RayService has no name.",
        "The operator refuses it, since upgrades need two of them.",
        "Remove metadata.name.",
    ),
    Rule(
        "ray-upgrade-type",
        _RAY,
        "upgradeStrategy.type is None, NewCluster or NewClusterWithIncrementalUpgrade.",
        "The API server takes any text, and the operator refuses it.",
        "Write one of them.",
    ),
    Rule(
        "ray-upgrade",
        _RAY,
        "Incremental upgrades have the autoscaler, 0 <= stepSizePercent <= maxSurgePercent <= 100, "
        "intervalSeconds above 0 and a gatewayClassName.",
        "The operator refuses it.",
        "Correct the options, or take type NewCluster.",
    ),
    Rule("ray-job", _RAY, "A RayJob has a cluster, and ends as it says.", "The operator refuses it.", "Correct it."),
    Rule(
        "ray-dead-field",
        _RAY,
        "No field is without effect.",
        "It looks as if it did something.",
        "Remove it.",
        "warning",
    ),
    Rule(
        "group-resources",
        _RAY,
        "The groups can hold one replica of every deployment, tensor parallel ranks and GPUs included.",
        "Ray waits for ever for nodes that no group can have.",
        "Give a group more GPUs or nodes, or ask for less.",
    ),
    Rule(
        "serve-yaml", _SERVE, "The text is YAML with keys.", "Ray refuses it, and nothing is served.", "Mend the text."
    ),
    Rule(
        "serve-schema",
        _SERVE,
        "Ray Serve's own schema accepts it.",
        "Ray refuses it, and nothing is served.",
        "Change the value as the message says.",
    ),
    Rule(
        "serve-unknown-key",
        _SERVE,
        "Every key is one that Ray Serve knows.",
        "Ray drops it without a word, and a default applies.",
        "Correct the name, or move the key to where it belongs.",
    ),
    Rule(
        "serve-import",
        _SERVE,
        "Import paths lead somewhere.",
        "The application fails to start.",
        "Write module:name as it is in the code.",
    ),
    Rule(
        "serve-import-elsewhere",
        _SERVE,
        "Import paths lead to what is installed here.",
        "It may be in the image; it cannot be looked at from here.",
        "Check it in the image, or install the package and validate again.",
        "warning",
    ),
    Rule(
        "serve-deployment",
        _SERVE,
        "Overrides name deployments that the application has.",
        "Ray refuses it, and nothing is served.",
        "Correct the name.",
    ),
    Rule(
        "config-unknown-key",
        _CONFIG,
        "Every key is one of the configuration, in a file and as args of cluster.app:build.",
        "The server refuses to start.",
        "Correct the name, or move the key to its section.",
    ),
    Rule(
        "config-value",
        _CONFIG,
        "Values are within their limits, and fit one another.",
        "The server refuses to start.",
        "Change the value as the message says.",
    ),
)
RULES = {rule.id: rule for rule in _ALL}


def as_markdown() -> str:
    """The rules as tables, one a layer."""
    parts = []
    for layer in dict.fromkeys(rule.layer for rule in _ALL):
        rows = [
            f"| `{rule.id}`{' (warning)' if rule.level == 'warning' else ''} | {rule.says} | {rule.why} | {rule.fix} |"
            for rule in _ALL
            if rule.layer == layer
        ]
        head = ["| Rule | What must hold | Why | How to mend |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {layer}", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"
