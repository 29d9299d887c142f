"""Compiles grammars for the vocabulary of a model."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from actors.errors import InvalidRequest, Size
from actors.grammar.checker import Checked, GrammarChecker
from actors.grammar.limits import LIMITS
from actors.grammar.matcher import GrammarMatcher
from actors.grammar.refused_keywords import RefusedKeyword, refused_keyword, schema_of, schema_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_KEPT = 64  # grammars
_FAILED_USES = 8  # requests that are refused before a grammar is tried again: a machine may have been busy
_MOST_AGAIN_S = 0.01  # in which a grammar has been compiled that may be compiled again between rounds
_NICE = 10  # of a thread that compiles for long
_MOST_REASON_CHARS = 200
_MOST_VALUE_CHARS = 100
_KNOWN_REASONS = {"NoExtensionBias": "it allows no answer at all"}


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher | None  # None: it cannot be compiled
    reason: str = ""  # why not
    keyword: RefusedKeyword | None = None  # of a JSON schema, which is why
    is_schema: bool = False  # and the whole grammar is that schema
    refusals_left: int = _FAILED_USES
    is_quick: bool = False  # to compile


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: LLTokenizer
    checker: GrammarChecker


class Grammars:
    """Grammars in llguidance's own text format. May be used from any thread."""

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        model: str,
        *,
        are_checked: bool = False,
    ) -> None:
        """load_tokenizer: called with the first grammar. vocab_size: columns of the target's logits. eos_token_ids:
        allowed where a grammar may end. model: its name, for errors. are_checked: all grammars come from a process that
        has compiled them, so none is tried before."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._model = model
        self._are_checked = are_checked
        self._lock = threading.Lock()  # of `_known`
        self._loading = threading.Lock()
        self._vocabulary: _Vocabulary | str | None = None  # a text: why there is none; None: no grammar was asked for
        self._known: OrderedDict[str, _Compiled] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def matcher(self, text: str, field: str = "grammar") -> GrammarMatcher:
        """At the beginning of an answer. Raises InvalidRequest naming `field` for a grammar that cannot be compiled, or
        a model whose tokenizer does not work with grammars; Overloaded on a machine too busy to try a new grammar.

        A new grammar is compiled in another process first, which takes milliseconds to seconds. The first one waits for
        the vocabulary, too.
        """
        vocabulary = self._vocabulary_of_model()
        if isinstance(vocabulary, str):
            raise InvalidRequest(field, Size("a constraint"), vocabulary)
        found = self._find(text)
        if found is None:
            found = self._compile(text, vocabulary)
            with self._lock:
                self._known[text] = found
                while len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)
        return self._made(text, field, found, vocabulary)

    def known_matcher(self, text: str, field: str = "grammar") -> GrammarMatcher | None:
        """As `matcher`, without waiting; None where the grammar has to be compiled."""
        vocabulary = self._vocabulary
        found = self._find(text) if isinstance(vocabulary, _Vocabulary) else None
        if found is None or not isinstance(vocabulary, _Vocabulary):
            return None
        return self._made(text, field, found, vocabulary)

    def _made(self, text: str, field: str, found: _Compiled, vocabulary: _Vocabulary) -> GrammarMatcher:
        if found.matcher is None:
            raise _refusal(field, found)

        def compile_again() -> LLMatcher | None:
            with self._lock:
                if self._known.get(text) is found:  # its copies are of no more use
                    del self._known[text]
            return LLMatcher(vocabulary.tokens, text, log_level=0, limits=LIMITS) if found.is_quick else None

        ends = frozenset(self._eos_token_ids)
        return GrammarMatcher(found.matcher.deep_copy(), vocabulary.tokens, self._vocab_size, ends, compile_again)

    def _find(self, text: str) -> _Compiled | None:
        with self._lock:
            found = self._known.get(text)
            if found is None:
                return None
            self._known.move_to_end(text)
            if found.matcher is None:
                found.refusals_left -= 1
                if found.refusals_left <= 0:
                    del self._known[text]
            return found

    def _compile(self, text: str, vocabulary: _Vocabulary) -> _Compiled:
        # Whether one that is checked elsewhere takes long is not known here, and nobody waits for it.
        problem, takes_long = Checked("", True) if self._are_checked else vocabulary.checker.check(text)
        if not problem:
            compiled, seconds = _behind_others(vocabulary, text) if takes_long else _timed(vocabulary, text)
            if not compiled.is_error():
                return _Compiled(compiled, is_quick=seconds < _MOST_AGAIN_S)
            problem = compiled.get_error()
        whole = schema_of(text)
        schema = schema_within(text, problem) if whole is None else whole
        keyword = None if schema is None else refused_keyword(problem, schema)
        return _Compiled(None, _reason(problem), keyword, whole is not None)

    def _vocabulary_of_model(self) -> _Vocabulary | str:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def _load(self) -> _Vocabulary | str:
        unfit = f"model {self._model!r} has no"
        backend = getattr(self._load_tokenizer(), "backend_tokenizer", None)
        if backend is None:
            return f"{unfit} fast tokenizer, which constraints need"
        if not self._eos_token_ids:
            return f"{unfit} end-of-sequence token, which constraints need"
        text = _without_limits(backend)
        try:
            tokens = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError as error:
            return f"{unfit} tokenizer that constraints can use: {error}"
        return _Vocabulary(tokens, GrammarChecker(text, self._vocab_size, self._eos_token_ids))


def _timed(vocabulary: _Vocabulary, text: str) -> tuple[LLMatcher, float]:
    """A compiled grammar, and the processor time that it took."""
    started_s = time.thread_time()
    return LLMatcher(vocabulary.tokens, text, log_level=0, limits=LIMITS), time.thread_time() - started_s


def _behind_others(vocabulary: _Vocabulary, text: str) -> tuple[LLMatcher, float]:
    """As `_timed`, in a thread that gives way to others: a thread may not take its niceness back."""
    with ThreadPoolExecutor(1, initializer=_give_way) as thread:
        return thread.submit(_timed, vocabulary, text).result()


def _give_way() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))


def _without_limits(backend: object) -> str:
    """A tokenizer of `tokenizers` as JSON, without truncation and padding."""
    from tokenizers import Tokenizer

    assert isinstance(backend, Tokenizer)
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return str(copy.to_str())


def _refusal(field: str, failed: _Compiled) -> InvalidRequest:
    """field: the client's name of the constraint."""
    limit = f"it cannot be compiled: {failed.reason}"
    if failed.keyword is None:
        return InvalidRequest(field, Size("a constraint"), limit)
    if not failed.is_schema:  # it is one of several
        place = failed.keyword.part.place("schema", failed.keyword.keyword)
        return InvalidRequest(field, Size("a constraint"), f"{limit} ({place})")
    value = failed.keyword.value
    if not isinstance(value, (str, int, float)) or len(repr(value)) > _MOST_VALUE_CHARS:
        value = Size("given")
    return InvalidRequest(failed.keyword.part.place(field, failed.keyword.keyword), value, limit)


def _reason(error: str) -> str:
    """The line of llguidance's message that says what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["for no known reason"]
    told = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    reason = f"{lines[0]} {told[-1]}" if told else lines[0]
    reason = _KNOWN_REASONS.get(reason, reason).replace("Expected f64", "Expected a number")
    return reason if len(reason) <= _MOST_REASON_CHARS else f"{reason[:_MOST_REASON_CHARS]}..."
