"""`paceline scale`: how many draft workers or target groups a running cluster has, and which model draft workers run,
set by hand.

Nothing is restarted: Serve adds or removes replicas as its autoscaling policy says, which is told the number by way of
the directory, and draft workers load another model one after the other (`actors.workers.draft_pool`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from actors.errors import Unavailable
from actors.pool_names import DRAFT_POOL, FIRST_POOL, deployment_of, pool_of_deployment
from cluster.cli.model_change import change_model
from cluster.cli.ray_connection import prepare_to_join, start_ray
from cluster.errors import ConfigError
from cluster.ray_names import APPLICATION, DIRECTORY

if TYPE_CHECKING:
    from actors.workers.directory import Role
    from actors.workers.directory_actor import DirectoryHandle

app = typer.Typer(no_args_is_help=True, help="Set the number of draft workers or target groups of a running cluster.")

_LOOK_AGAIN_S = 0.5
_DIRECTORY_S = 30.0

_Address = typer.Option("auto", help="The Ray cluster. auto: the one of this machine, or of $RAY_ADDRESS.")
_Name = typer.Option(FIRST_POOL, "--pool", help="Which draft model's: draft, or a name of more_drafts.")
_Wait = typer.Option(0.0, "--wait-s", min=0.0, help="Seconds to wait until so many run; not with auto.")


@dataclass(frozen=True, slots=True)
class _Pool:
    """What a command scales."""

    role: Role
    deployment: str  # its name in Serve
    noun: str
    option: str
    name: str = FIRST_POOL  # of a pool of draft workers


_DRAFT = _Pool("draft", DRAFT_POOL, "draft workers", "--workers")
_TARGET = _Pool("target", "TargetGroup", "target groups", "--groups")


@app.command()
def draft(
    workers: str = typer.Option(
        "", metavar="N|auto", help="So many. auto: as the load asks for, from draft.workers to draft.max_workers."
    ),
    model: str = typer.Option(
        "",
        metavar="MODEL|auto",
        help="What they run: a prepared name, a directory, a .gguf file or a Hugging Face id, on their own machines. "
        "auto: the model of the configuration.",
    ),
    pool: str = _Name,
    address: str = _Address,
    wait_s: float = _Wait,
) -> None:
    """Set the number of draft workers, or the model that they run.

    They change their model one after the other; the others draft meanwhile. A worker that cannot load it keeps its
    model; --wait-s reports this.
    """
    if not workers and not model:
        raise ConfigError("--workers or --model must be given")
    _scale(_pool_named(pool), _number(workers, _DRAFT) if workers else None, address, wait_s, model)


@app.command()
def target(
    groups: str = typer.Option(
        ..., metavar="N|auto", help="So many. auto: as the load asks for, from target.groups to target.max_groups."
    ),
    address: str = _Address,
    wait_s: float = _Wait,
) -> None:
    """Set the number of target groups, at most target.max_groups: each has a router of its own."""
    _scale(_TARGET, _number(groups, _TARGET), address, wait_s)


def _pool_named(name: str) -> _Pool:
    if name == _DRAFT.name:
        return _DRAFT
    return replace(_DRAFT, deployment=deployment_of(name), noun=f"draft workers of {name}", name=name)


def _number(text: str, pool: _Pool) -> int:
    """0: as the load asks for."""
    from actors.workers.autoscaling import MOST_REPLICAS

    if text == "auto":
        return 0
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_REPLICAS:
        raise ConfigError(f"{pool.option} is {text}; it must be from 1 to {MOST_REPLICAS}, or auto")
    return int(text)


def _scale(pool: _Pool, number: int | None, address: str, wait_s: float, model: str = "") -> None:
    """number: None: as it is; model: "": as it is."""
    if wait_s and not number and not model:
        raise ConfigError(f"--wait-s is {wait_s:g}; with {pool.option} auto there is no number to wait for")
    prepare_to_join(address)
    import ray
    from ray.exceptions import RayError

    start_ray(0.0, address)
    try:
        directory = _directory(address)
        if (
            pool is _TARGET
            and number is not None
            and number > (routers := int(_deployment("Router")["target_num_replicas"]))
        ):
            limit = f"the limit is target.max_groups, {routers}, because each group has a router of its own"
            raise ConfigError(f"{pool.option} is {number}; {limit}")
        running = _count(pool, "RUNNING")
        until = time.monotonic() + wait_s
        try:
            if number is not None:
                ray.get(directory.hold.remote(pool.role, number, pool.name), timeout=_DIRECTORY_S)
                wanted = f"{number} wanted" if number else "from now on as the load asks for"
                typer.echo(f"{pool.noun}: {running} running, {wanted}")
            if model:
                change_model(directory, pool.name, pool.noun, model, until, lambda: _count(pool, "RUNNING"))
        except (RayError, TimeoutError) as error:
            raise Unavailable(f"the cluster's directory does not answer: {type(error).__name__}; try again") from None
        if number and wait_s:
            _wait(pool, number, until)
    finally:
        ray.shutdown()


def _directory(address: str) -> DirectoryHandle:
    from actors.workers.directory_actor import find_directory

    try:
        return find_directory(DIRECTORY)
    except ValueError:
        raise ConfigError(f"--address is {address!r}: no Paceline cluster runs there") from None


def _deployment(name: str) -> dict[str, Any]:
    """A deployment's state, from Serve's controller. Raises Unavailable while there is none."""
    from ray.serve.context import _get_global_client  # `serve.status` tells no wanted numbers
    from ray.serve.exceptions import RayServeException

    try:
        details = _get_global_client().get_serve_details()
    except RayServeException:
        raise Unavailable("the cluster has no Ray Serve: it is starting or ending; try again") from None
    found = details["applications"].get(APPLICATION, {}).get("deployments", {})
    if name not in found:
        pools = sorted(filter(None, map(pool_of_deployment, found)))
        why = f"; draft models with workers: {', '.join(pools) or 'none'}" if pool_of_deployment(name) else ""
        raise ConfigError(f"this cluster has no deployment {name}{why}")
    return dict(found[name])


def _count(pool: _Pool, state: str) -> int:
    return sum(replica["state"] == state for replica in _deployment(pool.deployment)["replicas"])


def _wait(pool: _Pool, number: int, until: float) -> None:
    while (running := _count(pool, "RUNNING")) != number or _count(pool, "STOPPING"):
        if time.monotonic() > until:
            raise ConfigError(
                f"{pool.noun}: {running} of {number} run in time; `ray status` says what Ray has no room for"
            )
        time.sleep(_LOOK_AGAIN_S)
    typer.echo(f"{pool.noun}: {number} running")
