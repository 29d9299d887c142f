"""All objects of a deployment."""

from __future__ import annotations

from cluster.deploy.access import account, claim, disruption_budgets, namespace, priorities, service
from cluster.deploy.pods import Object
from cluster.deploy.ray_service import ray_service
from cluster.deploy.redis import cache_redis, gcs_redis
from cluster.deploy.values import DeployValues


def manifests(values: DeployValues) -> list[Object]:
    """In the order in which they are of use; `cluster.deploy.tenancy` has what the component multi-tenant adds."""
    return [
        namespace(values),
        account(values),
        *priorities(values),
        *claim(values),
        *gcs_redis(values),
        *cache_redis(values),
        ray_service(values),
        service(values),
        *disruption_budgets(values),
    ]


def identity(manifest: Object) -> tuple[str, str]:
    """Kind and name: unique within a deployment."""
    return manifest["kind"], manifest["metadata"]["name"]
