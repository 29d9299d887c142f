"""`paceline config`: what a cluster's configuration may hold."""

from __future__ import annotations

import json

import typer

from cluster.config import ClusterConfig
from cluster.config_reference import config_reference

app = typer.Typer(no_args_is_help=True, help="What a cluster's configuration may hold.")


@app.command()
def schema() -> None:
    """Print the JSON schema of a cluster's YAML file, by which editors complete and check it.

    Types, limits, defaults and unknown keys; what several keys must agree on is known to `paceline validate` alone.
    """
    typer.echo(json.dumps(ClusterConfig.model_json_schema(), indent=2))


@app.command()
def reference() -> None:
    """Print docs/configuration.md: every key with its type, limits, default and meaning."""
    typer.echo(config_reference(), nl=False)
