"""A conversation: takes lines and commands, shows answers, and tells after every turn what speculation brought."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import closing

import msgspec

from actors.drafters.registry import AUTO, EAGLE, NONE, expand_drafters
from actors.errors import InvalidRequest, PacelineError
from actors.messages import Acceptance
from cluster.cli.chat.backend import Backend, Message, Span, Turn
from cluster.cli.chat.settings import ChatSettings, describe, with_setting
from cluster.cli.chat.view import View, format_comparison, format_stats
from cluster.router.trace import RoundTrace

# Name and arguments, and what it does.
COMMANDS = {
    "help": ("", "this list, and the settings"),
    "system": ("[TEXT]", "what the model is told before all turns"),
    "set": ("NAME VALUE", "change a setting; auto is its default"),
    "drafters": ("[NAMES]", "who may propose tokens: names, comma-separated, auto or none"),
    "stats": ("", "figures of the last turn again"),
    "reset": ("", "forget all turns"),
    "quit": ("", "end, like Ctrl-D"),
}
_CONTINUES = "\\"


class ChatSession:
    def __init__(self, backend: Backend, settings: ChatSettings, view: View, system: str | None = None) -> None:
        self.backend = backend
        self.settings = settings
        self.view = view
        self.system = system or ""
        self.turns: list[Message] = []  # questions and answers
        self.is_over = False
        self.num_failures = 0  # lines that were refused or could not be answered
        self._last: Turn | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or /quit. What fails costs its line and nothing else. A backslash at the end of a line
        continues the text on the next one."""
        begun = ""
        for line in lines:
            text = line.rstrip("\r\n")
            if text.endswith(_CONTINUES):
                begun += text.removesuffix(_CONTINUES) + "\n"
                continue
            text, begun = begun + text, ""
            self.handle(text)
            if self.is_over:
                return
        self.handle(begun)

    def handle(self, line: str) -> None:
        """A command, or something to say; `//` begins a text that begins with `/`."""
        line = line.strip()
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line[1:].strip().partition(" ")
                self.run_command(name.lower(), argument.strip())
            elif line:
                self.ask(line[1:] if line.startswith("//") else line)
        except PacelineError as error:
            self.num_failures += 1
            self.view.error(str(error))
        except KeyboardInterrupt:
            self.view.note("stopped")

    def run_command(self, name: str, argument: str) -> None:
        """Raises InvalidRequest for a wrong name or argument, PacelineError for what fails."""
        if name not in COMMANDS:
            raise InvalidRequest("command", f"/{name}", "there is no such command; /help lists them")
        if argument and not COMMANDS[name][0]:
            raise InvalidRequest(f"/{name}", argument, "it takes no argument")
        if name == "help":
            usages = {f"/{name} {arguments}".rstrip(): text for name, (arguments, text) in COMMANDS.items()}
            usages |= {"//TEXT": "say something that begins with a slash", "TEXT\\": "go on in the next line"}
            lines = [f"{usage:<18}{text}" for usage, text in usages.items()]
            self.view.note("\n".join([*lines, f"drafters: {self._drafters_now()}", f"now: {describe(self.settings)}"]))
        elif name == "system":
            self.system = argument
            self.view.note(f"the system message is {argument!r}" if argument else "there is no system message")
        elif name == "set":
            self._set(argument)
        elif name == "drafters":
            self._set_drafters(argument)
        elif name == "stats":
            if self._last is None or self._last.totals is None:
                raise InvalidRequest("/stats", "", "there is no finished turn")
            self.view.note(format_stats(self._last.totals, self._last))
        elif name == "reset":
            self.turns = []
            self.view.note("the conversation starts anew")
        else:
            self.is_over = True

    def ask(self, text: str) -> None:
        """One turn. Raises PacelineError, and the conversation is as it was."""
        settings, asked = self.settings, Message(role="user", content=text)
        system = [Message(role="system", content=self.system)] if self.system else []
        messages = [*system, *self.turns, asked]
        seed = settings.seed if settings.seed is not None else secrets.randbits(63)
        turn = self._last = self._answer(messages, settings, seed)
        if turn.text or turn.totals is not None:
            self.turns += [asked, Message(role="assistant", content=turn.text)]
        if turn.totals is None:
            self.view.note("stopped; what has been said stays" if turn.text else "stopped")
            return
        self.view.note(format_stats(turn.totals, turn))
        if not settings.compare or settings.active_drafters == ():
            return
        plain_settings = msgspec.structs.replace(settings, speculative=False, debug=False)
        plain = self._answer(messages, plain_settings, seed, is_shown=False)
        if plain.totals is None:
            self.view.note("comparison stopped")
            return
        is_coupled = self.backend.is_coupled or settings.temperature == 0
        self.view.note(format_comparison(turn, plain, is_coupled=is_coupled))

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name == "debug" and not self.backend.tells_rounds:
            raise InvalidRequest("debug", value, "a server tells only its totals; start without --url for a step trace")
        self.settings = with_setting(self.settings, name, value.strip())
        self.view.note(describe(self.settings))

    def _set_drafters(self, argument: str) -> None:
        names = tuple(name.strip() for name in argument.split(",") if name.strip())
        if names:
            known = self.backend.sources
            acceptance: Acceptance = "coupled" if self.backend.is_coupled else "rejection"
            expanded = expand_drafters(names, has_head=EAGLE in known, acceptance=acceptance, field="drafters")
            for name in expanded if known and names != (AUTO,) else ():
                if name not in known:
                    have = ", ".join(known)
                    raise InvalidRequest("drafters", name, f"this engine was made with {have}; or write {AUTO}, {NONE}")
            chosen = None if names == (AUTO,) else expanded
            self.settings = msgspec.structs.replace(self.settings, drafters=chosen)
        self.view.note(f"drafters: {self._drafters_now()}")

    def _drafters_now(self) -> str:
        chosen = self.settings.drafters
        names = self.backend.sources if chosen is None else chosen
        return ", ".join(names) or ("all of the server" if chosen is None and not self.backend.tells_rounds else NONE)

    def _answer(self, messages: list[Message], settings: ChatSettings, seed: int, *, is_shown: bool = True) -> Turn:
        """Ctrl-C stops it: the turn has what came until then, and no totals."""
        traces: list[RoundTrace] = []
        spans: list[Span] = []
        turn, started, num_rounds = Turn(), time.perf_counter(), 0
        on_round = traces.append if settings.debug and self.backend.tells_rounds else None
        try:
            with closing(self.backend.answer(messages, settings, seed, on_round)) as parts:
                for part in parts:
                    if part.spans or part.num_tokens:
                        turn.last_s = time.perf_counter() - started
                    if not turn.first_tokens and turn.last_s:
                        turn.first_s, turn.first_tokens = turn.last_s, part.num_tokens or 1
                    spans += part.spans
                    turn.totals = part.totals
                    for trace in traces:
                        num_rounds += 1
                        emitted = part.spans if trace is traces[-1] else ()
                        self.view.round(trace, num_rounds, emitted, self.backend.text_of)
                    traces.clear()
                    if is_shown and on_round is None:
                        self.view.answer(part.spans)
        except KeyboardInterrupt:
            pass
        finally:
            if is_shown and on_round is not None:
                self.view.answer(spans)
            self.view.end_answer()
        turn.text = "".join(span.text for span in spans)
        return turn
