"""Options that several commands share: records whose fields are options, and the decorator that unfolds them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cluster.config import ClusterConfig, load_config

JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The configuration of a cluster."""

    config: Annotated[Path | None, typer.Option(help="The cluster's configuration.", show_default=False)] = None
    settings: Annotated[list[str], typer.Option("--set", metavar="PATH.TO.KEY=VALUE", help="Override a setting.")] = (
        field(default_factory=list)
    )

    def load(self, *overrides: str) -> ClusterConfig:
        """Raises ConfigError."""
        from cluster.cli.serve import default_config

        return load_config(self.config or default_config(), [*self.settings, *overrides])


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command: a parameter whose type is a dataclass stands for one option a field."""
    records: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        records[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        for each in fields(kind):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            option = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters.append(option.replace(annotation=hints[each.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in records.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # where typer looks
    return run
