"""The whole cluster as a Serve application that a `serveConfigV2` names: `import_path: cluster.app:build`."""

# No `from __future__ import annotations` here: Serve reads the class of the arguments from the signature.

from dataclasses import replace
from typing import Any, Self

from pydantic import ValidationError
from ray import serve
from ray.serve.exceptions import RayServeException

from actors.errors import PacelineError
from actors.home import paceline_home
from actors.workers.ray_environment import is_loopback
from cluster.config import NO_CACHE, CacheConfig, ClusterConfig
from cluster.serve import ClusterPlan, cluster_application, device_elsewhere, plan_cluster
from cluster.validation import describe

_EVERYWHERE = "0.0.0.0"


class ServedConfig(ClusterConfig):
    """A cluster configuration that Serve creates. Raises RayServeException with a one-line message: after any other
    exception, Serve would build the application three more times."""

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise RayServeException(f"args: {describe(error)}") from None


def build(args: ServedConfig) -> serve.Application:
    """Serve parses the application's `args` as a cluster configuration, in which an unknown key is an error.

    Models must lie at the same path on every node; devices are those of the nodes where they run, which this one need
    not have (`auto` is what there is here). The deployment's own options say where the proxies listen, not
    `gateway`: so it is taken that others can reach them, and without tenants `tenants.open` must be true. Nothing is
    started beside the application: where `cache.url` is not set there is no shared cache, and draft workers wait for a
    drafter that is not built yet.

    Raises RayServeException for any fault of configuration or models.
    """
    if args.gateway.tls.certificate_file is not None:
        raise RayServeException("gateway.tls is for `paceline serve`: here Serve's own options open the ports")
    if is_loopback(args.gateway.host):
        args = args.model_copy(update={"gateway": args.gateway.model_copy(update={"host": _EVERYWHERE})})
    try:
        return cluster_application(plan_elsewhere(args))
    except PacelineError as error:
        raise RayServeException(str(error)) from None


def plan_elsewhere(config: ClusterConfig) -> ClusterPlan:
    """The plan of a cluster whose models run on other nodes than this one: Serve builds applications on the head, which
    has no GPU. Raises what `plan_cluster` raises."""
    plan = plan_cluster(config, paceline_home(), choose=device_elsewhere)
    if plan.drafters:
        return plan
    return replace(plan, config=config.model_copy(update={"cache": CacheConfig(url=NO_CACHE)}))
