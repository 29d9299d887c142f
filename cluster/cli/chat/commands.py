"""The commands of a conversation: lines that begin with a slash, or with `!!`.

A command that has no meaning here says what to use instead, so that nobody who knows it from elsewhere is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.drafters.registry import AUTO, DRAFT_MODEL, EAGLE, NONE, expand_drafters
from actors.errors import InvalidRequest
from actors.messages import Acceptance
from cluster.cli.chat.settings import changed, describe_processor, integer, number, switch, with_processor

if TYPE_CHECKING:
    from cluster.cli.chat.session import ChatSession

Run = Callable[["ChatSession", str], None]
State = Callable[["ChatSession"], str]


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    arguments: str  # how to write them; "" for none
    help: str
    run: Run
    state: State | None = None  # what is set now


def parse_command(line: str) -> tuple[str, str] | None:
    """Name and argument of a command; None if the line is something to say. `//` begins a line that begins with `/`."""
    for beginning in ("!!", "/"):
        if line.startswith(beginning) and not line.startswith("//"):
            name, _, argument = line[len(beginning) :].strip().partition(" ")
            return name.lower(), argument.strip()
    return None


def run_command(session: ChatSession, name: str, argument: str) -> None:
    """Raises InvalidRequest for what is no command, or not so."""
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidRequest("command", f"/{name}", "there is no such command; /help lists them")
    if argument and not command.arguments:
        raise InvalidRequest(f"/{name}", argument, "it takes no argument")
    if not argument and command.arguments and not command.arguments.startswith("["):
        raise InvalidRequest(f"/{name}", "", f"write /{name} {command.arguments}")
    command.run(session, argument)


def help_lines(session: ChatSession) -> list[str]:
    usages = {command: f"/{command.name} {command.arguments}".rstrip() for command in COMMANDS.values()}
    width = max(map(len, usages.values()))
    lines = []
    for command, usage in usages.items():
        now = f" (now {command.state(session)})" if command.state is not None else ""
        lines.append(f"{usage:<{width}}  {command.help}{now}")
    return [*lines, f"{'//TEXT':<{width}}  say something that begins with a slash"]


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _help(session: ChatSession, argument: str) -> None:
    session.view.note("\n".join(help_lines(session)))


def _quit(session: ChatSession, argument: str) -> None:
    session.is_over = True


def _clear(session: ChatSession, argument: str) -> None:
    session.view.clear()


def _reset(session: ChatSession, argument: str) -> None:
    session.conversation.reset()
    session.view.note("the conversation starts anew")


def _remove(session: ChatSession, argument: str) -> None:
    if session.conversation.remove_last() is None:
        raise InvalidRequest("/remove", "", "nothing has been said yet")
    session.view.note(f"the last turn is gone; {session.conversation.num_turns} left")


def _regen(session: ChatSession, argument: str) -> None:
    before = list(session.conversation.messages)
    question = session.conversation.remove_last()
    if question is None:
        raise InvalidRequest("/regen", "", "nothing has been said yet")
    try:
        session.ask(question)
    finally:
        if len(session.conversation.messages) < len(before):  # no new answer: the old one stays
            session.conversation.messages = before


def _save(session: ChatSession, argument: str) -> None:
    session.save(_path(argument))


def _load(session: ChatSession, argument: str) -> None:
    session.load(_path(argument))


def _path(argument: str) -> Path:
    try:
        return Path(argument).expanduser()
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest("file", argument, f"there is no such home directory: {error}") from None


def _system(session: ChatSession, argument: str) -> None:
    session.conversation.set_system(argument)
    session.view.note(f"the system's message is {argument!r}" if argument else "there is no system's message")


def _toggle(field: str, words: str) -> Run:
    def run(session: ChatSession, argument: str) -> None:
        value = switch(field, argument, getattr(session.settings, field))
        session.settings = changed(session.settings, **{field: value})
        session.view.note(f"{words}: {_on_off(value)}")

    return run


def _debug(session: ChatSession, argument: str) -> None:
    if not session.backend.tells_rounds:
        raise InvalidRequest("/debug", argument, "a server tells only its totals; start without --url for a step trace")
    _toggle("debug", "step trace")(session, argument)


def _compare(session: ChatSession, argument: str) -> None:
    if argument:
        _toggle_compare(session, argument)
    else:
        session.compare_last()


def _processor(session: ChatSession, argument: str) -> None:
    if argument:
        session.settings = with_processor(session.settings, argument.lower().split())
    session.view.note(f"tokens are drawn: {describe_processor(session.settings)}")


def _temperature(session: ChatSession, argument: str) -> None:
    session.settings = changed(session.settings, temperature=number("temperature", argument))
    session.view.note(f"tokens are drawn: {describe_processor(session.settings)}")


def _seed(session: ChatSession, argument: str) -> None:
    seed = None if argument == "off" else integer("seed", argument)
    session.settings = changed(session.settings, seed=seed)
    session.view.note(f"seed: {_seed_now(session)}")


def _seed_now(session: ChatSession) -> str:
    return "drawn for every turn" if session.settings.seed is None else str(session.settings.seed)


def _length(session: ChatSession, argument: str) -> None:
    session.settings = changed(session.settings, max_new_tokens=integer("length", argument))
    session.view.note(f"at most {argument} tokens an answer")


def _gamma(session: ChatSession, argument: str) -> None:
    most = session.backend.max_draft_tokens
    value = integer("gamma", argument)
    if not 1 <= value <= most:
        raise InvalidRequest("gamma", value, f"it must be from 1 to {most}")
    session.settings = changed(session.settings, max_draft_tokens=value)
    session.view.note(f"at most {value} draft tokens a round")


def _gamma_now(session: ChatSession) -> str:
    limit = session.settings.max_draft_tokens
    return str(session.backend.max_draft_tokens if limit is None else limit)


def _drafter(session: ChatSession, argument: str) -> None:
    names = tuple(name.strip() for name in argument.split(",") if name.strip())
    if names:
        known = session.backend.sources
        drafters = None if names == (AUTO,) else names
        acceptance: Acceptance = "coupled" if session.backend.is_coupled else "rejection"
        expanded = expand_drafters(names, has_head=EAGLE in known, acceptance=acceptance, field="drafter")
        if drafters is not None and known:
            for name in expanded:
                if name not in known:
                    have = ", ".join(known)
                    raise InvalidRequest("drafter", name, f"this engine was made with {have}; or write {AUTO}, {NONE}")
        session.settings = changed(session.settings, drafters=expanded if drafters is not None else None)
    session.view.note(
        f"drafters: {_drafters_now(session)}; for the draft model's own text start "
        "`paceline chat --model ITS_DIRECTORY --drafter none`"
    )


def _drafters_now(session: ChatSession) -> str:
    chosen = session.settings.drafters
    names = session.backend.sources if chosen is None else chosen
    return ", ".join(names) or ("all of the server" if chosen is None and not session.backend.tells_rounds else NONE)


def _lookup(session: ChatSession, argument: str) -> None:
    known = session.backend.sources
    without = (DRAFT_MODEL,) if DRAFT_MODEL in known or not known else ()
    value = switch("/ngram", argument, session.settings.drafters == without)
    session.settings = changed(session.settings, drafters=None if value else without)
    session.view.note(f"drafters: {_drafters_now(session)}")


def _instead(text: str) -> Run:
    def run(session: ChatSession, argument: str) -> None:
        session.view.note(text)

    return run


_toggle_compare = _toggle("compare", "plain decoding after every turn")
_toggle_drafts = _toggle("speculative", "drafts")
_toggle_template = _toggle("uses_template", "chat template")

_LIST = (
    Command("help", "", "this list", _help),
    Command("quit", "", "end, like Ctrl-D", _quit),
    Command("exit", "", "the same", _quit),
    Command("reset", "", "forget what has been said", _reset),
    Command("remove", "", "forget the last turn", _remove),
    Command("regen", "", "answer the last question again", _regen),
    Command("save", "FILE", "write conversation and settings as JSON", _save),
    Command("load", "FILE", "go on with a saved conversation", _load),
    Command("system", "[TEXT]", "what the model is told before all turns", _system),
    Command("clear", "", "clear the screen", _clear),
    Command("compare", "[on|off]", "decode the last turn again without drafts; on: every turn", _compare,
            lambda session: _on_off(session.settings.compare)),
    Command("target", "[on|off]", "the same as /compare on or off", _toggle_compare),
    Command("speculative", "[on|off]", "drafts; off: plain decoding", _toggle_drafts,
            lambda session: _on_off(session.settings.speculative)),
    Command("drafter", "[NAMES]", "who may propose tokens: names, comma-separated, or auto", _drafter, _drafters_now),
    Command("ngram", "[on|off]", "drafters that look text up, which is all but the draft model", _lookup),
    Command("gamma", "N", "most draft tokens a round", _gamma, _gamma_now),
    Command("length", "N", "most tokens of an answer", _length,
            lambda session: str(session.settings.max_new_tokens or "256, or what there is room for")),
    Command("processor", "[NAME ...]", "greedy, multinomial T, topk T K, nucleus T P or topknucleus T K P", _processor,
            lambda session: describe_processor(session.settings)),
    Command("temperature", "T", "0 to 2; 0: the likeliest token", _temperature),
    Command("seed", "N|off", "answers become repeatable", _seed, _seed_now),
    Command("chat", "[on|off]", "the model's chat template; off: it continues your text", _toggle_template,
            lambda session: _on_off(session.settings.uses_template)),
    Command("debug", "[on|off]", "a line for every round: proposed, verified, rejected, milliseconds", _debug,
            lambda session: _on_off(session.settings.debug)),
    Command("cache", "", "not needed: the KV cache is always on", _instead(
        "the KV cache is always on and changes no token; `paceline bench local` measures without one")),
    Command("top_k_filler", "[N]", "set at the start: --drafter-option ngram_table.filler_top_k=N", _instead(
        "set at the start, by `--drafter ngram_table --drafter-option ngram_table.filler_top_k=N`")),
    Command("set_ngramstorage", "[NAME N]", "set at the start: --drafter-option ngram_table.levels=one", _instead(
        "set at the start, by `--drafter ngram_table --drafter-option ngram_table.levels=one` or `many`, and `.n=N`")),
    Command("reset_in_between", "[on|off]", "set at the start: --drafter-option ngram_table.keep=request", _instead(
        "drafters keep what they have learnt between turns, which changes no text; for empty ones start again, or with "
        "`--drafter ngram_table --drafter-option ngram_table.keep=request`")),
)  # fmt: skip
COMMANDS = {command.name: command for command in _LIST}
