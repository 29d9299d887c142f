"""Answers of an engine in this process."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType

from cluster.cli.chat.backend import AnswerPart, AnswerTotals, OnRound, Question
from cluster.cli.chat.settings import ChatSettings
from cluster.cli.chat.sources import spans_of
from cluster.offline.engine import LocalEngine
from cluster.offline.requests import Prompt
from cluster.router.trace import RoundTrace


class LocalBackend:
    tells_rounds = True

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.model_name = engine.info.name
        self.sources = engine.drafter_names
        self.max_draft_tokens = engine.max_draft_tokens
        self.is_coupled = engine.acceptance == "coupled"

    def answer(
        self, question: Question, settings: ChatSettings, seed: int | None, on_round: OnRound | None = None
    ) -> Generator[AnswerPart, None, None]:
        verified: Counter[str] = Counter()
        with _interrupts_between_rounds() as interrupted:

            def note(trace: RoundTrace) -> None:
                verified.update(trace.verified)
                if on_round is not None:
                    on_round(trace)
                if interrupted.is_set() and not trace.num_emitted:
                    raise KeyboardInterrupt

            pieces = self._engine.stream(
                _prompt(question),
                on_round=note,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                seed=seed,
                drafters=settings.active_drafters,
                max_draft_tokens=settings.max_draft_tokens,
            )
            with closing(pieces):
                for piece in pieces:
                    totals = None
                    if (generation := piece.generation) is not None:
                        totals = AnswerTotals(
                            len(generation.token_ids),
                            generation.rounds,
                            generation.draft_tokens,
                            generation.accepted_tokens,
                            dict(verified),
                            generation.finish_reason,
                        )
                    spans = spans_of(piece.token_texts, piece.sources, piece.text)
                    yield AnswerPart(spans, len(piece.token_ids), totals)
                    if interrupted.is_set() and totals is None:
                        raise KeyboardInterrupt

    def text_of(self, token_id: int) -> str:
        return str(self._engine.tokenizer.decode([token_id]))

    def close(self) -> None:
        pass


def _prompt(question: Question) -> Prompt:
    if isinstance(question, str):
        return question
    return [{"role": message.role, "content": message.content} for message in question]


@contextmanager
def _interrupts_between_rounds() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the round under way is finished and its KV stays good. A second one interrupts
    at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def hold(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
