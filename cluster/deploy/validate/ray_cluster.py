"""What KubeRay's operator (1.7) refuses after the API server has accepted it, and what then never starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.shown import shown
from cluster.deploy.validate.tree import at, items, mapping, strings, whole

# Kind: where its spec of a cluster is, and the most letters of its name.
_KINDS: dict[str, tuple[Location, int]] = {
    "RayCluster": (("spec",), 53),
    "RayService": (("spec", "rayClusterConfig"), 47),
    "RayJob": (("spec", "rayClusterSpec"), 47),
}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_V2_VARIABLE = "RAY_enable_autoscaler_v2"
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
    def environment(self) -> dict[str, Any]:
        """Values of variables by their names."""
        return {str(variable.get("name")): variable.get("value") for _, variable in items(self.container, "env")}


def is_ray(manifest: dict[str, Any]) -> bool:
    return str(manifest.get("apiVersion")).startswith("ray.io/") and manifest.get("kind") in _KINDS


def cluster_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], Location]:
    """The spec of the cluster in a manifest of KubeRay, and where it is."""
    where, _ = _KINDS[str(manifest["kind"])]
    return mapping(manifest, *where), where


def groups_of(cluster: dict[str, Any], where: Location) -> list[Group]:
    """The head first."""
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
    elif name and not _NAME.fullmatch(name):
        yield Problem("ray-name", ("metadata", "name"), f"{name!r} is no DNS label that starts with a letter")
    cluster, where = cluster_of(manifest)
    if cluster:
        yield from _check_cluster(manifest, cluster, where)
    if kind == "RayService":
        yield from _check_service(mapping(manifest, "spec"), cluster)


def _check_cluster(manifest: dict[str, Any], cluster: dict[str, Any], where: Location) -> Iterator[Problem]:
    groups = groups_of(cluster, where)
    autoscales = has_autoscaler(cluster)
    options = mapping(cluster, "autoscalerOptions")
    # Before a version was a field, a variable asked for it.
    asks = str(groups[0].environment.get(_V2_VARIABLE)).lower() in ("1", "true")
    is_v2 = autoscales and (options.get("version") == "v2" or asks)
    version = _version(cluster.get("rayVersion"))
    names = set[str]()
    for group in groups:
        yield from _check_group(group, autoscales, is_v2, version)
        yield from _check_container(group, autoscales)
        if not group.is_head:
            if group.name in names:
                yield Problem("ray-group-name", (*group.where, "groupName"), f"{group.name!r} names two groups")
            names.add(group.name)
    yield from _check_storage(manifest, cluster, where, groups[0])
    if options and not autoscales:
        what = "autoscalerOptions without enableInTreeAutoscaling: true"
        yield Problem("ray-autoscaler-off", (*where, "autoscalerOptions"), what)
    if _V2_VARIABLE in groups[0].environment and (options.get("version") if autoscales else asks):
        what = "beside autoscalerOptions.version" if autoscales else "without enableInTreeAutoscaling: true"
        yield Problem("ray-autoscaler-v2", (*_container(groups[0]), "env"), f"{_V2_VARIABLE} {what}")
    access = mapping(cluster, "authOptions")
    if access.get("mode") == "token" and (version is None or version < (2, 52)):
        given = cluster.get("rayVersion") or "not given"
        yield Problem("ray-version", (*where, "authOptions"), f"mode token needs rayVersion 2.52.0; it is {given}")
    for field, gate in _GATED:
        value = cluster.get(field)
        if isinstance(value, dict) and (value or field == "networkPolicy") and value.get("enabled") is not False:
            yield Problem("ray-alpha-gate", (*where, field), f"{field} needs the operator's gate {gate}")


def _container(group: Group) -> Location:
    return (*group.where, "template", "spec", "containers", 0)


def _check_container(group: Group, autoscales: bool) -> Iterator[Problem]:
    """KubeRay takes the first container of a pod for Ray's."""
    spec = mapping(group.spec, "template", "spec")
    names = [str(container.get("name")) for _, container in items(spec, "containers")]
    if any(name.startswith("ray-") for name in names[1:]) and not names[0].startswith("ray-"):
        yield Problem("ray-container", (*_container(group), "name"), f"the first container is {names[0]!r}")
    gpus = sum(parse_quantity(amount) or 0 for name, amount in _limits(group).items() if _is_gpu(name))
    told = parse_quantity(mapping(group.spec, "resources").get("GPU")) or 0
    if told > gpus and any(_is_gpu(name) for name in _limits(group)):
        place = (*group.where, "resources", "GPU")
        yield Problem("ray-container", place, f"Ray is told of {told} GPUs; the container's limits have {gpus}")
    mounts = {str(mount.get("mountPath")).rstrip("/"): mount for _, mount in items(group.container, "volumeMounts")}
    parameters = mapping(group.spec, "rayStartParams")
    is_read_only = at(group.container, "securityContext", "readOnlyRootFilesystem") is True
    if is_read_only and not {"/tmp", "/tmp/ray"} & mounts.keys() and "temp-dir" not in parameters:
        yield Problem("ray-container", (*_container(group), "volumeMounts"), "Ray writes to /tmp, which is read-only")
    shm = mapping(mounts, "/dev/shm").get("name")
    sizes = [at(v, "emptyDir", "sizeLimit") for _, v in items(spec, "volumes") if v.get("name") == shm]
    room = parse_quantity(sizes[0]) if sizes else None
    store = parse_quantity(parameters.get("object-store-memory"))
    is_elsewhere = "plasma-directory" in parameters or "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE" in group.environment
    if room is not None and store is not None and store > room and not is_elsewhere:
        place = (*group.where, "rayStartParams", "object-store-memory")
        yield Problem("ray-container", place, f"{store:f} bytes are more than /dev/shm has, {sizes[0]}")
    tokens = [volume for _, volume in items(spec, "volumes") if "projected" in volume]
    if group.is_head and autoscales and spec.get("automountServiceAccountToken") is False and not tokens:
        place = (*group.where, "template", "spec", "automountServiceAccountToken")
        yield Problem(
            "ray-container", place, "the autoscaler beside the head asks Kubernetes for pods, with this token"
        )


def _limits(group: Group) -> dict[str, Any]:
    return mapping(group.container, "resources", "limits")


def _is_gpu(name: object) -> bool:
    return re.search(r"/(gpu|gpu\.shared|mig-.*|i915|xe)$", str(name)) is not None


def _check_group(group: Group, autoscales: bool, is_v2: bool, version: tuple[int, ...] | None) -> Iterator[Problem]:
    parameters = mapping(group.spec, "rayStartParams")
    given = [name for name in _RESOURCE_PARAMETERS if parameters.get(name) not in (None, "")]
    if given and mapping(group.spec, "resources"):
        what = f"resources, and {', '.join(given)} in rayStartParams"
        yield Problem("ray-start", (*group.where, "resources"), what)
    if "labels" in parameters:
        yield Problem("ray-start", (*group.where, "rayStartParams", "labels"), "labels among the start parameters")
    for name, text in parameters.items():
        place = (*group.where, "rayStartParams", name)
        if not isinstance(text, str):
            yield Problem("schema-type", place, f"{shown(text, place)} of {name} is no text; put it in quotes")
        elif name in ("num-cpus", "num-gpus") and not re.fullmatch(r"\d+", text):
            yield Problem("ray-start", place, f"{text!r} of {name} is no whole number")
    restart = at(group.spec, "template", "spec", "restartPolicy")
    if is_v2 and restart not in (None, "", "Never"):
        place = (*group.where, "template", "spec", "restartPolicy")
        yield Problem("ray-autoscaler-v2", place, f"restartPolicy is {restart}; with autoscaler v2 it must be Never")
    # Only images of Ray itself say in their tag which Ray is inside.
    match = re.search(r"(?:^|/)ray(?:-ml|-llm)?:(\d+\.\d+\.\d+)", str(group.container.get("image")))
    if match and version and _version(match[1]) != version:
        what = f"the image has Ray {match[1]}, rayVersion is {'.'.join(map(str, version))}"
        yield Problem("ray-image-version", (*_container(group), "image"), what)
    if not group.is_head:
        yield from _check_worker(group, autoscales, is_v2, version)


def _check_worker(group: Group, autoscales: bool, is_v2: bool, version: tuple[int, ...] | None) -> Iterator[Problem]:
    least, most = whole(group.spec.get("minReplicas")) or 0, whole(group.spec.get("maxReplicas"))
    replicas = whole(group.spec.get("replicas"))
    for key, limit in (("replicas", 0), ("minReplicas", 0), ("maxReplicas", 0), ("numOfHosts", 1)):
        number = whole(group.spec.get(key))
        if number is not None and number < limit:
            yield Problem("ray-replicas", (*group.where, key), f"{number} is below {limit}")
    if most is not None and least > most:
        yield Problem("ray-replicas", (*group.where, "minReplicas"), f"minReplicas {least} is over maxReplicas {most}")
    elif replicas is not None and (replicas < least or (most is not None and replicas > most)):
        what = f"replicas {replicas} is not from minReplicas {least} to maxReplicas {most}"
        yield Problem("ray-replicas-outside", (*group.where, "replicas"), what)
    if group.spec.get("suspend") is True and autoscales:
        yield Problem("ray-suspend", (*group.where, "suspend"), "a group is suspended while the autoscaler runs")
    priority = group.spec.get("priority") or None  # by its definition a group without one has 0
    for key, value in (("idleTimeoutSeconds", group.spec.get("idleTimeoutSeconds")), ("priority", priority)):
        if value is not None and not is_v2:
            yield Problem("ray-autoscaler-v2", (*group.where, key), f"{key} of a group needs autoscaler v2")
    if priority is not None and is_v2 and (version is None or version < (2, 56)):
        yield Problem("ray-version", (*group.where, "priority"), "priority of a group needs rayVersion 2.56.0 or later")


def _version(text: object) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None
    return tuple(int(part or 0) for part in match.groups()) if match else None


def _check_storage(
    manifest: dict[str, Any], cluster: dict[str, Any], where: Location, head: Group
) -> Iterator[Problem]:
    """GCS fault tolerance: only through its own field."""
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = mapping(manifest, "metadata", "annotations")
    forbidden: list[tuple[Location, Any, tuple[str, ...]]] = [
        ((*head.where, "rayStartParams"), head.spec.get("rayStartParams"), ("redis-username",)),
        ((*_container(head), "env"), head.environment, ("REDIS_USERNAME",)),
    ]
    if isinstance(options, dict):
        legacy = ("ray.io/ft-enabled", "ray.io/external-storage-namespace")
        forbidden += [
            (forbidden[0][0], forbidden[0][1], ("redis-password",)),
            (forbidden[1][0], forbidden[1][1], ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS")),
            (("metadata", "annotations"), annotations, legacy),
        ]
        yield from _check_backend(options, (*where, "gcsFaultToleranceOptions"))
    elif "RAY_REDIS_ADDRESS" in head.environment and str(annotations.get("ray.io/ft-enabled")).lower() != "true":
        yield Problem("ray-gcs", (*_container(head), "env"), "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions")
    for place, holder, names in forbidden:
        for name in names:
            if name in mapping(holder):
                yield Problem("ray-gcs", place, f"{name} instead of, or beside, gcsFaultToleranceOptions")


def _check_backend(options: dict[str, Any], where: Location) -> Iterator[Problem]:
    if options.get("backend") == "rocksdb":
        yield Problem("ray-alpha-gate", (*where, "backend"), "rocksdb needs the operator's gate for it")
    fields = {"rocksdb": ("redisAddress", "redisUsername", "redisPassword")}.get(
        str(options.get("backend")), ("storage",)
    )
    for name in fields:
        if options.get(name) is not None:
            what = f"{name} with backend {options.get('backend') or 'redis'}"
            yield Problem("ray-gcs", (*where, name), what)
    if options.get("backend") != "rocksdb" and not options.get("redisAddress"):
        yield Problem("ray-gcs", (*where, "redisAddress"), "backend redis without redisAddress")


def _check_service(spec: dict[str, Any], cluster: dict[str, Any]) -> Iterator[Problem]:
    for name in ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"):
        if spec.get(name) is not None:
            yield Problem("ray-dead-field", ("spec", name), f"{name} has no effect")
    base: Location = ("spec", "rayClusterConfig")
    if at(cluster, "headGroupSpec", "headService", "metadata", "name"):
        place = (*base, "headGroupSpec", "headService", "metadata", "name")
        yield Problem("ray-service", place, "the head service of a RayService has a name")
    if at(cluster, "authOptions", "enableK8sTokenAuth"):
        place = (*base, "authOptions", "enableK8sTokenAuth")
        yield Problem("ray-service", place, "a RayService cannot have tokens of Kubernetes")
    yield from _check_serve_ports(spec, cluster)
    delay = whole(spec.get("rayClusterDeletionDelaySeconds"))
    if delay is not None and delay < 0:
        yield Problem("ray-upgrade", ("spec", "rayClusterDeletionDelaySeconds"), f"{delay} is below 0")
    strategy = mapping(spec, "upgradeStrategy")
    kind = strategy.get("type")
    if kind is not None and kind not in _UPGRADES:
        what = f"{kind!r}; it must be one of {', '.join(_UPGRADES)}"
        yield Problem("ray-upgrade", ("spec", "upgradeStrategy", "type"), what)
    if kind == "NewClusterWithIncrementalUpgrade" and cluster:
        yield from _check_incremental(strategy, cluster, ("spec", "upgradeStrategy"))


def _check_serve_ports(spec: dict[str, Any], cluster: dict[str, Any]) -> Iterator[Problem]:
    """The operator creates Serve's service from ports of the head with certain names, or from default ports if the head
    lists none. `serveService` can define them too, except in an incremental upgrade."""
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
