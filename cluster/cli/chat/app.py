"""`paceline chat`: a conversation that shows who proposed every token."""

from __future__ import annotations

import sys
from dataclasses import fields

import typer

from actors.errors import InvalidRequest
from actors.home import paceline_home
from cluster.cli.api_key import ApiKeyOption
from cluster.cli.chat.backend import Backend, LocalBackend, ServerBackend
from cluster.cli.chat.lines import read_lines
from cluster.cli.chat.session import ChatSession
from cluster.cli.chat.view import View
from cluster.cli.engine import EngineOptions, SamplingOptions, local_engine
from cluster.cli.shared_options import with_options


@with_options
def chat(
    *,
    context: typer.Context,
    url: str = typer.Option(None, help="Talk to the server at http://host:port; by default a model in this process."),
    api_key: ApiKeyOption = None,
    system: str = typer.Option("", help="What the model is told before all turns."),
    debug: bool = typer.Option(False, "--debug", help="A line for every round."),
    sampling: SamplingOptions,
    engine_options: EngineOptions,
) -> None:
    """Talk with a model; every token has the colour of who proposed it. /help lists the commands.

    Lines from a pipe are a scripted conversation: answers alone go to standard output, and the exit status is 1 if a
    line could not be carried out.
    """
    options = sampling.checked()
    if url is not None and debug:
        raise InvalidRequest("--debug", True, "a server tells only its totals; leave it out with --url")
    if url is None:
        backend: Backend = LocalBackend(local_engine(engine_options, batch_size=1))
    else:
        _refuse_engine_options(context)
        backend = ServerBackend(url, api_key)
    # Bytes of a command line that are not UTF-8 reach Python as lone surrogates, which no tokenizer takes.
    system = system.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    view = View()
    session = ChatSession(backend, options, view, system, traces=debug)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        about = f" at {url}" if backend.sources is None else f", drafters {', '.join(backend.sources) or 'none'}"
        view.note(f"{backend.model_name}{about}")
        view.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        if backend.sources is not None:
            view.legend(backend.sources)
    session.run(read_lines(paceline_home() / "chat_history"))
    if session.num_failures and not is_interactive:
        raise typer.Exit(1)


def _refuse_engine_options(context: typer.Context) -> None:
    """Raises InvalidRequest for an option of an engine in this process."""
    for name in sorted(field.name for field in fields(EngineOptions)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            raise InvalidRequest(f"--{name.replace('_', '-')}", shown, "the server at --url has its own; leave it out")
