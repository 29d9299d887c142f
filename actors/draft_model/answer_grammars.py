"""Where the answers of constrained sequences are in their grammars, so that a draft model guesses within these.

A guess that the grammar does not allow is never right. The target masks by itself, so an answer does not depend on
whether its guesses are masked: without a mask, a guess may only be of no use.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from actors.engine.sequence import Sequence
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    compiling: Future[GrammarMatcher]
    num_followed: int  # tokens of the sequence that the matcher has followed, or that are not the answer's
    is_given_up: bool = False


class AnswerGrammars:
    """The matchers of a draft engine's sequences. A new grammar is compiled in a thread; guesses are free meanwhile."""

    def __init__(self, grammars: Grammars) -> None:
        self.vocab_size = grammars.vocab_size
        self._grammars = grammars
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._answers: WeakKeyDictionary[Sequence, _Answer] = WeakKeyDictionary()

    def matcher(self, sequence: Sequence) -> GrammarMatcher | None:
        """Behind the sequence's known tokens. None: its guesses are free."""
        if not sequence.begin.grammar:
            return None
        answer = self._answers.get(sequence)
        if answer is None:
            answer = _Answer(self._compile(sequence.begin.grammar), sequence.begin.num_prompt_tokens)
            self._answers[sequence] = answer
        if answer.is_given_up or not answer.compiling.done():
            return None
        try:
            return self._followed(answer, sequence)
        except Exception as error:  # whose text may tell of the request
            logger.warning("guesses of a constrained answer are free: %s", type(error).__name__)
        answer.is_given_up = True
        return None

    def _compile(self, grammar: str) -> Future[GrammarMatcher]:
        try:
            known = self._grammars.known_matcher(grammar)
        except Exception:  # it is refused; the thread says so again
            known = None
        if known is None:
            return self._compiler.submit(self._grammars.matcher, grammar)
        compiled: Future[GrammarMatcher] = Future()
        compiled.set_result(known)
        return compiled

    def _followed(self, answer: _Answer, sequence: Sequence) -> GrammarMatcher | None:
        """Raises what the compiler has raised."""
        matcher = answer.compiling.result()
        new = sequence.tokens[answer.num_followed :].tolist()
        if new:
            answer.num_followed += len(new)
            answer.is_given_up = not matcher.follow(new)
        return None if answer.is_given_up else matcher
