"""The kinds of requests of `paceline bench cache`, made up: what a shared cache should help with, and what may harm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import InvalidRequest
from cluster.cli.bench.prompts import BenchPrompt, user_says

REPEATED, TEMPLATED, EDITS, UNRELATED = "repeated", "templated", "edits", "unrelated"
OTHER_TOPIC, STALE, RANDOM = "other-topic", "stale", "random"
KINDS = (REPEATED, TEMPLATED, EDITS, UNRELATED, OTHER_TOPIC, STALE, RANDOM)

_SUBJECTS = ("rainbows", "volcanoes", "bridges", "magnets", "tides", "glaciers", "bees", "clocks", "salt", "deserts")
_QUESTIONS = ("Explain in a few sentences how {} come about.", "Write a short note for children about {}.")
_NAMES = ("Amira", "Bruno", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kira", "Luis")
_THINGS = ("lamp", "kettle", "bicycle", "radio", "backpack", "camera", "ladder", "printer", "tent", "blender")
_TEMPLATES = (
    "Write a letter to {name} about order number {number} of a {thing}: it will arrive {days} days late. Apologise.",
    "Write a product description of a {thing} for a web shop. It costs {number} euros and weighs {days} kilograms.",
    "{name} asks how to return a {thing}, order {number}. Answer politely in steps; it takes {days} days.",
    "Write the minutes of a meeting in which {name} proposed to buy {number} pieces of a {thing} in {days} days.",
)
_FIELDS = ("width", "height", "weight", "price", "speed", "volume", "amount", "length", "depth", "angle")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of requests. Under STALE and RANDOM the cache holds wrong answers to those that are asked."""

    name: str  # also its namespace
    before: tuple[BenchPrompt, ...]  # answered earlier
    asked: tuple[BenchPrompt, ...]


def make_scenarios(
    kinds: Sequence[str], count: int, asked: Sequence[BenchPrompt] = (), before: Sequence[BenchPrompt] = ()
) -> list[Scenario]:
    """Scenarios of `kinds`, all if there are none, with `count` requests each, in the order of `KINDS`. asked, before:
    requests of kind `unrelated`. Raises InvalidRequest for an unknown kind, or `unrelated` without requests."""
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidRequest("kinds", kind, f"it must be one of {', '.join(KINDS)}")
        if kind == UNRELATED and not asked:
            raise InvalidRequest("kinds", kind, "it needs a file of prompts")
    repeated, edits = _repeated(count), _edits(count)
    texts = {
        REPEATED: (repeated, repeated),
        TEMPLATED: _templated(count),
        EDITS: edits,
        OTHER_TOPIC: (edits[0], _stories(count, 3)),
        STALE: ([], _stories(count, 1)),
        RANDOM: ([], _stories(count, 2)),
    }
    scenarios = {
        name: Scenario(name, _prompts(name, "before", first), _prompts(name, "asked", second))
        for name, (first, second) in texts.items()
    }
    scenarios[UNRELATED] = Scenario(UNRELATED, tuple(before), tuple(asked))
    return [scenarios[name] for name in KINDS if name in (kinds or KINDS) and scenarios[name].asked]


def _repeated(count: int) -> list[str]:
    texts = [question.format(subject) for question in _QUESTIONS for subject in _SUBJECTS]
    return [texts[row % len(texts)] + (f" Edition {row}." if row >= len(texts) else "") for row in range(count)]


def _templated(count: int) -> tuple[list[str], list[str]]:
    """(three requests of a template with names and numbers in it, another of the same template) for each row."""
    random_ = random.Random(0)
    known: list[str] = []
    asked: list[str] = []
    for row in range(count):
        pairs = zip(random_.sample(_NAMES, 4), random_.sample(_THINGS, 4), strict=True)
        *others, last = (
            _TEMPLATES[row % len(_TEMPLATES)].format(
                name=name, thing=thing, number=random_.randint(1000, 9999), days=random_.randint(2, 30)
            )
            for name, thing in pairs
        )
        known += others
        asked.append(last)
    return known, asked


def _edits(count: int) -> tuple[list[str], list[str]]:
    """(an edit of a program in the prompt, another edit of the same program) for each row."""
    random_ = random.Random(0)
    known: list[str] = []
    asked: list[str] = []
    for row in range(count):
        fields = random_.sample(_FIELDS, 3)
        program = _program(f"Item{row}", fields)
        for texts, field, suffix in ((known, fields[0], "value"), (asked, fields[1], "total")):
            texts.append(
                f"Here is a Python program:\n\n```python\n{program}```\n\n"
                f"Rename `{field}` to `{field}_{suffix}` everywhere. Write the whole program again, nothing else."
            )
    return known, asked


def _stories(count: int, seed: int) -> list[str]:
    """Requests that have not been made before."""
    random_ = random.Random(seed)
    return [
        f"Tell a story about {random_.choice(_NAMES)}, a {random_.choice(_THINGS)} and {random_.choice(_SUBJECTS)}."
        f" Begin with the number {1000 * seed + row}."
        for row in range(count)
    ]


def _program(name: str, fields: list[str]) -> str:
    parameters = ", ".join(f"{field}=0" for field in fields)
    lines = [f"class {name}:", f"    def __init__(self, {parameters}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields[:2]:
        lines += ["", f"    def double_{field}(self):", f"        return 2 * self.{field}"]
    return "\n".join(lines) + "\n"


def _prompts(task: str, when: str, texts: list[str]) -> tuple[BenchPrompt, ...]:
    return tuple(BenchPrompt(f"{task} {when} {row}", task, user_says(text)) for row, text in enumerate(texts))
