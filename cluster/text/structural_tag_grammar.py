"""The grammar of free text in which triggers begin structures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.errors import InvalidRequest
from cluster.json_schemas import check_schema, json_rule
from cluster.structural_tag import StructuralTag
from cluster.text.special_tokens import split_at_special_tokens
from cluster.text.tools.lark import ANY_TEXT, Lark, absence_of, either, quoted

_TEXT, _FREE_TEXT = "TEXT", "FREE_TEXT"


def structural_tag_grammar(tag: StructuralTag, special_tokens: Mapping[str, int], field: str) -> str:
    """In Lark's notation for llguidance. special_tokens: ids by text. field: what errors name.

    Raises InvalidRequest for triggers and structures that do not fit together, and for schemas that cannot be followed.
    """
    lark = Lark(special_tokens.get, field)
    triggers = [split_at_special_tokens(trigger, special_tokens) for trigger in tag.triggers]
    _check_triggers(triggers, lark, field)
    rests: list[list[str]] = [[] for _ in triggers]  # expressions of what may follow each trigger
    for index, structure in enumerate(tag.structures):
        place = f"{field}.structures[{index}]"
        check_schema(structure.json_schema, f"{place}.schema")
        number, rest = _after_trigger(split_at_special_tokens(structure.begin, special_tokens), triggers, lark, place)
        schema = lark.shared_rule(f"schema_{index}", json_rule(structure.json_schema, strict=True))
        end = lark.marks(*split_at_special_tokens(structure.end, special_tokens))
        rests[number].append(" ".join(filter(None, (lark.marks(*rest), schema, end))))
    for index, bodies in enumerate(rests):
        if not bodies:
            raise InvalidRequest(f"{field}.triggers[{index}]", tag.triggers[index], "no structure begins with it")
    special = [trigger for (trigger,) in triggers if lark.is_special(trigger)]
    ordinary = [trigger for (trigger,) in triggers if not lark.is_special(trigger)]
    # The text of a special token could also be written with ordinary tokens, and would begin nothing then.
    lark.rule(_TEXT, " & ".join([ANY_TEXT, *map(absence_of, special)]))
    lark.rule(_FREE_TEXT, " & ".join([_TEXT, *map(absence_of, ordinary)]))
    segments = [
        f"{_text_up_to(lark, index, trigger)} {either(rests[index])}" for index, (trigger,) in enumerate(triggers)
    ]
    lark.rule("segment", either(segments))
    lark.rule("start", f"segment* {_FREE_TEXT}")
    return lark.written()


def _check_triggers(triggers: Sequence[Sequence[str]], lark: Lark, field: str) -> None:
    """triggers: in parts. Raises InvalidRequest."""
    for index, parts in enumerate(triggers):
        if len(parts) > 1:
            limit = "it must be ordinary text or one special token; the structure's begin may go on after it"
            raise InvalidRequest(f"{field}.triggers[{index}]", "".join(parts), limit)
    for index, (trigger,) in enumerate(triggers):
        for other, (text,) in enumerate(triggers):
            is_one_kind = lark.is_special(trigger) == lark.is_special(text)
            if index != other and is_one_kind and (trigger == text or (trigger in text and not lark.is_special(text))):
                limit = f"triggers[{index}] is part of it and would always come first; leave one of them out"
                raise InvalidRequest(f"{field}.triggers[{other}]", text, limit)


def _after_trigger(
    begin: Sequence[str], triggers: Sequence[Sequence[str]], lark: Lark, place: str
) -> tuple[int, list[str]]:
    """Index of the trigger that a structure begins with, and the parts of its begin after it. Raises InvalidRequest."""
    first, *others = begin
    for index, (trigger,) in enumerate(triggers):
        if first == trigger or (first.startswith(trigger) and not lark.is_special(first)):
            rest = first.removeprefix(trigger)
            return index, [rest, *others] if rest else others
    raise InvalidRequest(f"{place}.begin", "".join(begin), "it must start with one of the triggers")


def _text_up_to(lark: Lark, index: int, trigger: str) -> str:
    """Expression of free text and the trigger that ends it."""
    if lark.is_special(trigger):
        return f"{_TEXT} {lark.mark(trigger)}"
    name = f"up_to_{index}"
    lark.rule(f"{name}[lazy]", f"{_TEXT} {quoted(trigger)}")
    return name
