"""Answers of an engine in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby

from cluster.cli.chat.backend import AnswerPart, AnswerTotals, Backend, Message, Span
from cluster.generation import GenerationOptions
from cluster.offline.engine import Generation, LocalEngine
from cluster.router.trace import RoundTrace


class LocalBackend(Backend):
    tells_rounds = True

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.model_name = engine.info.name
        self.sources = engine.drafter_names
        self.is_coupled = engine.acceptance == "coupled"

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> Generator[AnswerPart, None, None]:
        rounds: list[RoundTrace] = []
        with _held_interrupts() as interrupted:

            def note(trace: RoundTrace) -> None:
                rounds.append(trace)
                if interrupted.is_set() and not trace.num_emitted:
                    raise KeyboardInterrupt

            with closing(self._engine.stream(messages, options, on_round=note)) as pieces:
                for piece in pieces:
                    totals = None if piece.generation is None else _totals(piece.generation)
                    spans = spans_of(piece.token_texts, piece.sources, piece.text)
                    yield AnswerPart(spans, len(piece.token_ids), totals, tuple(rounds))
                    rounds.clear()
                    if interrupted.is_set() and totals is None:
                        raise KeyboardInterrupt

    def text_of(self, token_id: int) -> str:
        return str(self._engine.tokenizer.decode([token_id]))


def spans_of(token_texts: Sequence[str], sources: Sequence[str], text: str) -> list[Span]:
    """One span for each run of tokens of a source. What `text` has beyond the tokens' texts belongs to the last."""
    rest = text[sum(map(len, token_texts)) :]
    pairs = [*zip(token_texts, sources, strict=True), (rest, sources[-1] if sources else "target")]
    runs = groupby((pair for pair in pairs if pair[0]), key=lambda pair: pair[1])
    return [Span("".join(part for part, _ in run), source) for source, run in runs]


def _totals(generation: Generation) -> AnswerTotals:
    return AnswerTotals(
        num_tokens=len(generation.token_ids),
        rounds=generation.rounds,
        draft_tokens=generation.draft_tokens,
        accepted=generation.accepted_tokens,
        finish_reason=generation.finish_reason,
    )


@contextmanager
def _held_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the round under way ends and its KV cache stays valid; a second one interrupts."""
    event = threading.Event()

    def hold(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
