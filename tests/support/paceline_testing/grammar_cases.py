"""Grammars for tests, and a reference that matches token by token from the beginning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, grammar_from

from actors.grammar.grammars import Grammars
from actors.grammar.limits import LIMITS
from paceline_testing.toy_tokenizer import toy_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "at"],
    "additionalProperties": False,
}
GRAMMARS = {
    "person": LLMatcher.grammar_from_json_schema(json.dumps(PERSON)),
    "any object": LLMatcher.grammar_from_json_schema({"type": "object"}),
    "date": LLMatcher.grammar_from_regex(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    "unicode": LLMatcher.grammar_from_regex(r"(äö|日本|é)*x"),
    "choice": grammar_from("choice", ["the dog", "the dogs", "the quick fox", "a"]),
    "sum": LLMatcher.grammar_from_lark('start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]+/'),
}

# With fewer than 30 items for each step, it becomes too complex somewhere behind its first token.
HARD_TAIL = 'start: /(ab|c){2,5}/ "x" tail\ntail: /[a-z]{1,3}/ | tail tail | tail "," tail'


def few_items(count: int) -> LLParserLimits:
    """The limits of grammars, with fewer items for each step of the parser."""
    names = ("step_lexer_fuel", "max_lexer_states", "verbose_errors")
    return LLParserLimits(step_max_items=count, **{name: getattr(LIMITS, name) for name in names})


@cache
def toy_grammars(vocab_size: int = 0) -> tuple[Grammars, int, int]:
    """Of the toy tokenizer: the grammars, its vocabulary's size, and its end-of-sequence id."""
    tokenizer = toy_tokenizer()
    vocab_size = vocab_size or len(tokenizer)
    return Grammars(lambda: tokenizer, vocab_size, [tokenizer.eos_token_id], "toy"), vocab_size, tokenizer.eos_token_id


def allowed_after(grammars: Grammars, text: str, token_ids: Sequence[int]) -> np.ndarray | None:
    """Tokens that may follow, by a matcher that reads all tokens; None if they do not follow the grammar."""
    matcher = grammars.matcher(text)
    return matcher.allowed_tokens() if all(matcher.follow([token]) for token in token_ids) else None


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Tokens of a mask."""
    return np.flatnonzero([words[token // 32] >> (token % 32) & 1 for token in range(vocab_size)])
