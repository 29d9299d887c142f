"""All commands of `paceline`."""

from __future__ import annotations

from importlib import metadata

import typer

from cluster.cli import (
    config,
    corpus,
    drafter,
    generate,
    k8s,
    model,
    serve,
    size,
    tenant,
    validate,
)
from cluster.cli.bench import app as bench
from cluster.cli.bench import compare_command as compare
from cluster.cli.cache import app as cache
from cluster.cli.chat import app as chat

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding for large language models.",
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("compare")(compare.compare)
app.command("size")(size.size)
app.command("validate")(validate.validate)
app.add_typer(model.app, name="model")
app.add_typer(drafter.app, name="drafter")
app.add_typer(corpus.app, name="corpus")
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")
app.add_typer(tenant.app, name="tenant")
app.add_typer(config.app, name="config")
app.add_typer(k8s.app, name="k8s")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("paceline"))
