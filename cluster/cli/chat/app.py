"""`paceline chat`: a conversation that shows who proposed every token."""

from __future__ import annotations

import sys

import typer

from actors.errors import InvalidRequest
from cluster.cli.api_key import ApiKeyOption
from cluster.cli.chat.backend import Backend
from cluster.cli.chat.lines import is_interactive, read_lines, without_surrogates
from cluster.cli.chat.session import COMMANDS, ChatSession
from cluster.cli.chat.settings import ChatSettings, checked
from cluster.cli.chat.view import View, make_console
from cluster.cli.engine import (
    AcceptanceOption,
    AcceptanceRule,
    BranchOption,
    CorpusOption,
    DeviceOption,
    DrafterOptionOption,
    DraftModelOption,
    Dtype,
    EagleDepthOption,
    EagleHeadOption,
    EagleTopKOption,
    Exact,
    ExactOption,
    GammaOption,
    ModelOption,
    Quantization,
    QuantizationOption,
    ThreadsOption,
    local_engine,
)
from cluster.config import paceline_home

# A server has these options, too; the others are of the engine in this process.
_CONVERSATION_OPTIONS = {"url", "api_key", "system", "compare", "debug"}
_SAMPLING_OPTIONS = {"max_new_tokens", "temperature", "top_p", "top_k", "seed"}


def chat(
    context: typer.Context,
    url: str = typer.Option(None, help="Talk to the server at http://host:port; by default a model in this process."),
    api_key: ApiKeyOption = None,
    model: ModelOption = "smollm2",
    draft_model: DraftModelOption = "auto",
    eagle_head: EagleHeadOption = "none",
    drafter: str = typer.Option("auto", help="Names, comma-separated, as in `paceline generate`."),
    corpus: CorpusOption = [],  # noqa: B006 (typer makes a new list of it)
    drafter_option: DrafterOptionOption = [],  # noqa: B006 (typer makes a new list of it)
    system: str = typer.Option(None, help="What the model is told before all turns."),
    max_new_tokens: int = typer.Option(
        None, help="Of an answer, at least 1; by default 256, or what the model has room for.", show_default=False
    ),
    temperature: float = typer.Option(0.0, help="0 to 2; 0: the likeliest token."),
    top_p: float = typer.Option(1.0, help="Above 0, up to 1; 1: off."),
    top_k: int = typer.Option(0, help="0: off."),
    seed: int = typer.Option(None, help="By default drawn for every turn.", show_default=False),
    compare: bool = typer.Option(False, "--compare", help="Decode every turn again without drafts."),
    debug: bool = typer.Option(False, "--debug", help="A line for every round."),
    gamma: GammaOption = 4,
    branch: BranchOption = 2,
    eagle_depth: EagleDepthOption = 7,
    eagle_top_k: EagleTopKOption = 10,
    dtype: Dtype = Dtype.float32,
    quantization: QuantizationOption = Quantization.none,
    device: DeviceOption = "auto",
    exact: ExactOption = Exact.default,
    acceptance: AcceptanceOption = AcceptanceRule.coupled,
    threads: ThreadsOption = None,
) -> None:
    """Talk with a model; every token has the colour of who proposed it. /help lists the commands.

    Lines from a pipe are a scripted conversation: answers alone go to standard output, and the exit status is 1 if a
    line could not be carried out.
    """
    settings = ChatSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        compare=compare,
        debug=debug,
    )
    try:
        checked(settings)
    except InvalidRequest as error:
        raise InvalidRequest(f"--{error.field.replace('_', '-')}", error.value, error.limit) from None
    if url is not None:
        _refuse_engine_options(context)
        if debug:
            raise InvalidRequest("--debug", True, "a server tells only its totals; leave it out with --url")
        from cluster.cli.chat.server_backend import ServerBackend

        backend: Backend = ServerBackend(url, api_key)
    else:
        from cluster.cli.chat.local_backend import LocalBackend

        engine = local_engine(
            model=model,
            draft_model=draft_model,
            eagle_head=eagle_head,
            drafter=drafter,
            gamma=gamma,
            branch=branch,
            eagle_depth=eagle_depth,
            eagle_top_k=eagle_top_k,
            dtype=dtype,
            quantization=quantization,
            device=device,
            exact=exact,
            threads=threads,
            batch_size=1,
            corpora=corpus,
            drafter_options=drafter_option,
            acceptance=acceptance,
        )
        backend = LocalBackend(engine)
    view = View(make_console(sys.stdout), make_console(sys.stderr))
    session = ChatSession(backend, settings, view, system=without_surrogates(system or ""))
    try:
        if is_interactive():
            drafters = ", ".join(backend.sources) or ("" if url else "none")
            view.note(f"{backend.model_name}{f', drafters {drafters}' if drafters else f' at {url}'}")
            view.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
            if backend.tells_rounds:
                view.legend(backend.sources)
        session.run(read_lines(paceline_home() / "chat_history", [f"/{name}" for name in COMMANDS]))
    finally:
        backend.close()
    if session.num_failures and not is_interactive():
        raise typer.Exit(1)


def _refuse_engine_options(context: typer.Context) -> None:
    """Raises InvalidRequest for an option of the engine in this process beside --url."""
    for name in sorted(context.params.keys() - _CONVERSATION_OPTIONS - _SAMPLING_OPTIONS):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            value = context.params[name]
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            raise InvalidRequest(option, shown, "the server at --url has its own; leave it out")
