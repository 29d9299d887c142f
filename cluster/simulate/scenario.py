"""Reads what is simulated from a file and from `path.to.key=value` overrides, as a cluster's configuration is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config import apply_override, read_yaml
from cluster.errors import ConfigError
from cluster.simulate.options import SimulationOptions
from cluster.validation import describe


def load_scenario(path: Path | None, overrides: Sequence[str] | None, given: Mapping[str, Any]) -> SimulationOptions:
    """given: counts more than file and overrides. Raises ConfigError."""
    data: dict[str, Any] = {} if path is None else read_yaml(path)
    for override in overrides or ():
        apply_override(data, override, "--option")
    try:
        return SimulationOptions.model_validate({**data, **given})
    except ValidationError as error:
        where = "scenario" if path is None else str(path)
        raise ConfigError(f"{where}: {describe(error)}") from None
