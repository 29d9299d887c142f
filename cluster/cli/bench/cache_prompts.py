"""Requests that a shared cache should help with, made up for `paceline bench cache`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cluster.cli.bench.prompts import BenchPrompt

REPEATED, TEMPLATED, EDITS = "repeated", "templated", "edits"

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
class RelatedPrompts:
    """What others have asked before, and what is asked then."""

    name: str
    before: tuple[BenchPrompt, ...]
    asked: tuple[BenchPrompt, ...]


def repeated_prompts(count: int) -> RelatedPrompts:
    """The same requests, word by word."""
    texts = [
        _QUESTIONS[row // len(_SUBJECTS) % len(_QUESTIONS)].format(_SUBJECTS[row % len(_SUBJECTS)])
        + (f" Edition {row}." if row >= len(_QUESTIONS) * len(_SUBJECTS) else "")
        for row in range(count)
    ]
    return RelatedPrompts(REPEATED, _said(REPEATED, "before", texts), _said(REPEATED, "asked", texts))


def templated_prompts(count: int, before: int = 3, seed: int = 0) -> RelatedPrompts:
    """A request of each template with names and numbers in it, after `before` others of the same template."""
    random_ = random.Random(seed)
    known: list[str] = []
    asked: list[str] = []
    for row in range(count):
        template = _TEMPLATES[row % len(_TEMPLATES)]
        names = random_.sample(_NAMES, before + 1)
        things = random_.sample(_THINGS, before + 1)
        texts = [
            template.format(name=name, thing=thing, number=random_.randint(1000, 9999), days=random_.randint(2, 30))
            for name, thing in zip(names, things, strict=True)
        ]
        known += texts[:-1]
        asked.append(texts[-1])
    return RelatedPrompts(TEMPLATED, _said(TEMPLATED, "before", known), _said(TEMPLATED, "asked", asked))


def edit_prompts(count: int, seed: int = 0) -> RelatedPrompts:
    """An edit of a program that is given in the prompt, after another edit of the same program."""
    random_ = random.Random(seed)
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
    return RelatedPrompts(EDITS, _said(EDITS, "before", known), _said(EDITS, "asked", asked))


def story_prompts(task: str, count: int, seed: int) -> tuple[BenchPrompt, ...]:
    """Requests that nobody has made before."""
    random_ = random.Random(seed)
    texts = [
        f"Tell a story about {random_.choice(_NAMES)}, a {random_.choice(_THINGS)} and {random_.choice(_SUBJECTS)}."
        f" Begin with the number {1000 * seed + row}."
        for row in range(count)
    ]
    return _said(task, "asked", texts)


def _program(name: str, fields: list[str]) -> str:
    parameters = ", ".join(f"{field}=0" for field in fields)
    lines = [f"class {name}:", f"    def __init__(self, {parameters}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields[:2]:
        lines += ["", f"    def double_{field}(self):", f"        return 2 * self.{field}"]
    return "\n".join(lines) + "\n"


def _said(task: str, when: str, texts: list[str]) -> tuple[BenchPrompt, ...]:
    return tuple(
        BenchPrompt(f"{task} {when} {row}", task, ({"role": "user", "content": text},))
        for row, text in enumerate(texts)
    )
