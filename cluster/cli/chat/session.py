"""A conversation: takes lines and commands, shows answers and, after every turn, what speculation brought."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import closing

import msgspec

from actors.drafters.registry import AUTO, EAGLE, NONE, expand_drafters
from actors.errors import InvalidRequest, PacelineError
from actors.messages import Acceptance
from cluster.cli.chat.backend import Backend, Message, Span
from cluster.cli.chat.view import Turn, View, format_comparison, format_stats
from cluster.generation import GenerationOptions, changed

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
_NUMBERS = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "max_draft_tokens")


class ChatSession:
    def __init__(self, backend: Backend, options: GenerationOptions, view: View, system: str = "") -> None:
        """options: of all turns; without a seed one is drawn for every turn."""
        self.backend = backend
        self.options = options
        self.switches = {"speculative": True, "compare": False, "debug": False}
        self.view = view
        self.system = system
        self.turns: list[Message] = []  # questions and answers
        self.is_over = False
        self.num_failures = 0  # lines that were refused or could not be answered
        self._last: Turn | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or /quit. What fails costs its line alone. A backslash at the end of a line continues the
        text on the next one."""
        begun = ""
        for line in lines:
            begun += line.rstrip("\r\n")
            if begun.endswith(_CONTINUES):
                begun = begun.removesuffix(_CONTINUES) + "\n"
                continue
            self.handle(begun)
            begun = ""
            if self.is_over:
                return
        self.handle(begun)

    def handle(self, line: str) -> None:
        """Run a command or ask the model; `//` begins a text that begins with `/`."""
        line = line.strip()
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line[1:].strip().partition(" ")
                self._run_command(name.lower(), argument.strip())
            elif line:
                self._ask(line[1:] if line.startswith("//") else line)
        except PacelineError as error:
            self.num_failures += 1
            self.view.note(str(error), "red")
        except KeyboardInterrupt:
            self.view.note("stopped")

    def _run_command(self, name: str, argument: str) -> None:
        """Raises InvalidRequest for a wrong name or argument."""
        if name not in COMMANDS:
            raise InvalidRequest("command", f"/{name}", "there is no such command; /help lists them")
        if argument and not COMMANDS[name][0]:
            raise InvalidRequest(f"/{name}", argument, "it takes no argument")
        if name == "help":
            usages = {f"/{name} {arguments}".rstrip(): text for name, (arguments, text) in COMMANDS.items()}
            usages |= {"//TEXT": "say something that begins with a slash", "TEXT\\": "go on in the next line"}
            lines = [f"{usage:<18}{text}" for usage, text in usages.items()]
            self.view.note("\n".join([*lines, f"drafters: {self._drafters()}", f"now: {self._settings()}"]))
        elif name == "system":
            self.system = argument
            self.view.note(f"the system message is {argument!r}" if argument else "there is no system message")
        elif name == "set":
            self._set(argument)
            self.view.note(self._settings())
        elif name == "drafters":
            self._choose_drafters(argument)
            self.view.note(f"drafters: {self._drafters()}")
        elif name == "stats":
            if self._last is None or self._last.totals is None:
                raise InvalidRequest("/stats", "", "there is no finished turn")
            self.view.note(format_stats(self._last))
        elif name == "reset":
            self.turns = []
            self.view.note("the conversation starts anew")
        else:
            self.is_over = True

    def _set(self, argument: str) -> None:
        """`NAME VALUE`; the value `auto` is the default. Raises InvalidRequest naming field, value and limit."""
        name, _, text = (part.strip() for part in argument.partition(" "))
        if name == "debug" and not self.backend.tells_rounds:
            raise InvalidRequest("debug", text, "a server tells only its totals; start without --url for a step trace")
        if name in _NUMBERS:
            try:
                value = None if text == "auto" else msgspec.json.decode(text)
            except msgspec.DecodeError:
                raise InvalidRequest(name, text, "it must be a number, or auto") from None
            self.options = changed(self.options, {name: value})
        elif name not in self.switches:
            raise InvalidRequest("/set", name, f"it must be one of {', '.join((*_NUMBERS, *self.switches))}")
        elif text not in ("on", "off", "auto"):
            raise InvalidRequest(name, text, "it must be on or off, or auto")
        else:
            self.switches[name] = text == "on" or (text == "auto" and name == "speculative")

    def _settings(self) -> str:
        numbers = {name: getattr(self.options, name) for name in _NUMBERS}
        shown = [f"{name} {'auto' if value is None else f'{value:g}'}" for name, value in numbers.items()]
        return ", ".join([*shown, *(f"{name} {'on' if is_on else 'off'}" for name, is_on in self.switches.items())])

    def _choose_drafters(self, argument: str) -> None:
        names = tuple(name.strip() for name in argument.split(",") if name.strip())
        known = self.backend.sources
        chosen = None
        if names and names != (AUTO,):
            acceptance: Acceptance = "coupled" if self.backend.is_coupled else "rejection"
            chosen = expand_drafters(names, has_head=EAGLE in known, acceptance=acceptance, field="drafters")
            if known and (others := [name for name in chosen if name not in known]):
                limit = f"this engine was made with {', '.join(known)}; or write {AUTO}, {NONE}"
                raise InvalidRequest("drafters", others[0], limit)
        if names:
            self.options = changed(self.options, {"drafters": chosen})

    def _drafters(self) -> str:
        chosen = self.options.drafters
        if chosen is None and not self.backend.tells_rounds:
            return "all of the server"
        return ", ".join(self.backend.sources if chosen is None else chosen) or NONE

    def _ask(self, text: str) -> None:
        """One turn. If it fails the conversation stays as it was. Raises PacelineError."""
        asked = Message(role="user", content=text)
        system = [Message(role="system", content=self.system)] if self.system else []
        messages = [*system, *self.turns, asked]
        seed = secrets.randbits(63) if self.options.seed is None else self.options.seed
        drafted, plain = changed(self.options, {"seed": seed}), changed(self.options, {"seed": seed, "drafters": ()})
        turn = self._last = self._answer(messages, drafted if self.switches["speculative"] else plain)
        if turn.text or turn.totals is not None:
            self.turns += [asked, Message(role="assistant", content=turn.text)]
        if turn.totals is None:
            self.view.note("stopped; what has been said stays" if turn.text else "stopped")
            return
        self.view.note(format_stats(turn))
        if self.switches["compare"] and self.switches["speculative"] and drafted.drafters != ():
            other = self._answer(messages, plain, is_shown=False)
            is_coupled = self.backend.is_coupled or not self.options.temperature
            self.view.note(format_comparison(turn, other, is_coupled) if other.totals else "comparison stopped")

    def _answer(self, messages: list[Message], options: GenerationOptions, *, is_shown: bool = True) -> Turn:
        """Ctrl-C stops it: the turn has what came until then, and no totals."""
        turn, spans, started = Turn(), list[Span](), time.perf_counter()
        is_traced = self.switches["debug"] and is_shown
        try:
            with closing(self.backend.answer(messages, options)) as parts:
                for part in parts:
                    turn.add(part, time.perf_counter() - started)
                    spans += part.spans
                    if is_traced:
                        self.view.rounds(part, turn.num_rounds, self.backend.text_of)
                    elif is_shown:
                        self.view.answer(part.spans)
        except KeyboardInterrupt:
            pass
        finally:
            if is_traced:
                self.view.answer(spans)
            self.view.end_answer()
        return turn
