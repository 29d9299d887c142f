"""The code that serveConfigV2 names beside its applications: autoscaling policies, request routers, actors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.finding import Location
from cluster.deploy.validate.tree import at, items

# Below an application, and below a deployment.
_OF_APPLICATIONS: tuple[Location, ...] = (("autoscaling_policy", "policy_function"),)
_OF_DEPLOYMENTS: tuple[Location, ...] = (
    ("autoscaling_config", "policy", "policy_function"),
    ("request_router_config", "request_router_class"),
)


def named_code(application: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """Import paths, and where they are in the application."""
    places = list(_OF_APPLICATIONS)
    for index, deployment in items(application, "deployments"):
        above: Location = ("deployments", index)
        places += [(*above, *place) for place in _OF_DEPLOYMENTS]
        places += [
            (*above, "deployment_actors", number, "actor_class") for number, _ in items(deployment, "deployment_actors")
        ]
    for place in places:
        path = at(application, *place)
        if isinstance(path, str):
            yield place, path


def without_code(config: dict[str, Any]) -> dict[str, Any]:
    """A copy that names none of it but the actors': Ray's models import policies and request routers as they are made,
    and that would run whatever a file names."""
    config = copy.deepcopy(config)
    for _, application in items(config, "applications"):
        for place, _ in list(named_code(application)):
            if place[-1] != "actor_class":
                del at(application, *place[:-1])[place[-1]]
    return config
