"""Cluster configurations: the files of `paceline serve`, and the arguments of the application in a RayService."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from actors.errors import InvalidRequest
from cluster.config import ClusterConfig, check_devices
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.shown import shown
from cluster.deploy.validate.suggestion import did_you_mean


def check_config(value: dict[str, Any]) -> Iterator[Problem]:
    """What the configuration's own types refuse, and a cluster of it before it looks for models."""
    try:
        _check_cluster(ClusterConfig.model_validate(value))
    except InvalidRequest as error:
        place: Location = tuple(error.field.split("."))
        yield Problem("config-value", place, f"{shown(error.value, place)}: {error.limit}")
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            where: Location = tuple(problem["loc"])
            if problem["type"] == "extra_forbidden":
                key = str(where[-1])
                yield Problem(
                    "config-unknown-key", where, f"unknown key {key!r}{did_you_mean(key, _keys_at(where[:-1]))}"
                )
            else:
                what = problem["msg"].removeprefix("Value error, ")
                if isinstance(problem["input"], str | int | float):
                    what = f"{shown(problem['input'], where)}: {what}"
                yield Problem("config-value", where, what)


def _check_cluster(config: ClusterConfig) -> None:
    """Raises InvalidRequest."""
    check_devices(config)
    speculation = config.speculation
    if speculation.drafters == ("auto",) and not speculation.drafter_options:
        return
    from cluster.router.configured_drafters import checked_drafters  # takes its time to load

    checked_drafters(config)


def _keys_at(where: Location) -> list[str]:
    model: Any = ClusterConfig
    parts = iter(where)
    for part in parts:
        field = model.model_fields.get(str(part)) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        if get_origin(field.annotation) is dict:
            next(parts, None)  # the name of one of its records
        candidates = [field.annotation, *get_args(field.annotation)]
        model = next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return list(model.model_fields) if model is not None else []
