"""What KubeRay's operator refuses after the API server has accepted it, and what then never starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.labels import check_labels
from cluster.deploy.validate.naming import is_service_label
from cluster.deploy.validate.networking import check_service_spec
from cluster.deploy.validate.pods import check_template
from cluster.deploy.validate.tree import at, items, mapping, strings, whole
from cluster.deploy.validate.workloads import is_schedule

# Kind: where its spec of a cluster is, and the most letters of its name.
_KINDS: dict[str, tuple[Location, int]] = {
    "RayCluster": (("spec",), 53),
    "RayService": (("spec", "rayClusterConfig"), 47),
    "RayJob": (("spec", "rayClusterSpec"), 47),
    "RayCronJob": (("spec", "jobTemplate", "rayClusterSpec"), 190),
}
_V2_VARIABLE = "RAY_enable_autoscaler_v2"
_RESTART = ("Always", "OnFailure", "Never")
_RESOURCE_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")
_UPGRADES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
# Fields that work only behind an alpha gate of the operator, and the gate.
_GATED = (
    ("tlsOptions", "RayClusterTLS"),
    ("networkPolicy", "RayClusterNetworkPolicy"),
    ("historyServerOptions", "RayHistoryServer"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """A head or worker group of a Ray cluster."""

    name: str
    spec: dict[str, Any]
    where: Location
    is_head: bool

    @property
    def container(self) -> dict[str, Any]:
        """The container that runs Ray: the first one."""
        found = at(self.spec, "template", "spec", "containers", 0)
        return found if isinstance(found, dict) else {}

    @property
    def environment(self) -> dict[str, int]:
        """Names of variables, and where in `env` they are."""
        return {str(variable.get("name")): index for index, variable in items(self.container, "env")}


def is_ray(manifest: dict[str, Any]) -> bool:
    return str(manifest.get("apiVersion")).startswith("ray.io/") and manifest.get("kind") in _KINDS


def cluster_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], Location]:
    """The spec of the cluster in a manifest of KubeRay, and where it is."""
    where, _ = _KINDS[str(manifest["kind"])]
    return mapping(manifest, *where), where


def groups_of(cluster: dict[str, Any], where: Location) -> list[Group]:
    head = Group("head", mapping(cluster, "headGroupSpec"), (*where, "headGroupSpec"), True)
    workers = [
        Group(str(spec.get("groupName", index)), spec, (*where, "workerGroupSpecs", index), False)
        for index, spec in items(cluster, "workerGroupSpecs")
    ]
    return [head, *workers]


def has_autoscaler(cluster: dict[str, Any]) -> bool:
    return cluster.get("enableInTreeAutoscaling") is True


def check_ray(manifest: dict[str, Any]) -> Iterator[Problem]:
    kind = str(manifest["kind"])
    _, most = _KINDS[kind]
    name = strings(manifest, "metadata").get("name", "")
    if len(name) > most:
        yield Problem("ray-name", ("metadata", "name"), f"{len(name)} letters; of a {kind} at most {most}")
    elif name and not is_service_label(name) and kind != "RayCronJob":
        yield Problem("ray-name", ("metadata", "name"), f"{name!r} is no DNS label that starts with a letter")
    cluster, where = cluster_of(manifest)
    if cluster:
        yield from _check_cluster(manifest, cluster, where)
    if kind == "RayService":
        yield from _check_service(mapping(manifest, "spec"), cluster)
    if kind == "RayJob":
        yield from _check_job(mapping(manifest, "spec"), ("spec",))
    if kind == "RayCronJob":
        yield from _check_job(mapping(manifest, "spec", "jobTemplate"), ("spec", "jobTemplate"))
        schedule = mapping(manifest, "spec").get("schedule")
        if isinstance(schedule, str) and not is_schedule(schedule):
            yield Problem("cron-schedule", ("spec", "schedule"), f"{schedule!r} is no schedule")


def _check_cluster(manifest: dict[str, Any], cluster: dict[str, Any], where: Location) -> Iterator[Problem]:
    groups = groups_of(cluster, where)
    autoscales = has_autoscaler(cluster)
    options = mapping(cluster, "autoscalerOptions")
    head = groups[0]
    # Before a version was a field, a variable asked for it.
    is_v2 = autoscales and (options.get("version") == "v2" or _is_on(head, _V2_VARIABLE))
    version = _version(cluster.get("rayVersion"))
    names = set[str]()
    for group in groups:
        yield from check_template(group.spec.get("template"), (*group.where, "template"), _RESTART, ())
        yield from _check_group(group, autoscales, is_v2, version)
        yield from _check_image(group, cluster.get("rayVersion"))
        if not group.is_head:
            if group.name in names:
                yield Problem("ray-group-name", (*group.where, "groupName"), f"{group.name!r} names two groups")
            names.add(group.name)
    yield from _check_storage(manifest, cluster, where, head)
    if options and not autoscales:
        what = "autoscalerOptions without enableInTreeAutoscaling: true"
        yield Problem("ray-autoscaler-off", (*where, "autoscalerOptions"), what)
    if (index := head.environment.get(_V2_VARIABLE)) is not None:
        place = (*head.where, "template", "spec", "containers", 0, "env", index)
        if autoscales and options.get("version"):
            yield Problem("ray-autoscaler-v2", place, f"{_V2_VARIABLE} beside autoscalerOptions.version")
        elif not autoscales and _is_on(head, _V2_VARIABLE):
            yield Problem("ray-autoscaler-v2", place, f"{_V2_VARIABLE} without enableInTreeAutoscaling: true")
    yield from _check_access(manifest, cluster, where, version)
    for field, gate in _GATED:
        value = cluster.get(field)
        if not isinstance(value, dict) or (not value and field != "networkPolicy"):
            continue
        if not (field == "tlsOptions" and value.get("enabled") is False):
            yield Problem("ray-alpha-gate", (*where, field), f"{field} needs the operator's gate {gate}")
    if isinstance(policy := cluster.get("networkPolicy"), dict):
        yield from _check_network(policy, (*where, "networkPolicy"))


def _check_group(group: Group, autoscales: bool, is_v2: bool, version: tuple[int, ...] | None) -> Iterator[Problem]:
    parameters = mapping(group.spec, "rayStartParams")
    given = [name for name in _RESOURCE_PARAMETERS if parameters.get(name) not in (None, "")]
    if given and mapping(group.spec, "resources"):
        what = f"resources, and {', '.join(given)} in rayStartParams"
        yield Problem("ray-resources-twice", (*group.where, "resources"), what)
    if "labels" in parameters:
        yield Problem("ray-labels", (*group.where, "rayStartParams", "labels"), "labels among the start parameters")
    yield from check_labels(mapping(group.spec, "labels"), (*group.where, "labels"))
    for name, text in parameters.items():
        if name in ("num-cpus", "num-gpus") and isinstance(text, str) and not re.fullmatch(r"\d+", text):
            yield Problem("ray-start-number", (*group.where, "rayStartParams", name), f"{text!r} is no whole number")
    restart = at(group.spec, "template", "spec", "restartPolicy")
    if is_v2 and restart not in (None, "", "Never"):
        place = (*group.where, "template", "spec", "restartPolicy")
        yield Problem("ray-autoscaler-v2", place, f"restartPolicy is {restart}; with autoscaler v2 it must be Never")
    if group.is_head:
        return
    least, most = whole(group.spec.get("minReplicas")), whole(group.spec.get("maxReplicas"))
    replicas = whole(group.spec.get("replicas"))
    for key in ("replicas", "minReplicas", "maxReplicas"):
        number = whole(group.spec.get(key))
        if number is not None and number < 0:
            yield Problem("ray-replicas", (*group.where, key), f"{number} is below 0")
    if most is not None and (least or 0) > most:
        yield Problem("ray-replicas", (*group.where, "minReplicas"), f"minReplicas {least} is over maxReplicas {most}")
    elif replicas is not None and ((most is not None and replicas > most) or replicas < (least or 0)):
        what = f"replicas {replicas} is not from minReplicas {least or 0} to maxReplicas {most}"
        yield Problem("ray-replicas-outside", (*group.where, "replicas"), what)
    hosts = whole(group.spec.get("numOfHosts"))
    if hosts is not None and hosts < 1:
        yield Problem("ray-replicas", (*group.where, "numOfHosts"), f"{hosts} is below 1")
    if group.spec.get("suspend") is True and autoscales:
        yield Problem("ray-suspend", (*group.where, "suspend"), "a group is suspended while the autoscaler runs")
    priority = group.spec.get("priority") or None  # by its definition a group without one has 0
    for key, value in (("idleTimeoutSeconds", group.spec.get("idleTimeoutSeconds")), ("priority", priority)):
        if value is not None and not is_v2:
            yield Problem("ray-autoscaler-v2", (*group.where, key), f"{key} of a group needs autoscaler v2")
    if priority is not None and is_v2 and (version is None or version < (2, 56)):
        yield Problem("ray-version", (*group.where, "priority"), "priority of a group needs rayVersion 2.56.0 or later")


def _is_on(group: Group, variable: str) -> bool:
    return any(
        entry.get("name") == variable and str(entry.get("value")).lower() in ("1", "true")
        for _, entry in items(group.container, "env")
    )


def _version(text: object) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None
    return tuple(int(part or 0) for part in match.groups()) if match else None


def _check_image(group: Group, ray_version: object) -> Iterator[Problem]:
    """Only images of Ray itself say in their tag which Ray is inside."""
    image = group.container.get("image")
    if not isinstance(image, str):
        return
    match = re.search(r"(?:^|/)ray(?:-ml|-llm)?:(\d+\.\d+\.\d+)", image)
    version = _version(ray_version)
    if match and version and _version(match[1]) != version:
        place = (*group.where, "template", "spec", "containers", 0, "image")
        yield Problem("ray-image-version", place, f"the image has Ray {match[1]}, rayVersion is {ray_version}")


def _check_storage(
    manifest: dict[str, Any], cluster: dict[str, Any], where: Location, head: Group
) -> Iterator[Problem]:
    """GCS fault tolerance: only through its own field."""
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = mapping(manifest, "metadata", "annotations")
    parameters = mapping(head.spec, "rayStartParams")
    env = (*head.where, "template", "spec", "containers", 0, "env")
    place = (*where, "gcsFaultToleranceOptions")
    if isinstance(options, dict):
        if parameters.get("redis-password"):
            yield Problem("ray-gcs", (*head.where, "rayStartParams", "redis-password"), "redis-password beside it")
        for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
            if name in head.environment:
                yield Problem("ray-gcs", (*env, head.environment[name]), f"variable {name} beside it")
        for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
            if annotations.get(name):
                yield Problem("ray-gcs", ("metadata", "annotations", name), f"annotation {name} beside it")
        yield from _check_backend(options, place)
    elif "RAY_REDIS_ADDRESS" in head.environment and str(annotations.get("ray.io/ft-enabled")).lower() != "true":
        place = (*env, head.environment["RAY_REDIS_ADDRESS"])
        yield Problem("ray-gcs", place, "variable RAY_REDIS_ADDRESS without gcsFaultToleranceOptions")
    if parameters.get("redis-username"):
        yield Problem("ray-gcs", (*head.where, "rayStartParams", "redis-username"), "redis-username as a parameter")
    if "REDIS_USERNAME" in head.environment:
        yield Problem("ray-gcs", (*env, head.environment["REDIS_USERNAME"]), "variable REDIS_USERNAME")


def _check_backend(options: dict[str, Any], where: Location) -> Iterator[Problem]:
    backend = options.get("backend") or "redis"
    if backend == "rocksdb":
        yield Problem("ray-alpha-gate", (*where, "backend"), "rocksdb needs the operator's gate for it")
        for name in ("redisAddress", "redisUsername", "redisPassword"):
            if options.get(name) is not None:
                yield Problem("ray-gcs-backend", (*where, name), f"{name} with backend rocksdb")
    else:
        if options.get("storage") is not None:
            yield Problem("ray-gcs-backend", (*where, "storage"), "storage with backend redis")
        if not options.get("redisAddress"):
            yield Problem("ray-gcs-backend", (*where, "redisAddress"), "backend redis without redisAddress")


def _check_access(
    manifest: dict[str, Any], cluster: dict[str, Any], where: Location, version: tuple[int, ...] | None
) -> Iterator[Problem]:
    options = mapping(cluster, "authOptions")
    if options.get("mode") == "token" and (version is None or version < (2, 52)):
        shown = cluster.get("rayVersion") or "not given"
        yield Problem("ray-version", (*where, "authOptions"), f"mode token needs rayVersion 2.52.0; it is {shown}")
    if options.get("enableK8sTokenAuth") and manifest.get("kind") == "RayService":
        place = (*where, "authOptions", "enableK8sTokenAuth")
        yield Problem("ray-service-auth", place, "a RayService cannot have tokens of Kubernetes")


def _check_network(policy: dict[str, Any], where: Location) -> Iterator[Problem]:
    mode = policy.get("mode") or "DenyAll"  # by its definition
    if mode not in ("DenyAll", "DenyAllEgress"):
        return
    for part in ("head", "worker"):
        rules = [rule for _, rule in items(policy, part, "egressRules")]
        if not any(allows_dns(rule) for rule in rules):
            yield Problem("network-dns", (*where, part), f"mode {mode}, and no egress rule for DNS")


def allows_dns(rule: dict[str, Any]) -> bool:
    """Whether an egress rule lets port 53 through. One without ports does, but not where it leads to pods of its own
    namespace alone."""
    if not rule.get("ports"):
        peers = [peer for _, peer in items(rule, "to")]
        outside = ("namespaceSelector", "ipBlock")
        return not peers or any(peer.get(key) is not None for peer in peers for key in outside)
    return any(
        port.get("port") in (None, 53, "dns", "dns-tcp")
        or (whole(port.get("port")) is not None and port["port"] <= 53 <= (whole(port.get("endPort")) or 0))
        for _, port in items(rule, "ports")
    )


def _check_service(spec: dict[str, Any], cluster: dict[str, Any]) -> Iterator[Problem]:
    for name in ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"):
        if spec.get(name) is not None:
            yield Problem("ray-dead-field", ("spec", name), f"{name} has no effect")
    if at(cluster, "headGroupSpec", "headService", "metadata", "name"):
        place = ("spec", "rayClusterConfig", "headGroupSpec", "headService", "metadata", "name")
        yield Problem("ray-head-service", place, "the head service of a RayService has a name")
    service = mapping(spec, "serveService", "spec")
    yield from check_service_spec({"ports": [{}], **service}, ("spec", "serveService", "spec"))
    yield from _check_serve_ports(spec, cluster)
    delay = whole(spec.get("rayClusterDeletionDelaySeconds"))
    if delay is not None and delay < 0:
        yield Problem("ray-upgrade", ("spec", "rayClusterDeletionDelaySeconds"), f"{delay} is below 0")
    strategy = mapping(spec, "upgradeStrategy")
    where: Location = ("spec", "upgradeStrategy")
    kind = strategy.get("type")
    if kind is not None and kind not in _UPGRADES:
        yield Problem("ray-upgrade-type", (*where, "type"), f"{kind!r}; it must be one of {', '.join(_UPGRADES)}")
    if kind == "NewClusterWithIncrementalUpgrade" and cluster:
        yield from _check_incremental(strategy, cluster, where)


def _check_serve_ports(spec: dict[str, Any], cluster: dict[str, Any]) -> Iterator[Problem]:
    """The operator makes Serve's service of ports of the head that have such names, or of its own where the head has
    none at all; `serveService` counts, too, but not in an incremental upgrade."""
    place: Location = ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "ports")
    given = at(cluster, *place[2:])
    if not given:
        return
    ports = [port for _, port in items({"ports": given}, "ports")]
    if mapping(spec, "upgradeStrategy").get("type") != "NewClusterWithIncrementalUpgrade":
        ports += [port for _, port in items(mapping(spec, "serveService", "spec"), "ports")]
    names = [str(port.get("name")) for port in ports]
    if not any(name == "serve" or name.startswith("serve-") for name in names):
        yield Problem("ray-serve-port", place, f"the head's ports are {', '.join(names)}")


def _check_incremental(strategy: dict[str, Any], cluster: dict[str, Any], where: Location) -> Iterator[Problem]:
    if not has_autoscaler(cluster):
        yield Problem("ray-upgrade", (*where, "type"), "an incremental upgrade without enableInTreeAutoscaling")
    options = mapping(strategy, "clusterUpgradeOptions")
    where = (*where, "clusterUpgradeOptions")
    if not options:
        yield Problem("ray-upgrade", where, "an incremental upgrade without clusterUpgradeOptions")
        return
    given = whole(options.get("maxSurgePercent"))
    surge = 100 if given is None else given
    step, interval = whole(options.get("stepSizePercent")), whole(options.get("intervalSeconds"))
    if not 0 <= surge <= 100:
        yield Problem("ray-upgrade", (*where, "maxSurgePercent"), f"{surge} is not from 0 to 100")
    elif step is None or not 0 <= step <= surge:
        yield Problem("ray-upgrade", (*where, "stepSizePercent"), f"{step} is not from 0 to maxSurgePercent {surge}")
    if interval is None or interval <= 0:
        yield Problem("ray-upgrade", (*where, "intervalSeconds"), f"{interval}; it must be above 0")
    if not options.get("gatewayClassName"):
        yield Problem("ray-upgrade", (*where, "gatewayClassName"), "there is none")


def _check_job(spec: dict[str, Any], where: Location) -> Iterator[Problem]:
    if not spec.get("rayClusterSpec") and not spec.get("clusterSelector"):
        yield Problem("ray-job", where, "neither rayClusterSpec nor clusterSelector")
    shuts_down = spec.get("shutdownAfterJobFinishes") is True
    ttl = whole(spec.get("ttlSecondsAfterFinished"))
    if ttl is not None and ttl > 0 and not shuts_down:
        what = "ttlSecondsAfterFinished without shutdownAfterJobFinishes"
        yield Problem("ray-job", (*where, "ttlSecondsAfterFinished"), what)
    if spec.get("suspend") is True and not shuts_down:
        yield Problem("ray-job", (*where, "suspend"), "suspend without shutdownAfterJobFinishes")
    elif spec.get("suspend") is True and spec.get("clusterSelector"):
        yield Problem("ray-job", (*where, "suspend"), "suspend of a job on a cluster that is there already")
    deadline = whole(spec.get("activeDeadlineSeconds"))
    if deadline is not None and deadline <= 0:
        yield Problem("ray-job", (*where, "activeDeadlineSeconds"), f"{deadline} is not above 0")
    if spec.get("submissionMode") == "InteractiveMode" and (whole(spec.get("backoffLimit")) or 0) > 0:
        yield Problem("ray-job", (*where, "backoffLimit"), "InteractiveMode does not try again")
    for key in ("ttlSecondsAfterFinished", "backoffLimit"):
        number = whole(spec.get(key))
        if number is not None and number < 0:
            yield Problem("ray-job", (*where, key), f"{number} is below 0")
    template = spec.get("submitterPodTemplate")
    if isinstance(template, dict):
        yield from check_template(template, (*where, "submitterPodTemplate"), ("OnFailure", "Never"), ())
