"""`paceline validate`: mistakes in cluster configurations, overlays and manifests, before they are applied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def validate(
    paths: Annotated[list[Path], typer.Argument(help="Files, directories and Kustomize overlays.", metavar="PATH...")],
    crds: Annotated[
        Path | None,
        typer.Option(help="Directory of custom resource definitions to check their objects by.", metavar="DIR"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Leave out what this rule finds; as often as needed.", metavar="RULE"),
    ] = None,
    form: Annotated[
        Literal["text", "json", "github"],
        typer.Option("--format", help="For people, programs, or GitHub's annotations."),
    ] = "text",
) -> None:
    """Find mistakes in cluster configurations, Kustomize overlays and manifests. Exit status 1 if there is an error."""
    from cluster.deploy.validate.check import validate as run

    report = run(paths, crds, ignore or [])
    shown = report.show(form)
    if shown:
        typer.echo(shown)
    if report.num_errors:
        raise typer.Exit(1)
