"""Where the answers of constrained sequences are in their grammars, so that a draft model guesses within these.

A guess that the grammar does not allow is never right. The target masks by itself, so an answer does not depend on
whether its guesses are masked: without a mask, a guess may only be of no use. So grammars with slow masks are given up:
the drafts of all sequences would wait for these.

Under `acceptance: rejection` the time of a draft must not depend on its tokens: drafts would be late, and not verified,
by their tokens, and the text would leave the target's law. Masks behind drawn tokens take such a time. They are left
out for the rest of an answer when some have taken so long that it could matter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Sequences
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

from actors.engine.sequence import Sequence
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher
from actors.messages import TokenMasks

logger = logging.getLogger(__name__)

_Path = tuple[int, ...]  # tokens behind the known ones
# Processor time of an answer's masks in one forward. Common ones take a tenth of a millisecond each, the first more.
_SLOW_S = 10e-3
_SLOW_DRAWN_S = 1e-3  # the same, behind drawn tokens
_MOST_SLOW = 3  # forwards


@dataclass(slots=True)
class _Answer:
    compiling: Future[GrammarMatcher]
    num_followed: int  # tokens of the sequence that the matcher has followed, or that are not the answer's
    is_given_up: bool = False
    num_slow: int = 0
    num_slow_drawn: int = 0


class AnswerGrammars:
    """The matchers of a draft engine's sequences. A new grammar is compiled in a thread; guesses are free meanwhile."""

    def __init__(self, grammars: Grammars) -> None:
        self.vocab_size = grammars.vocab_size
        self._grammars = grammars
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._answers: WeakKeyDictionary[Sequence, _Answer] = WeakKeyDictionary()

    def masks(self, sequence: Sequence, paths: Sequences[_Path | None]) -> TokenMasks | None:
        """What may follow each of these paths behind the sequence's known tokens; rows are free for None. None: all
        are free."""
        if not sequence.begin.grammar:
            return None
        answer = self._answers.get(sequence)
        if answer is None:
            answer = _Answer(self._compile(sequence), sequence.begin.num_prompt_tokens)
            self._answers[sequence] = answer
        if answer.is_given_up or answer.num_slow >= _MOST_SLOW or not answer.compiling.done():
            return None
        if sequence.is_rejection and answer.num_slow_drawn >= _MOST_SLOW:
            paths = [None if path else path for path in paths]
        try:
            matcher = self._followed(answer, sequence)
            return None if matcher is None else _timed_masks(answer, matcher, paths)
        except Exception as error:  # whose text may tell of the request
            logger.warning("guesses of a constrained answer are free: %s", type(error).__name__)
        answer.is_given_up = True
        return None

    def _compile(self, sequence: Sequence) -> Future[GrammarMatcher]:
        grammar = sequence.begin.grammar
        try:
            known = self._grammars.known_matcher(grammar)
        except Exception:  # it is refused; the thread says so again
            known = None
        if known is None:
            return self._compiler.submit(self._compiled, grammar, ref(sequence))
        compiled: Future[GrammarMatcher] = Future()
        compiled.set_result(known)
        return compiled

    def _compiled(self, grammar: str, sequence: ReferenceType[Sequence]) -> GrammarMatcher:
        """Raises LookupError if the answer has ended meanwhile: others wait for their grammars."""
        if sequence() is None:
            raise LookupError("the sequence is gone")
        return self._grammars.matcher(grammar)

    def _followed(self, answer: _Answer, sequence: Sequence) -> GrammarMatcher | None:
        """Raises what the compiler has raised."""
        matcher = answer.compiling.result()
        new = sequence.tokens[answer.num_followed :].tolist()
        if new:
            answer.num_followed += len(new)
            answer.is_given_up = not matcher.follow(new)
        return None if answer.is_given_up else matcher


def _timed_masks(answer: _Answer, matcher: GrammarMatcher, paths: Sequences[_Path | None]) -> TokenMasks:
    started_s = time.thread_time()
    masks = matcher.masks_behind(paths)
    taken_s = time.thread_time() - started_s
    answer.num_slow += taken_s > _SLOW_S
    answer.num_slow_drawn += any(paths) and taken_s > _SLOW_DRAWN_S
    return masks
