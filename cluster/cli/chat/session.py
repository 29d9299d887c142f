"""A conversation: takes lines and commands, shows answers and, after every turn, what speculation brought."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable
from contextlib import closing, suppress

from actors.drafters.registry import AUTO, NONE, expand_drafters, pools_of
from actors.errors import InvalidRequest, PacelineError
from cluster.cli.chat.backend import AnswerTotals, Backend, Message, OnRound, Span
from cluster.cli.chat.view import View, format_figures
from cluster.cli.engine import split_names
from cluster.generation import GenerationOptions, changed
from cluster.router.trace import format_trace

HELP = """\
/help             this list, and the settings
/system [TEXT]    what the model is told before all turns
/set NAME VALUE   change a setting; auto is its default
/drafters [NAMES] who may propose tokens: names, comma-separated, auto or none
/reset            forget all turns
/quit             end, like Ctrl-D
//TEXT            say something that begins with a slash"""
_SETTINGS = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "max_draft_tokens")


class ChatSession:
    def __init__(
        self, backend: Backend, options: GenerationOptions, view: View, system: str = "", *, traces: bool = False
    ) -> None:
        """options: of all turns; without a seed one is drawn for every turn. traces: show a line for every round."""
        self.backend = backend
        self.options = options
        self.view = view
        self.system = system
        self.traces = traces
        self.turns: list[Message] = []  # questions and answers
        self.is_over = False
        self.num_failures = 0  # lines that were refused or could not be answered

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or /quit. A failure ends only the current line."""
        for line in lines:
            self.handle(line)
            if self.is_over:
                return

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
        if argument and name in ("help", "reset", "quit"):
            raise InvalidRequest(f"/{name}", argument, "it takes no argument")
        match name:
            case "help":
                self.view.note(f"{HELP}\ndrafters: {self._drafters()}\nnow: {self._settings()}")
            case "system":
                self.system = argument
                self.view.note(f"the system message is {argument!r}" if argument else "there is no system message")
            case "set":
                self._set(argument)
                self.view.note(self._settings())
            case "drafters":
                self._choose_drafters(split_names(argument))
                self.view.note(f"drafters: {self._drafters()}")
            case "reset":
                self.turns = []
                self.view.note("the conversation starts anew")
            case "quit":
                self.is_over = True
            case _:
                raise InvalidRequest("command", f"/{name}", "there is no such command; /help lists them")

    def _set(self, argument: str) -> None:
        """`NAME VALUE`; the value `auto` is the default. Raises InvalidRequest naming field, value and limit."""
        name, _, text = (part.strip() for part in argument.partition(" "))
        if name not in _SETTINGS:
            raise InvalidRequest("/set", name, f"it must be one of {', '.join(_SETTINGS)}")
        self.options = changed(self.options, {name: None if text == "auto" else _number(name, text)})

    def _settings(self) -> str:
        values = {name: getattr(self.options, name) for name in _SETTINGS}
        return ", ".join(f"{name} {'auto' if value is None else f'{value:g}'}" for name, value in values.items())

    def _choose_drafters(self, names: tuple[str, ...]) -> None:
        known = self.backend.sources
        chosen = expand_drafters(names, pools=pools_of(known or ()))
        for name in () if names == (AUTO,) else chosen:
            if known and name not in known:
                limit = f"this engine was made with {', '.join(known)}; or write {AUTO}, {NONE}"
                raise InvalidRequest("drafters", name, limit)
        if names:
            self.options = changed(self.options, {"drafters": None if names == (AUTO,) else chosen})

    def _drafters(self) -> str:
        chosen = self.backend.sources if self.options.drafters is None else self.options.drafters
        return "all of the server" if chosen is None else ", ".join(chosen) or NONE

    def _ask(self, text: str) -> None:
        """One turn. If it fails the conversation stays as it was; Ctrl-C keeps what came until then. With traces, the
        text follows them. Raises PacelineError."""
        asked = Message(role="user", content=text)
        system = [Message(role="system", content=self.system)] if self.system else []
        seed = secrets.randbits(63) if self.options.seed is None else self.options.seed
        options, totals, spans, times = changed(self.options, {"seed": seed}), None, list[Span](), [0.0]
        started = time.perf_counter()
        try:
            with closing(self.backend.answer([*system, *self.turns, asked], options, self._round_writer())) as parts:
                for part in parts:
                    if isinstance(part, AnswerTotals):
                        totals = part
                        continue
                    times = [times[0] or time.perf_counter() - started, time.perf_counter() - started]
                    spans.append(part)
                    if not self.traces:
                        self.view.answer([part])
        except KeyboardInterrupt:
            pass
        finally:
            self.view.answer(spans if self.traces else ())
            self.view.end_answer()
        said = "".join(span.text for span in spans)
        if said or totals is not None:
            self.turns += [asked, Message(role="assistant", content=said)]
        if totals is not None:
            self.view.note(format_figures(totals, first_s=times[0], last_s=times[-1]))
        else:
            self.view.note("stopped; what has been said stays" if said else "stopped")

    def _round_writer(self) -> OnRound:
        numbers = itertools.count(1)
        return lambda trace: self.view.note(format_trace(trace, next(numbers))) if self.traces else None


def _number(name: str, text: str) -> int | float:
    """Whole numbers exactly: float would round a large seed."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise InvalidRequest(name, text, "it must be a number, or auto")
