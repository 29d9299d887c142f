"""What differs from one deployment on Kubernetes to the next, typed. Manifests and serveConfigV2 are made of it: every
fact has one home.

Unknown keys are errors. Quantities are Kubernetes' own, as in `500m` and `4Gi`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.logs import ObservabilityConfig
from actors.options import Dtype
from cluster.deploy.ports import what_ray_does_at
from cluster.deploy.validate.quantity import parse_quantity

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
Name = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]  # 40 characters: KubeRay adds its own
Replicas = Annotated[int, Field(ge=0, le=1024)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]

PROXY_DRAIN_S = 30  # Serve's proxies wait at least as long before they end
GRACE_MARGIN_S = 20

_LEAST_OBJECT_STORE = 75 * 2**20  # bytes; Ray starts with no less


def number_of(quantity: str) -> float:
    """`500m` is 0.5, `1Ki` is 1024. Raises ValueError for what is no quantity."""
    number = parse_quantity(quantity)
    if number is None:
        raise ValueError(f"{quantity!r} is no quantity")
    return float(number)


def times(quantity: str, factor: float) -> str:
    """Rounded up: to mebibytes, or below those to thousandths."""
    value = number_of(quantity) * factor
    return f"{math.ceil(value / 2**20)}Mi" if value >= 2**20 else f"{math.ceil(value * 1000)}m"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageValues(_Section):
    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")] = "paceline"
    # None: the version of this package
    tag: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] | None = None
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None  # counts more than the tag
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: tuple[Name, ...] = ()


class ModelValues(_Section):
    """Weights are never in the image: they lie on a volume that every Ray pod mounts."""

    target: str = "/models/target"  # a directory on the volume, or with `prepare` a name of `paceline model list`
    draft: str = "none"  # likewise; auto: the drafter that is built for the target; none
    served_name: str | None = None
    claim: Name = "paceline-models"
    create_claim: Quantity | None = None  # the size of a claim to be made; None: it is there
    prepare: bool = False  # init containers fetch the model and build the drafter; the volume is then writable


class PodValues(_Section):
    """A group of Ray pods. Memory is limit and request alike."""

    cpu: Quantity
    memory: Quantity
    ray_cpus: Annotated[int, Field(ge=0, le=1024)]  # that Ray schedules on a pod
    shm: Quantity = "512Mi"  # of /dev/shm, part of the memory; half of it is Ray's object store
    scratch: Quantity = "4Gi"  # of /tmp, where Ray keeps logs and sockets
    node_selector: dict[str, str] = {}
    gpus: Annotated[int, Field(ge=0, le=16)] = 0  # nvidia.com/gpu

    @model_validator(mode="after")
    def _room_for_the_object_store(self) -> Self:
        if number_of(self.shm) < 2 * _LEAST_OBJECT_STORE:
            raise ValueError(f"shm is {self.shm}; the least is {2 * _LEAST_OBJECT_STORE >> 20}Mi")
        if number_of(self.shm) >= number_of(self.memory):
            raise ValueError(f"shm is {self.shm}; it must be less than memory, {self.memory}, which it is part of")
        return self


class ScaledValues(PodValues):
    min: Replicas = 1
    max: Replicas = 1
    idle_timeout_s: Seconds = 600  # without work for so long, a pod above the minimum goes
    priority: Annotated[int, Field(ge=0, le=1000)] = 0  # of groups that wait for nodes, the highest is first

    @model_validator(mode="after")
    def _bounds(self) -> ScaledValues:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}; it must not exceed max, {self.max}")
        return self


class TargetValues(ScaledValues):
    """One pod holds one target group: all ranks of its tensor parallelism."""

    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    dtype: Dtype = "float32"
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    kv_cache_tokens: Annotated[int, Field(ge=256)] | None = None
    start_timeout_s: Seconds = 600

    @model_validator(mode="after")
    def _a_pod_holds_its_ranks(self) -> TargetValues:
        if self.gpus and self.gpus < self.tensor_parallel:
            raise ValueError(f"gpus is {self.gpus}; tensor_parallel {self.tensor_parallel} needs as many in one pod")
        if self.ray_cpus < self.tensor_parallel + 1:
            raise ValueError(f"ray_cpus is {self.ray_cpus}; it must exceed tensor_parallel, {self.tensor_parallel}")
        return self


class DraftValues(ScaledValues):
    dtype: Dtype = "float32"


class RouterValues(ScaledValues):
    """Pods with routers and gateways, the only ones that clients reach."""

    max_running: Annotated[int, Field(ge=1, le=4096)] = 16
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64
    readiness: Literal["http", "grpc"] = "http"  # the probe: /readyz, or grpc.health.v1 on the gRPC port
    pods_that_stay: Replicas = 0  # of a PodDisruptionBudget, below min; 0: none

    @model_validator(mode="after")
    def _some_may_go(self) -> Self:
        if self.pods_that_stay and self.pods_that_stay >= self.min:
            raise ValueError(f"pods_that_stay is {self.pods_that_stay}; with min {self.min} no node could be drained")
        return self


class GatewayValues(_Section):
    http_port: Annotated[int, Field(ge=1024, le=65_535)] = 8000
    grpc_port: Annotated[int, Field(ge=1024, le=65_535)] = 9000
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    request_timeout_s: Seconds = 600  # the longest stream
    grpc_reflection: bool = True

    @model_validator(mode="after")
    def _ports_are_free(self) -> Self:
        for name, port in (("http_port", self.http_port), ("grpc_port", self.grpc_port)):
            if (taken := what_ray_does_at(port)) is not None:
                raise ValueError(f"{name} is {port}; that is where Ray has {taken}")
        return self


class CacheValues(_Section):
    """The Redis role that routers learn through. Losing it costs speed."""

    memory: Quantity = "512Mi"  # of data; the pod gets half as much again
    storage: Quantity | None = "2Gi"  # None: data end with the pod
    cpu: Quantity = "250m"
    secret: Name | None = "paceline-cache"  # with a key `password`; None: no password


class GcsValues(_Section):
    """The Redis role that keeps Ray's own state, so that a head that is restarted finds its cluster again."""

    enabled: bool = True
    storage: Quantity = "1Gi"
    cpu: Quantity = "100m"
    memory: Quantity = "256Mi"
    secret: Name = "paceline-gcs"  # with a key `password`


class TenantsValues(_Section):
    secret: Name | None = "paceline-tenants"  # with `tenants.json`, of `paceline tenant`; None: no keys are asked for
    allow_shared: bool = False


class UpgradeValues(_Section):
    type: Literal["None", "NewCluster", "NewClusterWithIncrementalUpgrade"] = "NewCluster"
    gateway_class: Name | None = None  # of the incremental upgrade: it needs the Gateway API
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 50
    step_percent: Annotated[int, Field(ge=0, le=100)] = 25
    interval_s: Seconds = 30
    # An upgrade in place starts the new target group beside the old one; else it first ends the old one, and requests
    # wait until the new one is loaded.
    second_target: bool = False

    @model_validator(mode="after")
    def _incremental(self) -> UpgradeValues:
        if self.type == "NewClusterWithIncrementalUpgrade" and self.gateway_class is None:
            raise ValueError(f"type is {self.type!r}; it needs a gateway_class")
        if self.step_percent > self.max_surge_percent:
            raise ValueError(f"step_percent is {self.step_percent}; the limit is max_surge_percent")
        return self


class SchedulingValues(_Section):
    priority_classes: bool = True  # cluster-wide objects: target before draft
    spread: bool = True  # routers over zones, targets over nodes


class NetworkValues(_Section):
    """Who may reach what, for the component `multi-tenant`. Namespaces by name."""

    clients: tuple[Name, ...] = ("gateway-system",)  # that reach the routers
    monitoring: tuple[Name, ...] = ("monitoring",)  # that read metrics and take traces
    collector_port: Annotated[int, Field(ge=1, le=65_535)] = 4318  # of `observability.otlp_endpoint`
    operator: Name = "kuberay-system"
    gateway_class: Name = "gateway"  # of the Gateway that ends TLS
    tls_secret: Name = "paceline-tls"
    host: Annotated[str, Field(pattern=r"^[a-z0-9*][a-z0-9.-]*$")] = "paceline.example.com"


class SecurityValues(_Section):
    user: Annotated[int, Field(gt=10_000, le=2**31)] = 10_001  # of the image, too
    sandbox: Name | None = None  # a RuntimeClass


class DeployValues(_Section):
    """One deployment. `namespace` is where its objects live."""

    namespace: Name = "paceline"
    name: Name = "paceline"
    autoscaling: bool = True  # Ray autoscaler v2 adds and removes pods of groups
    image: ImageValues = ImageValues()
    model: ModelValues = ModelValues()
    head: PodValues = PodValues(cpu="1", memory="4Gi", ray_cpus=0)
    router: RouterValues = RouterValues(cpu="2", memory="4Gi", ray_cpus=3, min=1, max=1, priority=30)
    target: TargetValues = TargetValues(cpu="2", memory="4Gi", ray_cpus=2, priority=20, idle_timeout_s=1800)
    draft: DraftValues = DraftValues(cpu="1", memory="3Gi", ray_cpus=1, max=2, priority=10, idle_timeout_s=300)
    gateway: GatewayValues = GatewayValues()
    cache: CacheValues = CacheValues()
    gcs: GcsValues = GcsValues()
    tenants: TenantsValues = TenantsValues()
    observability: ObservabilityConfig = ObservabilityConfig(log_format="json", log_level="info")
    upgrade: UpgradeValues = UpgradeValues()
    scheduling: SchedulingValues = SchedulingValues()
    network: NetworkValues = NetworkValues()
    security: SecurityValues = SecurityValues()

    @model_validator(mode="after")
    def _parts_agree(self) -> DeployValues:
        if self.upgrade.type == "NewClusterWithIncrementalUpgrade" and not self.autoscaling:
            raise ValueError("upgrade.type is incremental; that needs autoscaling")
        if self.upgrade.second_target and not (self.autoscaling and self.target.max > self.target.min):
            given = f"autoscaling {str(self.autoscaling).lower()}, target.max {self.target.max}"
            limit = f"it needs autoscaling, and target.max above target.min, {self.target.min}"
            raise ValueError(f"upgrade.second_target is true with {given}; {limit}")
        if self.gateway.http_port == self.gateway.grpc_port:
            raise ValueError(f"gateway.http_port and gateway.grpc_port are both {self.gateway.http_port}")
        if self.head.ray_cpus or self.head.gpus:
            raise ValueError("head.ray_cpus and head.gpus must be 0: the head does no work")
        needed = self.router_cpus_needed
        if self.router.ray_cpus * self.router.min < needed:
            raise ValueError(f"router.ray_cpus: {self.router.min} pods hold less than the {needed} that are needed")
        return self

    @property
    def router_cpus_needed(self) -> int:
        """A CPU for each router and each gateway, half of it for the one that takes its place when the application is
        updated, while the old one finishes its streams. Every target group that there may be has one router."""
        return self.target.max + self.gateway.replicas

    @property
    def grace_s(self) -> int:
        """Grace period of a pod with open streams: what the proxy waits, the longest stream and a margin."""
        return PROXY_DRAIN_S + self.gateway.request_timeout_s + GRACE_MARGIN_S
