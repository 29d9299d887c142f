"""The deployments that are shipped as overlays, as values."""

from __future__ import annotations

from cluster.deploy.values import (
    CacheValues,
    DeployValues,
    DraftValues,
    GatewayValues,
    GcsValues,
    ModelValues,
    PodValues,
    RouterValues,
    SchedulingValues,
    TargetValues,
    TenantsValues,
    UpgradeValues,
)

# What all overlays are differences from: one router, one target, up to two draft workers, on CPUs.
BASE = DeployValues(
    model=ModelValues(draft="/models/draft"),
    gcs=GcsValues(enabled=False),
    scheduling=SchedulingValues(priority_classes=False, spread=False),
)

# kind or minikube: one node, CPUs, the demo model; reached by port-forward, so without keys.
LAPTOP = DeployValues(
    model=ModelValues(target="smollm2", draft="auto", create_claim="2Gi", prepare=True),
    head=PodValues(cpu="500m", memory="2Gi", ray_cpus=0),
    router=RouterValues(cpu="500m", memory="2Gi", ray_cpus=2, priority=30),
    target=TargetValues(cpu="1", memory="3Gi", ray_cpus=2, priority=20, kv_cache_tokens=16_384),
    draft=DraftValues(cpu="500m", memory="2Gi", ray_cpus=1, max=1, priority=10),
    gateway=GatewayValues(request_timeout_s=120),
    cache=CacheValues(memory="64Mi", storage=None, cpu="100m", secret=None),
    gcs=GcsValues(enabled=False),
    tenants=TenantsValues(secret=None),
    upgrade=UpgradeValues(type="None"),
    scheduling=SchedulingValues(priority_classes=False, spread=False),
    autoscaling=False,
)

# One machine with two GPUs, or one that is shared as two: a model of some ten billion parameters, and its draft model.
SINGLE_NODE_GPU = DeployValues(
    model=ModelValues(target="/models/target", draft="/models/draft"),
    head=PodValues(cpu="1", memory="4Gi", ray_cpus=0),
    router=RouterValues(cpu="2", memory="4Gi", ray_cpus=3, priority=30, max_running=32, max_waiting=128),
    target=TargetValues(
        cpu="4", memory="48Gi", ray_cpus=4, gpus=1, priority=20, dtype="bfloat16", shm="4Gi", scratch="16Gi",
        idle_timeout_s=1800, start_timeout_s=900,
    ),
    draft=DraftValues(
        cpu="2", memory="12Gi", ray_cpus=2, gpus=1, max=1, priority=10, dtype="bfloat16", idle_timeout_s=300
    ),
    gateway=GatewayValues(replicas=2),
    cache=CacheValues(memory="2Gi", storage="8Gi"),
    scheduling=SchedulingValues(spread=False),
)  # fmt: skip

# A 70B model on 8 GPUs of one node, drafts on smaller ones; highly available where that does not take a second target.
PROD_70B = DeployValues(
    model=ModelValues(target="/models/llama-70b", draft="/models/llama-1b", served_name="llama-70b"),
    head=PodValues(cpu="4", memory="16Gi", ray_cpus=0, scratch="16Gi"),
    router=RouterValues(
        cpu="4", memory="16Gi", ray_cpus=4, min=2, max=6, priority=30, max_running=64, max_waiting=512,
        pods_that_stay=1, scratch="8Gi", shm="4Gi",
    ),
    target=TargetValues(
        cpu="32", memory="256Gi", ray_cpus=16, gpus=8, tensor_parallel=8, priority=20, dtype="bfloat16", max=2,
        shm="32Gi", scratch="64Gi", idle_timeout_s=3600, start_timeout_s=1800, max_model_len=32_768,
        node_selector={"nvidia.com/gpu.product": "NVIDIA-H200"},
    ),
    draft=DraftValues(
        cpu="4", memory="24Gi", ray_cpus=2, gpus=1, min=1, max=8, priority=10, dtype="bfloat16", shm="2Gi",
        scratch="16Gi", idle_timeout_s=300, node_selector={"nvidia.com/gpu.product": "NVIDIA-L4"},
    ),
    gateway=GatewayValues(replicas=4, grpc_reflection=False),
    cache=CacheValues(memory="16Gi", storage="64Gi", cpu="2"),
    gcs=GcsValues(cpu="500m", memory="1Gi", storage="8Gi"),
    upgrade=UpgradeValues(type="NewClusterWithIncrementalUpgrade", gateway_class="gateway", second_target=True),
)  # fmt: skip

OVERLAYS = {"laptop": LAPTOP, "single-node-gpu": SINGLE_NODE_GPU, "prod-70b": PROD_70B}
WITH_COMPONENT = frozenset(("single-node-gpu", "prod-70b"))  # that take the component multi-tenant
