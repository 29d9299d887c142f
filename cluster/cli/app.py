"""All commands of `paceline`. A command's module is imported when the command runs, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from cluster.cli.interrupts import ctrl_c_ends_the_process


@dataclass(frozen=True, slots=True)
class Entry:
    """place: module and attribute of a function or a `Typer`; help: its first sentence, which `paceline --help` shows
    without importing the module."""

    place: str
    help: str


COMMANDS = {
    "serve": Entry("cluster.cli.serve:serve", "Serve a model over HTTP and gRPC until Ctrl-C."),
    "generate": Entry("cluster.cli.generate:generate", "Generate text for a prompt or a file of prompts."),
    "chat": Entry("cluster.cli.chat.app:chat", "Talk with a model; every token has the colour of who proposed it."),
    "size": Entry(
        "cluster.cli.size:size",
        "Whether a target fits, how fast it is with and without drafts, and how many draft workers pay.",
    ),
    "simulate": Entry(
        "cluster.cli.simulate:simulate",
        "Simulate a cluster under traffic and failures: throughput, latencies, goodput, draft workers, cache traffic.",
    ),
    "validate": Entry(
        "cluster.cli.validate:validate",
        "Find mistakes in cluster configurations, Kustomize overlays and manifests.",
    ),
    "version": Entry("cluster.cli.app:version", "Print the version."),
    "model": Entry("cluster.cli.model:app", "Prepare and find the models that are served by name."),
    "drafter": Entry("cluster.cli.drafter:app", "Make draft models and heads."),
    "corpus": Entry("cluster.cli.corpus:app", "Index text to draft from."),
    "bench": Entry("cluster.cli.bench.app:app", "Measure speed: of the engine in one process, or of a running server."),
    "cache": Entry("cluster.cli.cache.app:app", "The shared warm cache: import, export, look at, check and purge it."),
    "tenant": Entry("cluster.cli.tenant:app", "API keys, limits and sharing of those who call a cluster."),
    "config": Entry("cluster.cli.config:app", "What a cluster's configuration may hold."),
    "scale": Entry("cluster.cli.scale:app", "Set the number of draft workers or target groups of a running cluster."),
    "k8s": Entry("cluster.cli.k8s:app", "What pods on Kubernetes call."),
}


class LazyGroup(TyperGroup):
    """Lists commands by name and help alone, and imports the one that is called or completed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=entry.help) for name, entry in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name is not None else command, rest


@cache
def load_command(name: str) -> Any:
    """The command with its options, or the group with its commands."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    with ctrl_c_ends_the_process():
        found: typer.Typer | Callable[..., Any] = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    single = typer.Typer(add_completion=False)
    single.command(name)(found)
    return typer.main.get_command(single)


def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("paceline"))


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Lossless speculative decoding for large language models.",
)
app.callback()(lambda: None)
