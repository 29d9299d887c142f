"""Starting Ray on this machine, and joining one that runs."""

from __future__ import annotations

import math
import os
import re
import socket

from actors.workers.ray_environment import leave_loopback_addresses, local_ray_addresses, use_own_token
from cluster.errors import ConfigError
from cluster.ray_names import APPLICATION

_HOST_AND_PORT = r".+:[0-9]+"


def prepare_to_join(address: str) -> None:
    """Call before Ray is imported. Raises ConfigError if nothing listens at the address, or if it is auto and no or
    several Ray clusters run on this machine. Ray itself would retry for minutes."""
    told = f"--address is {address!r}"
    if address == "auto":
        if os.environ.get("RAY_ADDRESS"):
            address = os.environ["RAY_ADDRESS"]
            told = f"RAY_ADDRESS is {address!r}"
        elif len(found := sorted(local_ray_addresses())) == 1:
            address = found[0]
        else:
            several = f"several run on this machine; name one of {', '.join(found)}"
            raise ConfigError(f"{told}: {several if found else 'no Ray cluster runs on this machine'}")
    if re.fullmatch(_HOST_AND_PORT, address) and "/" not in address:
        if not listens(address):
            raise ConfigError(f"{told}: no Ray cluster can be joined there: nobody listens at {address}")
        leave_loopback_addresses(address)
        use_own_token(address)


def start_ray(num_cpus: float, address: str | None) -> None:
    """Start Ray here, with room for `num_cpus` at least, or join the cluster at an address. Raises ConfigError."""
    import ray

    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="WARNING",
                namespace=APPLICATION,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level="WARNING", namespace=APPLICATION)
    except Exception as error:  # Ray raises whatever its processes and its transport do
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if address is None:
            raise ConfigError(f"Ray cannot be started on this machine: {reason}") from None
        raise ConfigError(f"--address is {address!r}: no Ray cluster can be joined there: {reason}") from None


def gpus_of_nodes() -> list[int]:
    """GPUs of each node of the Ray cluster that this process has joined."""
    import ray

    return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError):
        return False
    return True
