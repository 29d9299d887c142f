"""`paceline model`: models that are served by name."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from actors.home import paceline_home
from actors.models.catalog import CATALOG, prepare_model, prepared_path
from actors.models.loader import read_config
from actors.models.source import ModelSource
from cluster.cli.progress import progress_bars

app = typer.Typer(no_args_is_help=True, help="Prepare and find the models that are served by name.")


@app.command()
def prepare(
    name: str = typer.Argument(help="Name in the catalog; see `paceline model list`."),
    force: bool = typer.Option(False, "--force", help="Convert again even if it is there."),
) -> None:
    """Convert a model once into the local cache and print its directory."""
    with progress_bars() as progress:
        path = prepare_model(name, paceline_home(), progress, force=force)
    typer.echo(path)


@app.command()
def path(name: str = typer.Argument(help="Name in the catalog.")) -> None:
    """Print the directory of a prepared model; exit status 1 if it is not prepared."""
    found = prepared_path(name, paceline_home())
    if found is None:
        typer.echo(f"model {name!r} is not prepared; run `paceline model prepare {name}`", err=True)
        sys.exit(1)
    typer.echo(found)


@app.command()
def check(
    model: str = typer.Argument(
        metavar="ARCH|DIR", help="A model type of transformers, such as qwen3_moe, or a directory with a config.json."
    ),
) -> None:
    """Try an architecture: a tiny random model of it on the engine against transformers. Prints exact, chain
    only (drafts are verified as chains), or what it is refused for, with exit status 1. No weights are read."""
    from actors.engine.model_check import check_architecture, check_model_type

    directory = Path(model)
    if directory.is_dir():
        result = check_architecture(read_config(ModelSource(model, directory.name, directory)))
    else:
        result = check_model_type(model)
    typer.echo(result)
    if result.outcome not in ("exact", "chain only"):
        sys.exit(1)


@app.command("list")
def list_models() -> None:
    """List the catalog, one model a line: name, state, description."""
    home = paceline_home()
    width = max(len(name) for name in CATALOG)
    for entry in CATALOG.values():
        state = "prepared" if prepared_path(entry.name, home) else "not prepared"
        typer.echo(f"{entry.name:<{width}}  {state:<12}  {entry.description}")
