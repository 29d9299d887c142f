"""Answers of an engine in this process."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType

from cluster.cli.chat.backend import AnswerPart, AnswerTotals, Message, OnRound, Span
from cluster.cli.chat.settings import ChatSettings
from cluster.offline.engine import LocalEngine
from cluster.router.trace import RoundTrace


class LocalBackend:
    tells_rounds = True

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.model_name = engine.info.name
        self.sources = engine.drafter_names
        self.is_coupled = engine.acceptance == "coupled"

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings, seed: int | None, on_round: OnRound | None = None
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
                messages,
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
                            num_tokens=len(generation.token_ids),
                            rounds=generation.rounds,
                            draft_tokens=generation.draft_tokens,
                            accepted=generation.accepted_tokens,
                            verified=dict(verified),
                            finish_reason=generation.finish_reason,
                        )
                    spans = spans_of(piece.token_texts, piece.sources, piece.text)
                    yield AnswerPart(spans, len(piece.token_ids), totals)
                    if interrupted.is_set() and totals is None:
                        raise KeyboardInterrupt

    def text_of(self, token_id: int) -> str:
        return str(self._engine.tokenizer.decode([token_id]))

    def close(self) -> None:
        pass


def spans_of(token_texts: Sequence[str], sources: Sequence[str], text: str) -> tuple[Span, ...]:
    """One span for each run of tokens of a source. What `text` has beyond the tokens' texts belongs to the last."""
    rest = text[sum(map(len, token_texts)) :]
    spans: list[Span] = []
    for part, source in [*zip(token_texts, sources, strict=True), (rest, sources[-1] if sources else "target")]:
        if not part:
            continue
        if spans and spans[-1].source == source:
            spans[-1] = Span(spans[-1].text + part, source)
        else:
            spans.append(Span(part, source))
    return tuple(spans)


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
