"""Compiles grammars for the vocabulary of a model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from actors.errors import InvalidRequest, ModelError
from actors.grammar.matcher import GrammarMatcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_KEPT = 64  # compiled grammars
# Errors without the parser's state: it would tell the answer so far.
_LIMITS = LLParserLimits(verbose_errors=False)


class Grammars:
    """Grammars in llguidance's own text format. May be used from any thread: compiling releases the interpreter."""

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        model: str,
    ) -> None:
        """load_tokenizer: called with the first grammar. vocab_size: columns of the target's logits. eos_token_ids:
        allowed where a grammar may end; not empty. model: its name, for errors."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._model = model
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None  # made with the first grammar: it takes up to a second
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, text: str, field: str = "grammar") -> GrammarMatcher:
        """At the beginning of an answer. Raises InvalidRequest naming `field` for a grammar that cannot be compiled,
        ModelError if the model's tokenizer has no bytes of tokens to match.

        A grammar that is new takes some milliseconds, at most about a second.
        """
        vocabulary = self._vocabulary_of_model()
        with self._lock:
            compiled = self._compiled.get(text)
            if compiled is not None:
                self._compiled.move_to_end(text)
        if compiled is None:
            compiled = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
            if compiled.is_error():
                raise InvalidRequest(field, f"{len(text)} characters", _reason(compiled.get_error()))
            with self._lock:
                self._compiled[text] = compiled
                while len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(compiled.deep_copy(), self._vocab_size)

    def _vocabulary_of_model(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = from_tokenizer(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
                except ValueError as error:
                    raise ModelError(
                        f"model {self._model!r}: its tokenizer does not work with grammars: {error}"
                    ) from None
            return self._vocabulary


def _reason(error: str) -> str:
    """The first line of llguidance's message, as the end of a sentence."""
    return f"it cannot be compiled: {error.strip().splitlines()[0]}"
