"""Prompts on many subjects, for the text that a draft model is fitted on.

Templates filled with the texts of seed_texts.json, in the proportions of mixed assistant traffic. None is from a
benchmark.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from actors.errors import ModelError

_TEXTS = json.loads(Path(__file__).with_name("seed_texts.json").read_text(encoding="utf-8"))
_TEMPLATES = _TEXTS["templates"]
_TOPICS = _TEXTS["topics"]


def built_in_prompts(seed: int = 0) -> Iterator[str]:
    """An endless, reproducible stream of user prompts."""
    rng = random.Random(seed)
    write, roleplay, summarise, extract = (
        partial(_filled, kind) for kind in ("write", "roleplay", "summarise", "extract")
    )
    kinds = (
        [_question] * 3 + [_explain] * 4 + [write] * 3 + [roleplay] + [_arithmetic] * 4 + [_code] * 3
        + [_translate] * 3 + [summarise] * 4 + [extract]
    )  # fmt: skip
    while True:
        deck = list(kinds)
        rng.shuffle(deck)
        for kind in deck:
            yield kind(rng)


def read_prompts(path: Path) -> list[str]:
    """User prompts from a JSON-lines file: each line a string, or an object with `prompt` or `turns` (first turn).

    Raises ModelError with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also breaks inside texts
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ModelError(f"{path}:{number}: not JSON") from None
        if isinstance(value, dict):
            turns = value.get("turns")
            value = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        if not isinstance(value, str) or not value.strip():
            raise ModelError(f"{path}:{number}: must be a string, or an object with a text under prompt or turns")
        prompts.append(value)
    if not prompts:
        raise ModelError(f"{path}: holds no prompts")
    return prompts


def _question(rng: random.Random) -> str:
    frame, other = rng.choice(_TEMPLATES["question"]), rng.choice(_TEMPLATES["topic_question"])
    return frame.format(rng.choice(_TEXTS["questions"]) if rng.random() < 0.6 else other.format(rng.choice(_TOPICS)))


def _explain(rng: random.Random) -> str:
    return rng.choice(_TEMPLATES["explain"]).format(*rng.sample(_TOPICS, 2))


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 9)
    name, other = rng.sample(_TEXTS["names"], 2)
    values = {"a": a, "b": b, "c": c, "name": name, "other": other, "goods": rng.choice(_TEXTS["goods"])}
    values |= {"paid": b * c + a, "distance": a * 5, "stock": a * c, "result": c * a + b, "percent": b * 5}
    return rng.choice(_TEMPLATES["arithmetic"]).format(**values)


def _code(rng: random.Random) -> str:
    language, task = rng.choice(_TEXTS["code_languages"]), rng.choice(_TEXTS["tasks"])
    return rng.choice(_TEMPLATES["code"]).format(language=language, task=task)


def _translate(rng: random.Random) -> str:
    language, sentence = rng.choice(_TEXTS["foreign"])
    return rng.choice(_TEMPLATES["translate"]).format(language=language, sentence=sentence)


def _filled(kind: str, rng: random.Random) -> str:
    """A template of that kind; each {name} in it is a random one of the texts of that name, or a passage."""

    def fill(field: re.Match[str]) -> str:
        return _passage(rng) if field[1] == "passage" else rng.choice(_TEXTS[field[1]])

    # All are filled, then one is chosen: the order of random numbers is part of a recipe's result.
    return rng.choice([re.sub(r"{(\w+)}", fill, template) for template in _TEMPLATES[kind]])


def _passage(rng: random.Random) -> str:
    events = rng.sample(_TEXTS["events"], rng.choice((1, 1, 2, 3)))
    places, names = _TEXTS["places"], _TEXTS["names"]
    return " ".join(
        event.format(place=rng.choice(places), count=rng.randint(12, 48), name=rng.choice(names)) for event in events
    )
