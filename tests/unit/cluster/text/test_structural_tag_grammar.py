"""Free text with structures: what triggers begin, as ordinary text and as special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.text.constraint_grammar import constraint_grammar
from cluster.text.special_tokens import special_token_ids, split_at_special_tokens
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
SPECIAL = special_token_ids(TOKENIZER)
GRAMMARS = Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [TOKENIZER.eos_token_id], "bytes")
ONE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}


def tag(triggers: list[str], **ends: str) -> dict[str, Any]:
    """Structures from begin to end around ONE. ends: "begin|end" by any name."""
    structures = [dict(zip(("begin", "end"), text.split("¦"), strict=True)) for text in ends.values()]
    return {"structures": [{**marks, "schema": ONE} for marks in structures], "triggers": triggers}


PLAIN = tag(["<f=", "[["], a="<f=a>¦</f>", b="<f=bb>¦", c="[[¦]]")
MARKED = tag(["<|start|>", "<f>"], a="<|start|>a:¦<|pad|>", b="<|start|><|pad|>¦<|start|>", c="<f>¦</f>")


def grammar(given: dict[str, Any]) -> str:
    return constraint_grammar(StructuredOutputs.model_validate({"structural_tag": given}), SPECIAL, "tag")


def end_of(given: dict[str, Any], text: str) -> str | None:
    """The text up to where it leaves the grammar; None: it does not, and the answer may end there."""
    matcher = GRAMMARS.matcher(grammar(given))
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for count, token in enumerate(tokens):
        if not matcher.follow([token]):
            return TOKENIZER.decode(tokens[:count], skip_special_tokens=False)
    may_end = matcher.is_complete or TOKENIZER.eos_token_id in matcher.allowed_tokens()
    return None if may_end else text


@pytest.mark.parametrize(
    ("given", "text", "end"),
    [
        (PLAIN, "", None),
        (PLAIN, "a < b <f and [", None),
        (PLAIN, 'hi <f=a>{"x": 1}</f> and', None),
        (PLAIN, 'hi <f=bb>{"x": 1}[[{"x": 2}]]<f=a>{"x": 2}</f>', None),
        (PLAIN, '<<f=a>{"x": 1}</f>', None),
        (PLAIN, "hi <f=", "hi <f="),
        (PLAIN, "hi <f=c", "hi <f="),
        (PLAIN, '[[{"x": 1}]] [[x', '[[{"x": 1}]] [['),
        (PLAIN, '<f=a>{"x": 3', '<f=a>{"x": '),
        (PLAIN, '<f=a>{"x": 1}</g', '<f=a>{"x": 1}</'),
        (PLAIN, "a<|pad|>", "a"),
        (MARKED, "free", None),
        (MARKED, 'a<|start|>a:{"x": 1}<|pad|>b<f>{"x": 1}</f>', None),
        (MARKED, '<|start|><|pad|>{"x": 1}<|start|>', None),
        (MARKED, "a<|start|>c", "a<|start|>"),
        (MARKED, "a<|pad|>", "a"),
    ],
)
def test_triggers_begin_structures(given: dict[str, Any], text: str, end: str | None) -> None:
    assert end_of(given, text) == end


def test_the_text_of_a_special_token_cannot_be_written_with_others() -> None:
    matcher = GRAMMARS.matcher(grammar(MARKED))
    spelled = [token for letter in "a<|start|>" for token in TOKENIZER.encode(letter, add_special_tokens=False)]
    assert matcher.follow(spelled[:-1])
    assert not matcher.follow(spelled[-1:])


def test_the_parts_of_a_text() -> None:
    assert split_at_special_tokens("a<|pad|><|start|>b", SPECIAL) == ["a", "<|pad|>", "<|start|>", "b"]
    assert split_at_special_tokens("ab", ["a", "ab"]) == ["ab"]
    assert split_at_special_tokens("", SPECIAL) == []
    assert split_at_special_tokens("a", []) == ["a"]


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        (tag(["<f", "<f="], a="<f=a>¦"), "tag.triggers[1]", "is part of it"),
        (tag(["<f", "<f"], a="<f=a>¦"), "tag.triggers[1]", "is part of it"),
        (tag(["<f", "<g"], a="<f=a>¦"), "tag.triggers[1]", "no structure begins with it"),
        (tag(["<f"], a="<f>¦", b="<g>¦"), "tag.structures[1].begin", "must start with one of the triggers"),
        (tag(["<"], a="<f>¦", b="<|start|>¦"), "tag.structures[1].begin", "must start with one of the triggers"),
        (tag(["<|start|>f"], a="<|start|>f¦"), "tag.triggers[0]", "ordinary text or one special token"),
        (
            {"structures": [{"begin": "<f>", "schema": {"x-guidance": {}}, "end": ""}], "triggers": ["<"]},
            "tag.structures[0].schema.x-guidance",
            "no keyword",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(given: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        grammar(given)
    assert error.value.field == field


@pytest.mark.parametrize(
    "text", ['"', "\n", "/", "\\", "%ignore /x/", '" | /.*/', "@said", "<[256]>", "é", "\x00", "#", "//"]
)
def test_no_mark_becomes_grammar(text: str) -> None:
    given = tag([f"<{text}"], a=f"<{text}{text}¦{text}")
    assert end_of(given, f'a <{text}{text}{{"x": 1}}{text} b') is None
    assert end_of(given, f"a <{text}!") == f"a <{text}"
