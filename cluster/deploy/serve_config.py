"""serveConfigV2: what KubeRay hands to Ray Serve, made of values, as text.

Ray ignores keys that it does not know, so nothing is written here that the models of Ray and of Paceline do not name.
"""

from __future__ import annotations

from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.deploy.ports import REDIS_PORT
from cluster.deploy.values import DeployValues, number_of
from cluster.gateway import SERVICER_FUNCTIONS

IMPORT_PATH = "cluster.app:build"
TENANTS_FILE = "/etc/paceline/tenants/tenants.json"
CACHE_PASSWORD_FILE = "/etc/paceline/cache/password"
_SHARE = 0.001  # of a group's marker resource: replicas land on its pods, as many as their CPUs and GPUs allow
_ROUTER_CPUS = 0.5  # of a router and of a gateway, so that there is room for their successors: see `router_cpus_needed`
_NEW_BEFORE_OLD = {"max_surge_percent": 100}  # else Serve stops what it replaces before it starts the new one


def cluster_arguments(values: DeployValues) -> dict[str, Any]:
    """The arguments of `cluster.app:build`: the keys of ClusterConfig that are not left at their defaults."""
    gpu = values.target.gpus > 0
    groups = max(1, values.target.min)
    target: dict[str, Any] = {
        "model": values.model.target,
        "served_name": values.model.served_name,
        "dtype": values.target.dtype,
        "device": "cuda" if gpu else "cpu",
        "tensor_parallel": values.target.tensor_parallel,
        "groups": groups if groups > 1 else None,
        "max_groups": max(groups, values.target.max),
        "max_model_len": values.target.max_model_len,
        "kv_cache_tokens": values.target.kv_cache_tokens,
        "kv_cache_fraction": 0.85 if gpu else None,
        "start_timeout_s": values.target.start_timeout_s,
    }
    draft: dict[str, Any] = {
        "model": values.model.draft,
        "workers": values.draft.min,
        "max_workers": values.draft.max,
        "dtype": values.draft.dtype,
        "device": "cuda" if values.draft.gpus else "cpu",
    }
    cache: dict[str, Any] = {"url": f"redis://{values.name}-cache:{REDIS_PORT}/0"}
    if values.cache.secret is not None:
        cache["password_file"] = CACHE_PASSWORD_FILE
    tenants: dict[str, Any] = {"open": True}
    if values.tenants.secret is not None:
        tenants = {"file": TENANTS_FILE, "allow_shared": values.tenants.allow_shared}
    arguments = {
        "target": {key: value for key, value in target.items() if value is not None},
        "draft": draft,
        "router": {"max_running": values.router.max_running, "max_waiting": values.router.max_waiting},
        "gateway": {
            "host": "0.0.0.0",
            "http_port": values.gateway.http_port,
            "grpc_port": values.gateway.grpc_port,
            "replicas": values.gateway.replicas,
            "request_timeout_s": values.gateway.request_timeout_s,
            "grpc_reflection": values.gateway.grpc_reflection,
        },
        "tenants": tenants,
        "cache": cache,
        "observability": values.observability.model_dump(exclude_defaults=True),
    }
    ClusterConfig.model_validate(arguments)
    return arguments


def serve_config(values: DeployValues) -> dict[str, Any]:
    """What `ray.serve.schema.ServeDeploySchema` reads."""
    gateway = values.gateway
    deployments = [
        {
            **_placed("Gateway", "router", num_cpus=_ROUTER_CPUS),
            **_NEW_BEFORE_OLD,
            # A gateway that was replaced finishes its streams; those of a router go on at another one.
            "graceful_shutdown_timeout_s": gateway.request_timeout_s,
        },
        {**_placed("Router", "router", num_cpus=_ROUTER_CPUS), **_NEW_BEFORE_OLD},
        _target(values),
    ]
    if values.model.draft != "none":
        # As many replicas a pod as it has GPUs, or without them one.
        deployments.append(_placed("DraftPool", "draft", num_cpus=1, num_gpus=1 if values.draft.gpus else 0))
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": "0.0.0.0",
            "port": gateway.http_port,
            "request_timeout_s": gateway.request_timeout_s,
            "keep_alive_timeout_s": 90,
        },
        "grpc_options": {
            "port": gateway.grpc_port,
            "grpc_servicer_functions": list(SERVICER_FUNCTIONS),
            "request_timeout_s": gateway.request_timeout_s,
            "enable_reflection": gateway.grpc_reflection,
        },
        "applications": [
            {
                "name": "paceline",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": cluster_arguments(values),
                "deployments": deployments,
            }
        ],
    }


def serve_config_text(values: DeployValues) -> str:
    return yaml.safe_dump(serve_config(values), sort_keys=False, width=120)


def _placed(name: str, group: str, num_cpus: float, num_gpus: int = 0) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": num_cpus, "resources": {group: _SHARE}}
    if num_gpus:
        options["num_gpus"] = num_gpus
    return {"name": name, "ray_actor_options": options}


def _target(values: DeployValues) -> dict[str, Any]:
    """The shell and its ranks, all in one pod."""
    shell = {"CPU": 0.1, "target": _SHARE}
    rank = {"CPU": 1.0, "target": _SHARE} | ({"GPU": 1.0} if values.target.gpus else {})
    return {
        "name": "TargetGroup",
        **(_NEW_BEFORE_OLD if values.upgrade.second_target else {}),
        "ray_actor_options": {"num_cpus": 0.1, "resources": {"target": _SHARE}},
        "placement_group_bundles": [shell, *(dict(rank) for _ in range(values.target.tensor_parallel))],
        "placement_group_strategy": "STRICT_PACK",
    }


def cache_bytes(values: DeployValues) -> int:
    return int(number_of(values.cache.memory))
