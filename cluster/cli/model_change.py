"""Has the draft workers of a running cluster change their model: `paceline scale draft --model`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from actors.models.catalog import model_path
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from actors.workers.directory_actor import DirectoryHandle

_LOOK_AGAIN_S = 0.5
_DIRECTORY_S = 30.0
_AUTO = "auto"


def change_model(
    directory: DirectoryHandle, pool: str, noun: str, model: str, until: float, count: Callable[[], int]
) -> None:
    """Set the model of a pool's workers, and wait until all run it. until: on the monotonic clock, how long to wait;
    count: the number of the pool's workers.

    Raises ConfigError where a worker cannot load it, or the time is over, and ModelError for what is no path either.
    """
    import ray

    spec = "" if model == _AUTO else _absolute(model)
    wanted = ray.get(directory.want_model.remote(pool, spec), timeout=_DIRECTORY_S)
    told = spec or "that of the configuration"
    typer.echo(f"{noun}: the model from now on is {told}")
    while time.monotonic() < until:
        workers, refusals = ray.get(
            [directory.workers.remote("draft"), directory.refusals.remote(pool)], timeout=_DIRECTORY_S
        )
        if refusals:
            raise ConfigError(f"{noun}: {len(refusals)} keep the model that they have: {refusals[0]}")
        numbers = [worker.model_number for worker in workers if worker.pool == pool and not worker.is_leaving]
        changed = sum(number >= wanted.number for number in numbers)
        number = count()
        if changed and changed >= number:
            typer.echo(f"{noun}: {changed} run it")
            return
        if time.monotonic() + _LOOK_AGAIN_S >= until:
            raise ConfigError(f"{noun}: {changed} of {number} run the model by now; the others follow")
        time.sleep(_LOOK_AGAIN_S)


def _absolute(model: str) -> str:
    """Workers have another working directory."""
    path = model_path(model)
    return str(path.resolve()) if path.exists() else model
