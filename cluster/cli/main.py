"""The `paceline` command."""

from __future__ import annotations

import sys
from importlib import metadata

import typer

from actors.errors import PacelineError
from cluster.cli import bench, drafter, generate, model, serve

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding for large language models.",
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.add_typer(model.app, name="model")
app.add_typer(drafter.app, name="drafter")
app.add_typer(bench.app, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("paceline"))


def main() -> None:
    """Entry point: what a user did wrong is one line on stderr and exit status 2, never a traceback."""
    try:
        app()
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
