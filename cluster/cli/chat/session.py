"""A conversation: takes lines, says answers, and tells after every turn what speculation brought."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors.errors import InvalidRequest, PacelineError
from cluster.cli.chat.backend import AnswerTotals, Backend, Question
from cluster.cli.chat.commands import parse_command, run_command
from cluster.cli.chat.conversation import Conversation, SavedChat, load_chat, save_chat
from cluster.cli.chat.settings import ChatSettings
from cluster.cli.chat.sources import Span
from cluster.cli.chat.stats import TurnTimes, format_comparison, format_stats
from cluster.cli.chat.view import View
from cluster.router.trace import RoundTrace


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and all that is needed to ask for it again. totals None: it was stopped."""

    question: Question
    settings: ChatSettings
    seed: int
    text: str
    times: TurnTimes
    totals: AnswerTotals | None


class ChatSession:
    def __init__(self, backend: Backend, settings: ChatSettings, conversation: Conversation, view: View) -> None:
        self.backend = backend
        self.settings: ChatSettings = settings
        self.conversation = conversation
        self.view = view
        self.is_over = False
        self.num_failures = 0  # lines that were refused or could not be answered
        self._last: Turn | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or one of them says so. What fails costs its line and nothing else."""
        for line in lines:
            self.handle(line)
            if self.is_over:
                return

    def handle(self, line: str) -> None:
        line = line.strip()
        if not line:
            return
        try:
            command = parse_command(line)
            if command is not None:
                run_command(self, *command)
            else:
                self.ask(line[1:] if line.startswith("//") else line)
        except PacelineError as error:
            self.num_failures += 1
            self.view.error(str(error))
        except KeyboardInterrupt:
            self.view.note("stopped")

    def ask(self, text: str) -> None:
        """One turn. Raises PacelineError, and the conversation is as it was."""
        is_chat = self.settings.uses_template
        question: Question = self.conversation.with_question(text) if is_chat else text
        settings = self.settings
        seed = settings.seed if settings.seed is not None else secrets.randbits(63)
        turn = self._answer(question, settings, seed)
        self._last = turn
        if is_chat and (turn.text or turn.totals is not None):
            self.conversation.add(text, turn.text)
        if turn.totals is None:
            self.view.note("stopped; what has been said stays, /remove takes it back" if turn.text else "stopped")
            return
        self.view.note(format_stats(turn.totals, turn.times))
        if settings.compare and settings.active_drafters != ():
            self.compare_last()

    def compare_last(self) -> None:
        """The last turn once more with plain decoding. Raises InvalidRequest if there is nothing to compare."""
        turn = self._last
        if turn is None or turn.totals is None:
            raise InvalidRequest("/compare", "", "there is no finished turn to compare")
        if turn.settings.active_drafters == ():
            raise InvalidRequest("/compare", "", "the last turn was plain decoding itself; /speculative on")
        settings = msgspec.structs.replace(turn.settings, speculative=False, debug=False)
        plain = self._answer(turn.question, settings, turn.seed, is_shown=False)
        if plain.totals is None:
            self.view.note("comparison stopped")
            return
        drafted = (turn.totals, turn.times)
        is_coupled = self.backend.is_coupled or settings.temperature == 0
        texts = (turn.text, plain.text)
        self.view.note(format_comparison(drafted, (plain.totals, plain.times), texts, is_coupled=is_coupled))

    def save(self, path: Path) -> None:
        """Raises InvalidRequest."""
        chat = SavedChat(model=self.backend.model_name, settings=self.settings, messages=self.conversation.messages)
        save_chat(path, chat)
        self.view.note(f"saved {self.conversation.num_turns} turns to {path}")

    def load(self, path: Path) -> None:
        """Raises InvalidRequest, and nothing changes."""
        chat = load_chat(path)
        self.settings, self.conversation.messages = chat.settings, list(chat.messages)
        self._last = None
        self.view.note(f"loaded {self.conversation.num_turns} turns from {path}")

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
                        self.view.round(
                            trace, num_rounds, part.spans if trace is traces[-1] else (), self.backend.text_of
                        )
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
