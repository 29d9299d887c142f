"""`paceline config`: what a cluster's configuration may hold."""

from __future__ import annotations

import json

import typer

from cluster.config import ClusterConfig

app = typer.Typer(no_args_is_help=True, help="What a cluster's configuration may hold.")


@app.callback()
def _of_several() -> None:
    """Keeps `schema` a command of its own while it is the only one."""


@app.command()
def schema() -> None:
    """Print the JSON schema of a cluster's YAML file, by which editors complete and check it.

    Types, limits, defaults and unknown keys; what several keys must agree on is known to `paceline validate` alone.
    """
    typer.echo(json.dumps(ClusterConfig.model_json_schema(), indent=2))
