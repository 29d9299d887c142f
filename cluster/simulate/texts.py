"""Token ids of prompts and answers: made of phrases that come again, or recorded ones of a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np

from actors.errors import InvalidRequest

_COPIED = 0.25  # share of an answer's runs that repeat what its prompt has
_FRESH = 0.3  # probability of a token that is in no phrase, behind each phrase
_NUM_PHRASES = 600
_PHRASE_TOKENS = (2, 14)
_EMPTY = np.empty(0, np.int32)


class Texts(Protocol):
    vocab_size: int

    def system(self, tenant: int, number: int, count: int) -> np.ndarray:
        """A system prompt, the same each time: int32 [count]."""
        ...

    def exchange(
        self, turn: tuple[int, int], tenant: int, before: np.ndarray, num_new: int, num_answer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a turn adds to the text before it, and its answer: int32. turn: numbers of conversation and turn; the
        same one has the same text."""
        ...


class PhraseTexts:
    """Texts over phrases by Zipf's law, each tenant its own, with copies from the prompt and fresh tokens between.

    Tenants also have separate tokens (`tokens_of`), as far as the vocabulary is large enough.
    """

    def __init__(self, seed: int, vocab_size: int = 32_000, tokens_of_tenant: int = 4_000, num_common: int = 0) -> None:
        """num_common: first tokens of each phrase that all tenants' phrases of its rank begin with. What comes next
        differs, so that a draft shows from whose text it was taken."""
        self.vocab_size = vocab_size
        self._seed = seed
        self._own = tokens_of_tenant
        self._num_common = num_common
        self._phrases: dict[int, tuple[list[np.ndarray], np.ndarray]] = {}

    def tokens_of(self, tenant: int) -> range:
        first = 2 + tenant * self._own % (self.vocab_size - self._own - 1) // 2 * 2
        return range(first, first + self._own // 2 * 2)

    def system(self, tenant: int, number: int, count: int) -> np.ndarray:
        random = np.random.default_rng((self._seed, 1, tenant, number))
        return self._text(random, tenant, count, _EMPTY)

    def exchange(
        self, turn: tuple[int, int], tenant: int, before: np.ndarray, num_new: int, num_answer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((self._seed, 2, *turn))
        new = self._text(random, tenant, num_new, _EMPTY)
        return new, self._text(random, tenant, num_answer, np.concatenate([before[-512:], new]))

    def _text(self, random: np.random.Generator, tenant: int, count: int, source: np.ndarray) -> np.ndarray:
        phrases, shares = self._book(tenant)
        parts: list[np.ndarray] = []
        length = 0
        while length < count:
            for number, kind, at in zip(
                np.searchsorted(shares, random.random(16)), random.random(16), random.random(16), strict=True
            ):
                if len(source) > 16 and kind < _COPIED:
                    start = int(at * (len(source) - 16))
                    part = source[start : start + 4 + start % 13]
                else:
                    part = phrases[number]
                parts.append(part)
                length += len(part)
                if at < _FRESH:
                    own = self.tokens_of(tenant)
                    parts.append(np.array([own.start + int(at / _FRESH * len(own))], np.int32))
                    length += 1
        return np.concatenate(parts)[:count]

    def _book(self, tenant: int) -> tuple[list[np.ndarray], np.ndarray]:
        """A tenant's phrases, and up to each of them the share of their uses."""
        known = self._phrases.get(tenant)
        if known is None:
            random = np.random.default_rng((self._seed, 0, tenant))
            own = self.tokens_of(tenant)
            lengths = random.integers(*_PHRASE_TOKENS, _NUM_PHRASES)
            tokens = random.integers(own.start, own.stop, lengths.sum(), np.int32)
            weights = 1.0 / np.arange(1, _NUM_PHRASES + 1)
            shares = np.cumsum(weights / weights.sum())
            shares[-1] = 1.0
            phrases = np.split(tokens, np.cumsum(lengths)[:-1])
            for phrase, beginning in zip(phrases, self._beginnings(), strict=True):
                num_same = min(len(phrase) - 1, self._num_common)
                phrase[:num_same] = beginning[:num_same]
            known = self._phrases[tenant] = phrases, shares
        return known

    @property
    def common_tokens(self) -> range:
        return range(self.vocab_size - self._own, self.vocab_size)

    def _beginnings(self) -> np.ndarray:
        """int32 [phrase, num_common]"""
        random = np.random.default_rng((self._seed, 3))
        common = self.common_tokens
        return random.integers(common.start, common.stop, (_NUM_PHRASES, self._num_common), np.int32)


class RecordedTexts:
    """Recorded exchanges in random order. file: `.npz` with int32 arrays `prompts` and `answers`, joined, and int64
    `prompt_lengths` and `answer_lengths`, as tests/bench/simulate/record_answers.py writes it.

    Raises InvalidRequest.
    """

    def __init__(self, file: Path) -> None:
        try:
            with np.load(file) as stored:
                self.prompts = np.split(stored["prompts"], np.cumsum(stored["prompt_lengths"])[:-1])
                self.answers = np.split(stored["answers"], np.cumsum(stored["answer_lengths"])[:-1])
        except OSError as error:
            raise InvalidRequest("--answers", str(file), f"it cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, BadZipFile):
            limit = "it must be an .npz file with arrays prompts, answers, prompt_lengths and answer_lengths"
            raise InvalidRequest("--answers", str(file), limit) from None
        self.vocab_size = 1 + max(int(text.max(initial=0)) for text in (*self.prompts, *self.answers))

    def system(self, tenant: int, number: int, count: int) -> np.ndarray:
        prompt = self.prompts[(tenant * 31 + number) % len(self.prompts)]
        return np.resize(prompt, count).astype(np.int32)

    def exchange(
        self, turn: tuple[int, int], tenant: int, before: np.ndarray, num_new: int, num_answer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        number = int(np.random.default_rng(turn).integers(len(self.prompts)))
        return self.prompts[number], self.answers[number]


class LengthsOnly:
    """Texts of which only lengths and equal beginnings count, for aggregated groups: one token for each system prompt
    and for each conversation, again and again."""

    vocab_size = 2**31 - 1

    def system(self, tenant: int, number: int, count: int) -> np.ndarray:
        return np.full(count, (tenant * 4096 + number) % 2**30, np.int32)

    def exchange(
        self, turn: tuple[int, int], tenant: int, before: np.ndarray, num_new: int, num_answer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        token = 2**30 + turn[0] % (2**30 - 1)
        return np.full(num_new, token, np.int32), np.full(num_answer, token, np.int32)
