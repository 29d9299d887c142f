"""A conversation: takes lines and commands, shows answers, and tells after every turn what speculation brought."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import msgspec

from actors.drafters.registry import AUTO, EAGLE, NONE, expand_drafters
from actors.errors import InvalidRequest, PacelineError
from actors.messages import Acceptance
from cluster.cli.chat.backend import AnswerTotals, Backend, Question
from cluster.cli.chat.conversation import Conversation
from cluster.cli.chat.settings import ChatSettings, changed, describe, with_setting
from cluster.cli.chat.sources import Span
from cluster.cli.chat.stats import TurnTimes, format_comparison, format_stats
from cluster.cli.chat.view import View
from cluster.router.trace import RoundTrace

# Name and arguments, and what it does.
COMMANDS = {
    "help": ("", "this list, and the settings"),
    "system": ("[TEXT]", "what the model is told before all turns"),
    "set": ("NAME VALUE", "change a setting; auto is its default"),
    "drafters": ("[NAMES]", "who may propose tokens: names, comma-separated, auto or none"),
    "stats": ("", "figures of the last turn again"),
    "compare": ("", "decode the last turn again without drafts"),
    "regen": ("", "answer the last question again"),
    "undo": ("", "forget the last turn"),
    "reset": ("", "forget all turns"),
    "quit": ("", "end, like Ctrl-D"),
}
_CONTINUES = "\\"


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and what is needed to ask for it again. totals None: it was stopped."""

    question: Question
    settings: ChatSettings
    seed: int
    text: str
    times: TurnTimes
    totals: AnswerTotals | None


def parse_command(line: str) -> tuple[str, str] | None:
    """Name and argument of a command; None for something to say. `//` begins a line that begins with `/`."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, argument = line[1:].strip().partition(" ")
    return name.lower(), argument.strip()


class ChatSession:
    def __init__(self, backend: Backend, settings: ChatSettings, conversation: Conversation, view: View) -> None:
        self.backend = backend
        self.settings = settings
        self.conversation = conversation
        self.view = view
        self.is_over = False
        self.num_failures = 0  # lines that were refused or could not be answered
        self._last: Turn | None = None
        self._begun = ""  # lines of a text that goes on

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or /quit. What fails costs its line and nothing else. A backslash at the end of a line
        continues the text on the next one."""
        for line in lines:
            text = line.rstrip("\r\n")
            if text.endswith(_CONTINUES):
                self._begun += text.removesuffix(_CONTINUES) + "\n"
                continue
            text, self._begun = self._begun + text, ""
            self.handle(text)
            if self.is_over:
                return
        if self._begun:
            self.handle(self._begun)

    def handle(self, line: str) -> None:
        line = line.strip()
        if not line:
            return
        try:
            command = parse_command(line)
            if command is not None:
                self.run_command(*command)
            else:
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
        arguments, _ = COMMANDS[name]
        if argument and not arguments:
            raise InvalidRequest(f"/{name}", argument, "it takes no argument")
        if name == "help":
            self._help()
        elif name == "system":
            self.conversation.set_system(argument)
            self.view.note(f"the system message is {argument!r}" if argument else "there is no system message")
        elif name == "set":
            self._set(argument)
        elif name == "drafters":
            self._set_drafters(argument)
        elif name == "stats":
            turn = self._finished("/stats")
            self.view.note(format_stats(turn[1], turn[0].times))
        elif name == "compare":
            self.compare_last()
        elif name == "reset":
            self.conversation.reset()
            self.view.note("the conversation starts anew")
        elif name == "quit":
            self.is_over = True
        else:
            self._take_back(name)

    def ask(self, text: str) -> None:
        """One turn. Raises PacelineError, and the conversation is as it was."""
        settings = self.settings
        question: Question = self.conversation.with_question(text) if settings.template else text
        seed = settings.seed if settings.seed is not None else secrets.randbits(63)
        turn = self._last = self._answer(question, settings, seed)
        if settings.template and (turn.text or turn.totals is not None):
            self.conversation.add(text, turn.text)
        if turn.totals is None:
            self.view.note("stopped; what has been said stays, /undo takes it back" if turn.text else "stopped")
            return
        self.view.note(format_stats(turn.totals, turn.times))
        if settings.compare and settings.active_drafters != ():
            self.compare_last()

    def compare_last(self) -> None:
        """The last turn once more with plain decoding. Raises InvalidRequest if there is nothing to compare."""
        turn, totals = self._finished("/compare")
        if turn.settings.active_drafters == ():
            raise InvalidRequest("/compare", "", "the last turn was plain decoding itself; /set speculative on")
        settings = msgspec.structs.replace(turn.settings, speculative=False, debug=False)
        plain = self._answer(turn.question, settings, turn.seed, is_shown=False)
        if plain.totals is None:
            self.view.note("comparison stopped")
            return
        is_coupled = self.backend.is_coupled or settings.temperature == 0
        drafted, undrafted = (totals, turn.times), (plain.totals, plain.times)
        self.view.note(format_comparison(drafted, undrafted, (turn.text, plain.text), is_coupled=is_coupled))

    def _finished(self, command: str) -> tuple[Turn, AnswerTotals]:
        if self._last is None or self._last.totals is None:
            raise InvalidRequest(command, "", "there is no finished turn")
        return self._last, self._last.totals

    def _help(self) -> None:
        usages = {f"/{name} {arguments}".rstrip(): text for name, (arguments, text) in COMMANDS.items()}
        usages |= {"//TEXT": "say something that begins with a slash", "TEXT\\": "go on in the next line"}
        lines = [f"{usage:<18}{text}" for usage, text in usages.items()]
        self.view.note("\n".join([*lines, f"drafters: {self._drafters_now()}", f"now: {describe(self.settings)}"]))

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
            self.settings = changed(self.settings, drafters=None if names == (AUTO,) else expanded)
        self.view.note(f"drafters: {self._drafters_now()}")

    def _drafters_now(self) -> str:
        chosen = self.settings.drafters
        names = self.backend.sources if chosen is None else chosen
        return ", ".join(names) or ("all of the server" if chosen is None and not self.backend.tells_rounds else NONE)

    def _take_back(self, name: str) -> None:
        """/undo, and /regen, which keeps the old answer if there is no new one."""
        before = list(self.conversation.messages)
        question = self.conversation.remove_last()
        if question is None:
            raise InvalidRequest(f"/{name}", "", "nothing has been said yet")
        if name == "undo":
            self.view.note("the last turn is gone")
            return
        try:
            self.ask(question)
        finally:
            if len(self.conversation.messages) < len(before):
                self.conversation.messages = before

    def _answer(self, question: Question, settings: ChatSettings, seed: int, *, is_shown: bool = True) -> Turn:
        """Ctrl-C stops it: the turn has what came until then, and no totals."""
        traces: list[RoundTrace] = []
        spans: list[Span] = []
        totals: AnswerTotals | None = None
        started = time.perf_counter()
        first_s = last_s = 0.0
        first_tokens = num_rounds = 0
        on_round = traces.append if settings.debug and self.backend.tells_rounds else None
        try:
            with closing(self.backend.answer(question, settings, seed, on_round)) as parts:
                for part in parts:
                    if part.spans or part.num_tokens:
                        last_s = time.perf_counter() - started
                    if not first_tokens and last_s:
                        first_s, first_tokens = last_s, part.num_tokens or 1
                    spans += part.spans
                    totals = part.totals
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
        text = "".join(span.text for span in spans)
        return Turn(question, settings, seed, text, TurnTimes(first_s, last_s, first_tokens), totals)
